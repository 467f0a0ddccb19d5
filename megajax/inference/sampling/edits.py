"""Changes of logits before a token is chosen: allowed tokens, biases, penalties.

The order is that of vLLM (vllm/v1/sample/sampler.py, `Sampler`): allowed tokens, forbidden tokens and biases, then the
penalties. All of them also act on greedy rows.
"""

import jax
import jax.numpy as jnp
from jax import Array

from megajax.inference.sampling.rows import Edits
from megajax.inference.sampling.vocabulary import ids_of
from megajax.kernels.cross_entropy import VocabularyShard

WORD = 32
"""Bits of a word of a mask."""


def mask_disallowed(x: Array, allowed: Array, shard: VocabularyShard) -> Array:
    """x float32 [R, V], -inf for ids whose bit is not set in allowed, uint32 [R, W]."""
    ids = ids_of(shard, x.shape[1])
    mask_words = allowed[:, jnp.minimum(ids // WORD, allowed.shape[1] - 1)]
    bits = (mask_words >> (ids % WORD).astype(jnp.uint32)[None]) & 1
    return jnp.where((bits == 1) & (ids < allowed.shape[1] * WORD)[None], x, -jnp.inf)


def add_biases(x: Array, edits: Edits, shard: VocabularyShard) -> Array:
    """x float32 [R, V] with the biases added; -inf as a bias forbids a token."""
    return x.at[_rows(x), _columns(edits.tokens, shard, x.shape[1])].add(edits.biases, mode="drop")


def apply_penalties(x: Array, edits: Edits, tokens: Array, shard: VocabularyShard) -> Array:
    """x float32 [R, V] less the penalties of tokens that the row already has.

    tokens: int32 [R, L], prompt and answer; those at or past `edits.length` are ignored.

    - repetition r (Keskar et al. 2019): the logit of a token of prompt or answer is divided by r if positive, else
      multiplied by it; as RepetitionPenaltyLogitsProcessor of `transformers`.
    - then frequency f and presence p: a logit is lowered by f times the number of times that the answer has the token,
      and by p if it has it; as in the API of OpenAI. The prompt does not count.

    Skipped if no row has a penalty.
    """
    penalized = (edits.repetition != 1) | (edits.presence != 0) | (edits.frequency != 0)
    return jax.lax.cond(penalized.any(), lambda: _with_penalties(x, edits, tokens, shard), lambda: x)


def _with_penalties(x: Array, edits: Edits, tokens: Array, shard: VocabularyShard) -> Array:
    place = jnp.arange(tokens.shape[1])[None]
    present = place < edits.length[:, None]
    columns = _columns(jnp.where(present, tokens, -1), shard, x.shape[1])
    answer = present & (place >= edits.prompt[:, None])
    occurs = jnp.zeros(x.shape, bool).at[_rows(x), columns].set(True, mode="drop")
    counts = jnp.zeros(x.shape, jnp.int32).at[_rows(x), columns].add(answer.astype(jnp.int32), mode="drop")
    repetition = edits.repetition[:, None]
    x = jnp.where(occurs, jnp.where(x > 0, x / repetition, x * repetition), x)
    x = x - edits.frequency[:, None] * counts.astype(x.dtype)
    return x - edits.presence[:, None] * (counts > 0).astype(x.dtype)


def _rows(x: Array) -> Array:
    return jnp.arange(x.shape[0])[:, None]


def _columns(tokens: Array, shard: VocabularyShard, count: int) -> Array:
    """Columns of ids on this device; `count`, which is dropped, for others and for -1."""
    columns = tokens - shard.first
    return jnp.where((tokens >= 0) & (columns >= 0) & (columns < count), columns, count)
