"""Scores of the tokens of a prompt, computed in pieces to limit the memory of logits."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from megajax.inference.sampling.choose import LOGITS, ROW, ROWS, log_sum_exp, scores_of, shard_of
from megajax.inference.sampling.rows import Scores
from megajax.inference.sampling.vocabulary import entries
from megajax.mesh.layout import Layout
from megajax.mesh.mesh import devices_along

PIECE = 64
"""Maximum number of tokens of each replica whose logits exist at the same time."""
STATES = ("batch", None, None)


class PromptScores(NamedTuple):
    """Scores of C tokens of each replica, in pieces of P = min(C, PIECE); see `place`."""

    logprob: Array
    """float32 [pieces, replicas * P]: log-probability under the model, before any setting."""
    scores: Scores
    """Arrays [pieces, replicas * P, ...]."""


def place(token: int, replica: int, count: int) -> tuple[int, int]:
    """(piece, index in the piece) of a token of a replica in `PromptScores`. count: tokens of each replica.

    The last piece ends with the last token, so it may overlap the previous one.
    """
    size = min(count, PIECE)
    piece = token // size
    return piece, replica * size + token - min(piece * size, count - size)


def prompt_scores(
    layout: Layout, size: int, k: int, logits_of: Callable[[Array], Array], states: Array, targets: Array
) -> PromptScores:
    """Scores of the next tokens, and the k most likely tokens at each position.

    logits_of: states [T, 1, D] -> logits float32 [T, V], laid out (batch, vocab); states: [replicas * C, 1, D];
    targets: int32 [replicas * C], the next tokens, -1 where no score is requested. Without any target, nothing is
    computed, and the scores are 0. size: number of ids in use.
    """
    axes, replicas = layout.free_axes("vocab"), devices_along(layout.free_axes("batch"))
    count = targets.shape[0] // replicas
    length = min(count, PIECE)

    def slice_piece(states: Array, targets: Array, first: Array) -> tuple[Array, Array]:
        return lax.dynamic_slice_in_dim(states, first, length), lax.dynamic_slice_in_dim(targets, first, length)

    def score(logits: Array, targets: Array) -> PromptScores:
        shard = shard_of(logits, size, axes)
        raw = jnp.where((shard.first + jnp.arange(logits.shape[1]) < size)[None], logits, -jnp.inf)
        logit, normaliser = shard.sum(entries(raw, targets, shard)), log_sum_exp(raw, shard)
        return PromptScores(logit - normaliser, scores_of(raw, logit, normaliser, k, shard))

    def piece(first: Array) -> PromptScores:
        piece_states, piece_targets = layout.island(slice_piece, (STATES, ROW, ()), (STATES, ROW))(
            states, targets, first
        )
        row: Any = ROW
        several: Any = ROWS
        out: Any = PromptScores(row, Scores(row, several, several))
        return layout.island(score, (LOGITS, ROW), out)(logits_of(piece_states), piece_targets)

    def every() -> PromptScores:
        firsts = [min(first, count - length) for first in range(0, count, length)]
        return lax.map(piece, jnp.asarray(firsts, jnp.int32))

    def nothing() -> PromptScores:
        return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), jax.eval_shape(every))

    return lax.cond((targets >= 0).any(), every, nothing)
