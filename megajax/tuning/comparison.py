"""Scores of a rollout by the trainer: how its engine differs, and the log-probabilities of the reference model."""

from functools import partial
from operator import getitem
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from megajax.batch import Params
from megajax.config.errors import UserError
from megajax.mesh.named_shardings import replicated
from megajax.mesh.processes.peers import Peers
from megajax.training.reference import reference_weights
from megajax.training.scoring import Scorer
from megajax.tuning.config import RolloutsConfig
from megajax.tuning.rows import Block

SCORED = ("tokens", "labels", "positions", "loss_mask", "segment_ids", "padding")
FILE = "reference_weights.npz"


def scores(scorer: Scorer, block: Block, *more: str) -> np.ndarray:
    """The log-probability of each label by the trainer, float32 [R, S]. more: leaves beside SCORED."""
    size, parts = scorer.rows_at_once(scorer.length), list[np.ndarray]()
    rows = [{name: block[name][number] for name in (*SCORED, *more)} for number in range(len(block["tokens"]))]
    for first in range(0, len(rows), size):
        parts.append(scorer.scores(rows[first : first + size])[0])
    return np.concatenate(parts)


def scorer_of(parts: Any) -> Scorer:
    """Scores at the temperature of the loss; its weights are set for each rollout."""
    return Scorer(parts.program, parts.tokenizer, {}, temperature=parts.cfg.model.objective.temperature)


class Comparison:
    """Compares the engine's log-probabilities with the trainer's, and applies what the settings say about them."""

    def __init__(self, parts: Any, cfg: RolloutsConfig):
        self._cfg, self._scorer = cfg, scorer_of(parts)

    def __call__(self, weights: Params, block: Block) -> dict[str, float]:
        """Metrics; changes the block. Raises UserError beyond the limit if it stops the run."""
        cfg, inside = self._cfg, block["loss_mask"] > 0
        if not cfg.compare or not inside.any():
            return {}
        self._scorer.weights = weights
        trainer = np.where(inside, scores(self._scorer, block, *{"experts"} & block.keys()), 0)
        self._scorer.weights = {}  # the next step takes the arrays
        difference = np.where(inside, trainer - block["old_log_p"], 0)
        sizes = np.abs(difference[inside])
        beyond = np.abs(difference) > (np.inf if cfg.mismatch_limit is None else cfg.mismatch_limit)
        if beyond.any() and cfg.on_mismatch == "stop":
            raise UserError(
                f"the log-probability of a token differs by {sizes.max():.3g} between engine and trainer, "
                f"data.mismatch_limit is {cfg.mismatch_limit:g}: raise it, or set data.on_mismatch=mask"
            )
        if cfg.old_log_p == "trainer":
            if cfg.truncation is not None:
                block["advantage"] *= np.minimum(np.exp(difference), cfg.truncation)
            block["old_log_p"] = trainer
        block["loss_mask"][beyond] = 0
        return {
            "mismatch_mean": float(sizes.mean()),
            "mismatch_most": float(sizes.max()),
            "mismatch_ratio": float(np.exp(sizes).mean()),
            "mismatch_equal": float((sizes == 0).mean()),
            "mismatch_masked": float(beyond[inside].mean()),
        }


class Reference:
    """The reference model: the weights that the run starts from, or the frozen ones below low-rank adapters."""

    def __init__(self, parts: Any):
        self._parts, self._scorer, self._peers = parts, scorer_of(parts), Peers()
        self._weights: Params | None = None

    def __call__(self, weights: Params, block: Block, *, new: bool) -> np.ndarray:
        """Its log-probabilities, float32 [R, S]. new: whether the run starts with these weights.

        Raises UserError for a run that resumes without the file of the reference weights.
        """
        if self._parts.program.adapters:
            self._scorer.weights = reference_weights(self._parts.program, weights)
        else:
            self._weights = self._weights or (self._stored(weights) if new else self._read(weights))
            self._scorer.weights = self._weights
        log_p = scores(self._scorer, block)
        self._scorer.weights = {}
        return np.where(block["loss_mask"] > 0, log_p, 0)

    @property
    def _path(self) -> Path:
        return Path(self._parts.cfg.run_dir).expanduser() / FILE

    def _stored(self, weights: Params) -> Params:
        """Copies of the weights, which process 0 stores."""
        whole, arrays = jax.jit(lambda x: x, out_shardings=replicated(self._parts.program.mesh)), dict[str, Any]()
        for path, x in weights.items():
            arrays[path] = np.asarray(whole(x)) if self._peers.first else whole(x).shape
        writes = self._peers.first and self._path.parent.is_dir()
        self._peers.check((lambda: np.savez(self._path, **arrays)) if writes else lambda: None)
        return {path: jnp.copy(x) for path, x in weights.items()}

    def _read(self, weights: Params) -> Params:
        stored = dict[str, Array]()

        def read() -> None:
            try:
                with np.load(self._path, allow_pickle=False) as file:
                    for path, x in weights.items():
                        whole = file[path].view(x.dtype)
                        stored[path] = jax.make_array_from_callback(x.shape, x.sharding, partial(getitem, whole))
            except (OSError, KeyError, ValueError) as error:
                raise UserError(
                    f"{self._path}: the run resumes, and the weights of its reference model cannot be read ({error}): "
                    "put the file back, or start a new run"
                ) from error

        self._peers.check(read)
        return stored
