"""Scores of a rollout by the trainer: how its engine differs, and the log-probabilities of the reference model."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from megajax.batch import Params
from megajax.config.errors import UserError
from megajax.mesh.named_shardings import replicated
from megajax.processes.peers import Peers
from megajax.storage.index_cache import atomic_write
from megajax.storage.write_errors import write_fault
from megajax.training.reference import Reference as KeptReference
from megajax.training.reference import kept_checksum, reference_weights, weights_checksum
from megajax.training.scorer import Scorer
from megajax.training.session import Parts
from megajax.tuning.config import RolloutsConfig
from megajax.tuning.rollout_rows import ScoredRows

SCORED = ("tokens", "labels", "positions", "loss_mask", "segment_ids", "padding")
FILE = "reference_weights.npz"
REMEDY = "put back the file of this run, or start a new run"


def scores(scorer: Scorer, block: ScoredRows, *more: str) -> np.ndarray:
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

    def __init__(self, parts: Parts, cfg: RolloutsConfig):
        self._cfg, self._scorer = cfg, scorer_of(parts)

    def __call__(self, weights: Params, block: ScoredRows) -> dict[str, float]:
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


class StartingWeights:
    """The reference model: the weights that the run starts from, or the frozen ones below low-rank adapters.

    A run keeps them in a file of its folder, with layers in their order, and their checksum in the metadata of its
    steps.
    """

    def __init__(self, parts: Parts):
        self._parts, self._scorer, self._peers = parts, scorer_of(parts), Peers()
        self._declared, self._weights = parts.program.arrays, dict[str, Array]()

    def __call__(self, weights: Params, block: ScoredRows, *, new: bool) -> np.ndarray:
        """Its log-probabilities, float32 [R, S]. new: whether the run starts with these weights."""
        if self._parts.program.adapters:
            self._scorer.weights = reference_weights(self._parts.program, weights)
        else:
            if not self._weights and not new:
                raise UserError("the weights of the reference model are gone: resume the run with megajax.train")
            self._weights = self._weights or copies(weights)
            self._scorer.weights = self._weights
        log_p = scores(self._scorer, block)
        self._scorer.weights = {}
        return np.where(block["loss_mask"] > 0, log_p, 0)

    def keep(self, weights: Params, folder: Path, expected: str | None) -> KeptReference | None:
        """Store the weights of a new run, or read those of a run that resumes; None: the state has them.

        expected: as in `megajax.training.reference.attach_reference`. Raises UserError for a file that can't be read
        or written, or has other weights. A collective.
        """
        if self._parts.program.adapters:
            return None
        path, expected = folder / FILE, kept_checksum(expected, self._parts.program)
        self._weights = self._read(path, weights) if expected else copies(weights)
        checksum = weights_checksum(self._weights, self._declared)
        if expected is None:
            self._write(path)
        elif checksum != expected:
            what = f"it has the weights {checksum}, and those of the run's reference model are {expected}"
            raise UserError(f"{path}: {what}: {REMEDY}")
        return KeptReference(checksum, (path,), None)

    def _write(self, path: Path) -> None:
        """Process 0 writes the file."""
        whole, arrays = jax.jit(lambda x: x, out_shardings=replicated(self._parts.program.mesh)), dict[str, Any]()
        for name, x in self._weights.items():
            array = whole(x)
            if self._peers.first:
                rows, values = layer_rows(self._declared[name].layers), np.asarray(array)
                arrays[name] = values if rows is None else values[rows]

        def write() -> None:
            for left in path.parent.glob(f"{FILE}.*.tmp"):  # by a killed process
                left.unlink(missing_ok=True)
            try:
                with atomic_write(path) as file:
                    np.savez(file, **arrays)
            except OSError as error:
                raise UserError(f"{path}: cannot be written: {write_fault(error)}") from error

        self._peers.check(write if self._peers.first else lambda: None)

    def _read(self, path: Path, weights: Params) -> dict[str, Array]:
        stored = dict[str, Array]()

        def read() -> None:
            try:
                with np.load(path, allow_pickle=False) as file:
                    for name, x in weights.items():
                        whole, rows = np.zeros(x.shape, x.dtype), layer_rows(self._declared[name].layers)
                        place, values = ... if rows is None else rows, file[name].view(x.dtype)
                        if values.shape != whole[place].shape:
                            raise ValueError(f"{name} has the shape {values.shape}, not {whole[place].shape}")
                        whole[place] = values
                        stored[name] = jax.make_array_from_callback(x.shape, x.sharding, whole.__getitem__)
            except Exception as error:  # of many kinds, for damaged files
                cause = f"{type(error).__name__}: {str(error)[:200]}"
                raise UserError(
                    f"{path}: the run resumes, and its reference model can't be read ({cause}): {REMEDY}"
                ) from error

        self._peers.check(read)
        return stored


def copies(weights: Params) -> dict[str, Array]:
    """The weights in buffers of their own: a step takes those of its state."""
    return {path: jnp.copy(x) for path, x in weights.items()}


def layer_rows(layers: Sequence[int]) -> np.ndarray | None:
    """The rows of stacked weights in the order of the layers, without padding; None: the array is not stacked."""
    rows = sorted((layer, row) for row, layer in enumerate(layers) if layer >= 0)
    return np.array([row for _, row in rows]) if rows else None
