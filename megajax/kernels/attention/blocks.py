"""Attention for CPUs: a key-value head of a few rows at a time, in blocks of queries that read only the keys they see.

The scores of a block exist at a time and not those of all rows and heads, so that softmax and its backward pass read
them from a cache; blocks of keys that no query of a block sees, by the causal mask or the window of whole rows, are
neither multiplied nor exponentiated. The backward pass computes the weights again from the log-sum-exp (Dao et al.
2022, "FlashAttention", whose running softmax it does not need: a block has all its keys).

B rows, S queries, T keys, N query heads, K key-value heads, G = N/K query heads of each, H head size, U size of a value
head; s and t queries and keys of a block.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array, lax

from megajax.kernels.attention.dropout import AttentionDropout
from megajax.kernels.attention.mask import Mask
from megajax.kernels.soft_cap import soft_cap_slope, soft_capped

BLOCK = 64
"""Queries of a block in rows up to BLOCK * BLOCKS; longer rows have larger blocks."""
BLOCKS = 16
"""Blocks of a row at most: each is compiled by itself."""
ROWS = 4
"""Rows of one turn of the loop over rows: XLA divides the work of a turn over the cores, and small turns not at all."""


class _Block(NamedTuple):
    """A block of queries, and the keys it reads."""

    queries: slice
    keys: slice


class _Row(NamedTuple):
    """What belongs to a row."""

    query_segments: Array | None
    """int32 [S]."""
    key_segments: Array | None
    """int32 [T]."""
    dropout_key: Array | None
    """uint32 [2]."""


def _blocks(mask: Mask, queries: int, keys: int, whole: bool) -> Iterator[_Block]:
    """whole: query i and key i are at position i of their row, so that positions are known while tracing."""
    size = BLOCK * -(-queries // (BLOCK * BLOCKS))
    for start in range(0, queries, size):
        stop = min(start + size, queries)
        first = max(0, start - mask.window) // BLOCK * BLOCK if whole and mask.window is not None else 0
        yield _Block(slice(start, stop), slice(first, stop if whole and mask.causal else keys))


class _Unit(NamedTuple):
    """One key-value head of a row: what its forward and backward pass share."""

    mask: Mask
    row: _Row
    dropout: AttentionDropout | None
    """Of this row and this head's queries."""
    scale: float
    cap: float | None

    def visible(self, block: _Block) -> Array:
        """bool [s, t]."""
        segments = (
            (None, None)
            if self.row.query_segments is None or self.row.key_segments is None
            else (self.row.query_segments[None, block.queries], self.row.key_segments[None, block.keys])
        )
        index = self.mask.query_index[block.queries], self.mask.key_index[block.keys]
        return Mask(*index, *segments, self.mask.window, self.mask.causal, self.mask.padded).visible()[0]

    def scores(self, q: Array, k: Array, block: _Block) -> Array:
        """float32 [G, s, t], soft-capped, not masked. q [G, S, H], k [T, H]."""
        product = partial(jnp.einsum, preferred_element_type=jnp.float32)
        return soft_capped(product("gsh,th->gst", q[:, block.queries], k[block.keys]) * self.scale, self.cap)

    def factors(self, block: _Block) -> Array | float:
        """Dropout's factors of weights, float32 [G, s, t]."""
        if self.dropout is None:
            return 1.0
        part = self.dropout._replace(query_index=self.dropout.query_index[block.queries])
        return part.factor(self.mask.key_index[block.keys])[0]


def _by_head(x: Array, groups: int) -> Array:
    """[B, S, N, H] -> [B, K, G, S, H]."""
    return x.reshape(*x.shape[:2], groups, -1, x.shape[-1]).transpose(0, 2, 3, 1, 4)


def _of_head(x: Array) -> Array:
    """[B, K, G, S, H] -> [B, S, N, H]."""
    batch, groups, heads, length, size = x.shape
    return x.transpose(0, 3, 1, 2, 4).reshape(batch, length, groups * heads, size)


def _over_units(
    compute: Callable[..., Any],
    arrays: tuple[Array, ...],
    mask: Mask,
    dropout: AttentionDropout | None,
    scale: float,
    cap: float | None,
) -> Any:
    """compute(unit, *arrays of the unit) for every row and key-value head; arrays [B, K, ...], also of the results."""
    groups = arrays[0].shape[1]
    heads = None if dropout is None else dropout.head_index.reshape(groups, -1)
    row = _Row(mask.query_segments, mask.key_segments, None if dropout is None else dropout.row_keys)

    def of_row(turn: tuple[tuple[Array, ...], _Row]) -> Any:
        arrays, row = turn

        def of_head(turn: tuple[tuple[Array, ...], Array | None]) -> Any:
            arrays, names = turn
            drop = None
            if dropout is not None and row.dropout_key is not None and names is not None:
                drop = dropout._replace(row_keys=row.dropout_key[None], head_index=names)
            return compute(_Unit(mask, row, drop, scale, cap), *arrays)

        return lax.map(of_head, (arrays, heads))

    return lax.map(of_row, (arrays, row), batch_size=min(ROWS, arrays[0].shape[0]))


def forward(
    q: Array,
    k: Array,
    v: Array,
    mask: Mask,
    *,
    scale: float,
    dropout: AttentionDropout | None = None,
    cap: float | None = None,
    whole: bool = False,
) -> tuple[Array, Array]:
    """The output [B, S, N, U] and its log-sum-exp, float32 [B, N, S]; 0 and -inf where no key is visible.

    whole: rows are whole and in the order of their positions: a block leaves out the keys that its mask excludes.
    """
    length, keys, groups = q.shape[1], k.shape[1], k.shape[2]

    def compute(unit: _Unit, q: Array, k: Array, v: Array) -> tuple[Array, Array]:
        outs, sums = [], []
        for block in _blocks(mask, length, keys, whole):
            visible = unit.visible(block)
            scores = jnp.where(visible, unit.scores(q, k, block), -jnp.inf)
            highest = scores.max(-1, keepdims=True)
            weights = jnp.exp(scores - jnp.where(jnp.isneginf(highest), 0, highest))
            total = weights.sum(-1, keepdims=True)
            mixed = (weights * unit.factors(block)).astype(v.dtype)
            mixed = jnp.einsum("gst,tu->gsu", mixed, v[block.keys], preferred_element_type=jnp.float32)
            outs.append((mixed / jnp.where(total > 0, total, 1)).astype(q.dtype))
            sums.append((highest + jnp.log(total))[..., 0])
        return jnp.concatenate(outs, 1), jnp.concatenate(sums, 1)

    arrays = _by_head(q, groups), k.swapaxes(1, 2), v.swapaxes(1, 2)
    out, log_sum = _over_units(compute, arrays, mask, dropout, scale, cap)
    return _of_head(out), log_sum.reshape(q.shape[0], q.shape[2], length)


def backward(
    q: Array,
    k: Array,
    v: Array,
    mask: Mask,
    out: Array,
    lse: Array,
    dout: Array,
    *,
    scale: float,
    dropout: AttentionDropout | None = None,
    cap: float | None = None,
    whole: bool = False,
) -> tuple[Array, Array, Array]:
    """Gradients with respect to q, k and v, from the output [B, S, N, U], its log-sum-exp [B, N, S] and its gradient.

    out and lse may come from a softmax over more keys than these, as in `reference_backward`.
    """
    length, keys, groups = q.shape[1], k.shape[1], k.shape[2]
    product = partial(jnp.einsum, preferred_element_type=jnp.float32)

    def compute(
        unit: _Unit, q: Array, k: Array, v: Array, dout: Array, delta: Array, lse: Array
    ) -> tuple[Array, Array, Array]:
        dq, dk, dv = [], jnp.zeros((k.shape[-1], keys), jnp.float32), jnp.zeros((v.shape[-1], keys), jnp.float32)
        for block in _blocks(mask, length, keys, whole):
            visible, scores = unit.visible(block), unit.scores(q, k, block)
            weights = jnp.where(visible, jnp.exp(scores - lse[:, block.queries, None]), 0)
            factors, part = unit.factors(block), dout[:, block.queries]
            dweights = product("gsu,tu->gst", part, v[block.keys]) * factors
            dscores = weights * (dweights - delta[:, block.queries, None]) * scale
            dscores = dscores if cap is None else dscores * soft_cap_slope(jnp.where(visible, scores, 0), cap)
            dscores, weights = dscores.astype(k.dtype), (weights * factors).astype(dout.dtype)
            dq.append(product("gst,th->gsh", dscores, k[block.keys]).astype(q.dtype))
            # Summed with the keys last: as [H, T] the product of a block needs no transposed copy of its scores.
            dk = dk.at[:, block.keys].add(product("gsh,gst->ht", q[:, block.queries], dscores))
            dv = dv.at[:, block.keys].add(product("gsu,gst->ut", part, weights))
        return jnp.concatenate(dq, 1), dk.T.astype(k.dtype), dv.T.astype(v.dtype)

    delta = jnp.einsum("bsnu,bsnu->bns", out.astype(jnp.float32), dout.astype(jnp.float32))
    split = q.shape[0], groups, -1, length
    arrays = _by_head(q, groups), k.swapaxes(1, 2), v.swapaxes(1, 2), _by_head(dout, groups)
    arrays = *arrays, delta.reshape(split), lse.reshape(split)
    dq, dk, dv = _over_units(compute, arrays, mask, dropout, scale, cap)
    return _of_head(dq), dk.swapaxes(1, 2), dv.swapaxes(1, 2)
