"""The choice of the next token of each row, on the device, from logits whose vocabulary may be sharded."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from megajax.inference.sampling.edits import add_biases, apply_penalties, mask_disallowed
from megajax.inference.sampling.filters import keep_mask
from megajax.inference.sampling.rows import Chosen, Drawing, Program, RowSampling, Scores
from megajax.inference.sampling.vocabulary import best, entries, ids_of
from megajax.kernels.cross_entropy import VocabularyShard
from megajax.mesh.layout import Layout

LOGITS, ROW, ROWS = ("batch", "vocab"), ("batch",), ("batch", None)


def choose(
    layout: Layout, size: int, program: Program, k: int, logits: Array, rows: RowSampling, tokens: Array | None = None
) -> Chosen:
    """The next token of each row and its log-probability; for Program.FULL, its rank and the k most likely tokens.

    size: number of ids in use; later columns are padding. logits: float32 [R, V], laid out (batch, vocab), V divisible
    by the devices of `vocab`. rows: must have what `program` reads. tokens: int32 [R, L], prompt and answer of each
    row, required for Program.FULL.

    Sampling uses the Gumbel-max method: a token is the argmax of logits / temperature + noise. The noise depends only
    on the row's seed, the number of the token and the id, so a row's token does not depend on other rows or on the
    sharding of the vocabulary.
    """
    noise = None if rows.drawing is None else layout.act(_noise(rows.drawing, logits.shape[1]), *LOGITS)
    axes = layout.free_axes("vocab")
    row: Any = ROW
    several: Any = ROWS
    out: Any = Chosen(row, row, row, Scores(row, several, several) if program == Program.FULL else None)

    def local(logits: Array, noise: Array | None, rows: RowSampling, tokens: Array | None) -> Chosen:
        return _choose(shard_of(logits, size, axes), program, k, logits, noise, rows, tokens)

    ins = LOGITS, None if noise is None else LOGITS, jax.tree.map(_axes, rows), None if tokens is None else ROWS
    return layout.island(local, ins, out)(logits, noise, rows, tokens)


def shard_of(logits: Array, size: int, axes: tuple[str, ...]) -> VocabularyShard:
    """The columns of this device, inside an island."""
    return VocabularyShard(lax.axis_index(axes) * logits.shape[1] if axes else 0, size, axes)


def _axes(array: Array) -> tuple[str | None, ...]:
    return ("batch", *[None] * (array.ndim - 1))


def _choose(
    shard: VocabularyShard,
    program: Program,
    k: int,
    logits: Array,
    noise: Array | None,
    rows: RowSampling,
    tokens: Array | None,
) -> Chosen:
    used = (ids_of(shard, logits.shape[1]) < shard.size)[None]
    raw = jnp.where(used, logits, -jnp.inf)
    finite = shard.sum((used & ~jnp.isfinite(logits)).sum(-1, dtype=jnp.int32)) == 0
    x = raw
    if program == Program.FULL:
        if rows.edits is None or tokens is None:
            raise ValueError("Program.FULL needs the edits and tokens of the rows")
        x = add_biases(mask_disallowed(x, rows.edits.allowed, shard), rows.edits, shard)
        x = apply_penalties(x, rows.edits, tokens, shard)
    top, first = best(x, 1, shard)
    token = first[:, 0]
    if program >= Program.SAMPLED:
        if rows.drawing is None or noise is None:
            raise ValueError(f"Program.{program.name} needs to know how the rows draw")
        token = jnp.where(rows.drawing.temperature > 0, _sample_tokens(x, top, noise, rows.drawing, shard), token)
    normaliser = log_sum_exp(raw, shard)
    logit = shard.sum(entries(raw, token, shard))
    scores = scores_of(raw, logit, normaliser, k, shard) if program == Program.FULL else None
    usable = finite & (top[:, 0] > -jnp.inf)
    return Chosen(jnp.where(usable, token, -1), logit - normaliser, finite, scores)


def _sample_tokens(x: Array, top: Array, noise: Array, drawing: Drawing, shard: VocabularyShard) -> Array:
    """Tokens int32 [R] sampled from softmax(x / temperature) over the kept tokens. top: float32 [R, 1], max of x."""
    temperature = jnp.where(drawing.temperature > 0, drawing.temperature, 1)[:, None]
    # Subtract the maximum first: at a tiny temperature, the other quotients become -inf, and the maximum stays 0.
    scaled = jnp.where(x > -jnp.inf, (x - top) / temperature, -jnp.inf)
    _, ids = best(jnp.where(keep_mask(scaled, drawing, shard), scaled + noise, -jnp.inf), 1, shard)
    return ids[:, 0]


def _noise(drawing: Drawing, count: int) -> Array:
    """Standard Gumbel noise, float32 [R, V], a function of the key fold_in(seed, number) of each row and the id.

    The bits of an id are a keyed hash, with the finalizer of MurmurHash3 as its rounds; threefry for every id takes
    four times as long. They are mapped to -log(-log(1 - v)) of v in (0, 1), which is accurate in float32 for small v,
    where the noise is largest.
    """
    keys = jax.vmap(partial(jax.random.wrap_key_data, impl="threefry2x32"))(drawing.seed)
    data = jax.vmap(lambda key, number: jax.random.key_data(jax.random.fold_in(key, number)))(keys, drawing.number)
    ids = jnp.arange(count, dtype=jnp.uint32)[None]
    bits = _mixed(_mixed(ids ^ data[:, :1]) + data[:, 1:])
    v = jnp.minimum((bits.astype(jnp.float32) + 0.5) * 2.0**-32, 1 - 2.0**-24)
    # XLA:CPU would fuse it into the argmax, where it is not vectorized: 60 instead of 20 ms for 2^20 ids.
    return lax.optimization_barrier(-jnp.log(-jnp.log1p(-v)))


def _mixed(x: Array) -> Array:
    """A bijection of uint32 in which every bit of x affects every bit of the result."""
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        x = (x ^ (x >> shift)) * jnp.uint32(factor)
    return x ^ (x >> 16)


def log_sum_exp(x: Array, shard: VocabularyShard) -> Array:
    """logsumexp of each row of x [R, V] over all devices, float32 [R]."""
    maximum = shard.max(x.max(-1))
    return maximum + jnp.log(shard.sum(jnp.exp(x - maximum[:, None]).sum(-1)))


def scores_of(x: Array, logit: Array, normaliser: Array, k: int, shard: VocabularyShard) -> Scores:
    """Rank of the tokens with these logits [R] in the rows of x [R, V], and the k most likely tokens."""
    rank = 1 + shard.sum((x > logit[:, None]).sum(-1, dtype=jnp.int32))
    values, ids = best(x, k, shard)
    return Scores(rank, ids, values - normaliser[:, None])
