"""Rewards by a model: a classifier's score of a prompt and an answer, computed on the mesh of the run."""

from collections.abc import Sequence
from math import ceil
from typing import Any

import jax
import numpy as np
from jax import Array
from jax.sharding import NamedSharding

from megajax.config.errors import UserError
from megajax.inference.loaded_model import LoadedModel
from megajax.mesh.config import BATCH_AXES, devices_over
from megajax.mesh.named_shardings import replicated
from megajax.tuning.rows import Answer

MOST_TOKENS = 16384
"""Limit of the tokens that a device scores at a time, unless a single row has more."""


class RewardModel:
    """Scores answers. All processes call it in the same order, with the same answers."""

    def __init__(self, loaded: LoadedModel, slot: int, answers: int):
        """loaded: a classifier with one score for each sequence; slot: tokens of a prompt and its answer; answers:
        usual number of a call. Raises UserError for a model whose rows are shorter."""
        cfg = loaded.cfg
        if slot > cfg.sequence_length:
            raise UserError(
                f"data.reward_model reads {cfg.sequence_length} tokens, data.prompt_tokens + data.max_tokens are "
                f"{slot}: lower them, or take another model"
            )
        sequences, shards = cfg.head.sequences(), devices_over(loaded.mesh.shape, BATCH_AXES)
        rows = min(ceil(answers / sequences / shards), max(1, MOST_TOKENS // (slot * sequences)))
        self._loaded, self._shape = loaded, (shards * rows, sequences, slot)
        self._sharding = NamedSharding(loaded.mesh, loaded.layout.plan.compute.spec(("batch", None, None)))

        def scores(weights: Any, tokens: Array, segments: Array) -> Array:
            # A model of single sequences reads [B, S].
            leaves = (x if sequences > 1 else x[:, 0] for x in (tokens, segments))
            return loaded.bound(weights)(next(leaves), segment_ids=next(leaves)).reshape(-1)

        self._scores = jax.jit(scores, out_shardings=replicated(loaded.mesh), compiler_options=dict(loaded.options))

    def __call__(self, answers: Sequence[Answer]) -> list[float]:
        """The score of each answer after its prompt."""
        rows, sequences, slot = self._shape
        size, results = rows * sequences, list[float]()
        for first in range(0, len(answers), size):
            tokens, segments = (np.zeros((size, slot), np.int32) for _ in range(2))
            part = answers[first : first + size]
            for number, answer in enumerate(part):
                text = (*answer.prompt, *answer.tokens)
                tokens[number, : len(text)], segments[number, : len(text)] = text, 1
            loaded, placed = self._loaded, [self._placed(x.reshape(self._shape)) for x in (tokens, segments)]
            with jax.set_mesh(loaded.mesh), jax.default_matmul_precision(loaded.matmul_precision):
                results += np.asarray(self._scores(loaded.weights, *placed))[: len(part)].tolist()
        return results

    def _placed(self, rows: np.ndarray) -> Array:
        return jax.make_array_from_callback(rows.shape, self._sharding, lambda index: rows[index])
