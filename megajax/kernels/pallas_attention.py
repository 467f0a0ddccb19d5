"""Attention that holds no scores, as kernels of our own: forward, and backward in two kernels without atomics.

Blocks of scores live in registers while a program walks over the keys of one block of queries (Dao 2023, algorithms 1
and 2). Which blocks it walks over is found beforehand from places and documents, so that blocks no query of which sees
a key, before the window, after the diagonal or in other documents, cost nothing. Sums are in float32 in one order: the
same inputs give the same bits.

A head of 192 is computed as 128 + 64: Triton's tiles are powers of two.

B rows, S queries, T keys, N query heads, K key-value heads (N a multiple of K), H head size, U size of a value head.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from megajax.kernels.mask import Mask

LOG2_E = 1 / 0.6931471805599453
NOWHERE = -(2**31)
"""Document of positions that only fill a block up, among the queries; among the keys it is the next number."""


class Blocks(NamedTuple):
    """Sizes of tiles, powers of two from 16 on, and how many warps work on one."""

    queries: int
    keys: int
    warps: int

    def within(self, queries: int, keys: int) -> "Blocks":
        """No larger than the rows need."""
        return Blocks(min(self.queries, _power(queries)), min(self.keys, _power(keys)), self.warps)


def _power(length: int) -> int:
    return max(16, 1 << (length - 1).bit_length())


def blocks_for(size: int) -> tuple[Blocks, Blocks]:
    """Tiles of the forward and of the backward kernels for heads of this size, within an A100's shared memory."""
    if size <= 64:
        return Blocks(128, 64, 4), Blocks(64, 64, 4)
    if size <= 128:
        return Blocks(128, 64, 8), Blocks(64, 64, 8)
    return Blocks(64, 32, 8), Blocks(32, 32, 4)


def _parts(size: int) -> tuple[tuple[int, int], ...]:
    """(first, size) of each power of two a head is made of: 192 -> (0, 128), (128, 64)."""
    found, first = [], 0
    for bit in reversed(range(size.bit_length())):
        if size >> bit & 1:
            found.append((first, 1 << bit))
            first += 1 << bit
    return tuple(found)


class _Walk(NamedTuple):
    """Of a mask, cut into blocks: what each position is, and the blocks that may see each other."""

    query_index: Array
    """int32 [S], filled up to whole blocks, as are the next three."""
    key_index: Array
    query_segments: Array
    key_segments: Array
    keys_of: Array
    """int32 [B, 2, blocks of queries]: first block of keys that is seen, and the one after the last."""
    queries_of: Array
    """int32 [B, 2, blocks of keys]."""


def _walk(mask: Mask, rows: int, blocks: Blocks) -> _Walk:
    def filled(x: Array, block: int, value: int) -> Array:
        short = -x.shape[-1] % block
        return jnp.pad(x.astype(jnp.int32), [(0, 0)] * (x.ndim - 1) + [(0, short)], constant_values=value)

    if mask.query_segments is None or mask.key_segments is None:
        one = jnp.zeros((rows, 1), jnp.int32)
        queries = jnp.broadcast_to(one, (rows, mask.query_index.shape[0]))
        keys = jnp.broadcast_to(one, (rows, mask.key_index.shape[0]))
    else:
        queries, keys = mask.query_segments, mask.key_segments
    query_segments, key_segments = filled(queries, blocks.queries, NOWHERE), filled(keys, blocks.keys, NOWHERE + 1)
    query_index, key_index = filled(mask.query_index, blocks.queries, 0), filled(mask.key_index, blocks.keys, 0)

    def ends(x: Array, block: int) -> tuple[Array, Array]:
        cut = x.reshape(*x.shape[:-1], x.shape[-1] // block, block)
        return cut.min(-1), cut.max(-1)

    q_low, q_high = ends(query_index, blocks.queries)
    k_low, k_high = ends(key_index, blocks.keys)
    seen = jnp.ones((q_low.shape[0], k_low.shape[0]), bool)
    if mask.causal:
        seen &= q_high[:, None] >= k_low[None, :]
    if mask.window is not None:
        seen &= q_low[:, None] - k_high[None, :] <= mask.window
    q_low, q_high = ends(query_segments, blocks.queries)
    k_low, k_high = ends(key_segments, blocks.keys)
    seen = seen[None] & (q_high[:, :, None] >= k_low[:, None, :]) & (q_low[:, :, None] <= k_high[:, None, :])

    def ranges(seen: Array) -> Array:
        """bool [B, X, Y] -> int32 [B, 2, X]: from the first that is seen to behind the last; 0 to 0 for none."""
        any_seen, count = seen.any(-1), seen.shape[-1]
        first = jnp.where(any_seen, seen.argmax(-1), 0)
        last = jnp.where(any_seen, count - seen[..., ::-1].argmax(-1), 0)
        return jnp.stack([first, last], axis=1).astype(jnp.int32)

    return _Walk(query_index, key_index, query_segments, key_segments, ranges(seen), ranges(jnp.swapaxes(seen, 1, 2)))


def _fill(x: Array, length: int) -> Array:
    """Zeros behind the positions, dimension 1, up to `length`."""
    return jnp.pad(x, [(0, 0), (0, length - x.shape[1])] + [(0, 0)] * (x.ndim - 2)) if x.shape[1] < length else x


def _dot(x: Array, y: Array) -> Array:
    """Matmul with float32 sums; operands in float32 keep all their bits."""
    exact = lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    return jnp.dot(x, y, preferred_element_type=jnp.float32, precision=exact)


def _seen(qi: Array, ki: Array, qs: Array, ks: Array, mask: Mask) -> Array:
    seen = qs[:, None] == ks[None, :]
    before = qi[:, None] - ki[None, :]
    seen = seen & (before >= 0) if mask.causal else seen
    return seen if mask.window is None else seen & (before <= mask.window)


def _head(ref: Any, start: Any, block: int, size: int, *head: Any) -> list[Array]:
    """Parts of a block's heads, each [block, part]; `head` says which head where the block has several."""
    return [ref[(pl.ds(start, block), *head, pl.ds(first, part))] for first, part in _parts(size)]


def _scores(q: list[Array], k: list[Array]) -> Array:
    return sum((_dot(x, y.T) for x, y in zip(q, k, strict=True)), start=jnp.float32(0))


def _forward_kernel(
    q_ref: Any, k_ref: Any, v_ref: Any, qi_ref: Any, ki_ref: Any, qs_ref: Any, ks_ref: Any, range_ref: Any,
    out_ref: Any, lse_ref: Any, *, mask: Mask, scale: float, blocks: Blocks, sizes: tuple[int, int],
) -> None:  # fmt: skip
    place = pl.program_id(0)
    q = _head(q_ref, 0, blocks.queries, sizes[0])
    qi, qs = qi_ref[...], qs_ref[...]

    def step(j: Array, carry: tuple) -> tuple:
        highest, total, sums = carry
        start = j * blocks.keys
        here = pl.ds(start, blocks.keys)
        s = _scores(q, _head(k_ref, start, blocks.keys, sizes[0])) * (scale * LOG2_E)
        s = jnp.where(_seen(qi, ki_ref[here], qs, ks_ref[here], mask), s, -jnp.inf)
        higher = jnp.maximum(highest, s.max(1))
        finite = jnp.where(higher == -jnp.inf, 0.0, higher)
        p, shrink = jnp.exp2(s - finite[:, None]), jnp.exp2(highest - finite)
        v = _head(v_ref, start, blocks.keys, sizes[1])
        sums = tuple(a * shrink[:, None] + _dot(p.astype(x.dtype), x) for a, x in zip(sums, v, strict=True))
        return higher, total * shrink + p.sum(1), sums

    start = (
        jnp.full((blocks.queries,), -jnp.inf, jnp.float32),
        jnp.zeros((blocks.queries,), jnp.float32),
        tuple(jnp.zeros((blocks.queries, part), jnp.float32) for _, part in _parts(sizes[1])),
    )
    highest, total, sums = lax.fori_loop(range_ref[0, place], range_ref[1, place], step, start)
    lse_ref[...] = jnp.where(total > 0, (highest + jnp.log2(total)) / LOG2_E, -jnp.inf)
    divisor = jnp.where(total > 0, total, 1.0)[:, None]
    for (first, part), a in zip(_parts(sizes[1]), sums, strict=True):
        out_ref[:, pl.ds(first, part)] = (a / divisor).astype(out_ref.dtype)


def _query_kernel(
    q_ref: Any, k_ref: Any, v_ref: Any, qi_ref: Any, ki_ref: Any, qs_ref: Any, ks_ref: Any, range_ref: Any,
    dout_ref: Any, lse_ref: Any, delta_ref: Any, dq_ref: Any, *,
    mask: Mask, scale: float, blocks: Blocks, sizes: tuple[int, int],
) -> None:  # fmt: skip
    place = pl.program_id(0)
    q, dout = _head(q_ref, 0, blocks.queries, sizes[0]), _head(dout_ref, 0, blocks.queries, sizes[1])
    qi, qs, lse, delta = qi_ref[...], qs_ref[...], lse_ref[...], delta_ref[...]

    def step(j: Array, sums: tuple) -> tuple:
        start = j * blocks.keys
        here = pl.ds(start, blocks.keys)
        k, v = _head(k_ref, start, blocks.keys, sizes[0]), _head(v_ref, start, blocks.keys, sizes[1])
        p = jnp.exp2((_scores(q, k) * scale - lse[:, None]) * LOG2_E)
        p = jnp.where(_seen(qi, ki_ref[here], qs, ks_ref[here], mask), p, 0.0)
        ds = (p * (_scores(dout, v) - delta[:, None]) * scale).astype(q[0].dtype)
        return tuple(a + _dot(ds, x) for a, x in zip(sums, k, strict=True))

    start = tuple(jnp.zeros((blocks.queries, part), jnp.float32) for _, part in _parts(sizes[0]))
    sums = lax.fori_loop(range_ref[0, place], range_ref[1, place], step, start)
    for (first, part), a in zip(_parts(sizes[0]), sums, strict=True):
        dq_ref[:, pl.ds(first, part)] = a.astype(dq_ref.dtype)


def _key_kernel(
    q_ref: Any, k_ref: Any, v_ref: Any, qi_ref: Any, ki_ref: Any, qs_ref: Any, ks_ref: Any, range_ref: Any,
    dout_ref: Any, lse_ref: Any, delta_ref: Any, dk_ref: Any, dv_ref: Any, *,
    mask: Mask, scale: float, blocks: Blocks, sizes: tuple[int, int], share: int,
) -> None:  # fmt: skip
    """All query heads of one key-value head, one after another."""
    place = pl.program_id(0)
    k, v = _head(k_ref, 0, blocks.keys, sizes[0]), _head(v_ref, 0, blocks.keys, sizes[1])
    ki, ks = ki_ref[...], ks_ref[...]
    first, last = range_ref[0, place], range_ref[1, place]

    def of_head(head: Array, sums: tuple) -> tuple:
        def step(i: Array, sums: tuple) -> tuple:
            dk, dv = sums
            start = i * blocks.queries
            here = pl.ds(start, blocks.queries)
            q = _head(q_ref, start, blocks.queries, sizes[0], head)
            dout = _head(dout_ref, start, blocks.queries, sizes[1], head)
            lse, delta = lse_ref[head, here], delta_ref[head, here]
            p = jnp.exp2((_scores(q, k) * scale - lse[:, None]) * LOG2_E)
            p = jnp.where(_seen(qi_ref[here], ki, qs_ref[here], ks, mask), p, 0.0)
            ds = (p * (_scores(dout, v) - delta[:, None]) * scale).astype(q[0].dtype)
            low = p.astype(dout[0].dtype)
            dk = tuple(a + _dot(ds.T, x) for a, x in zip(dk, q, strict=True))
            return dk, tuple(a + _dot(low.T, x) for a, x in zip(dv, dout, strict=True))

        return lax.fori_loop(first, last, step, sums)

    start = tuple(tuple(jnp.zeros((blocks.keys, part), jnp.float32) for _, part in _parts(size)) for size in sizes)
    for ref, size, sums in zip((dk_ref, dv_ref), sizes, lax.fori_loop(0, share, of_head, start), strict=True):
        for (begin, part), a in zip(_parts(size), sums, strict=True):
            ref[:, pl.ds(begin, part)] = a.astype(ref.dtype)


def _call(
    kernel: Callable, blocks: Blocks, grid: tuple[int, ...], ins: list, outs: Any, shapes: Any, **rest: Any
) -> Callable:
    return pl.pallas_call(
        kernel,
        grid=grid,
        in_specs=ins,
        out_specs=outs,
        out_shape=shapes,
        compiler_params=triton.CompilerParams(num_warps=blocks.warps, num_stages=2),
        **rest,
    )


def forward(
    q: Array, k: Array, v: Array, mask: Mask, *, scale: float, interpret: bool = False, blocks: Blocks | None = None
) -> tuple[Array, Array]:
    """softmax(q k^T * scale) v over the keys the mask shows.

    q [B, S, N, H], k [B, T, K, H], v [B, T, K, U], H and U multiples of 16; mask of any places and documents
    -> [B, S, N, U] in q's dtype, and the log-sum-exp of each query's scores, float32 [B, N, S]: 0 and -inf where a
    query sees no key. `interpret` runs it on a CPU. Not to be differentiated: `backward` is its gradient.
    """
    rows, length, heads, size = q.shape
    share, wide = heads // k.shape[2], v.shape[-1]
    blocks = (blocks or blocks_for(max(size, wide))[0]).within(length, k.shape[1])
    walk = _walk(mask, rows, blocks)
    queries, keys = walk.query_index.shape[0], walk.key_index.shape[0]
    q, k, v = _fill(q, queries), _fill(k, keys), _fill(v, keys)
    count = queries // blocks.queries
    out, lse = _call(
        partial(_forward_kernel, mask=_bare(mask), scale=scale, blocks=blocks, sizes=(size, wide)),
        blocks,
        (count, heads, rows),
        [
            pl.BlockSpec((None, blocks.queries, None, size), lambda i, n, b: (b, i, n, 0)),
            pl.BlockSpec((None, keys, None, size), lambda i, n, b: (b, 0, lax.div(n, share), 0)),
            pl.BlockSpec((None, keys, None, wide), lambda i, n, b: (b, 0, lax.div(n, share), 0)),
            pl.BlockSpec((blocks.queries,), lambda i, n, b: (i,)),
            pl.BlockSpec((keys,), lambda i, n, b: (0,)),
            pl.BlockSpec((None, blocks.queries), lambda i, n, b: (b, i)),
            pl.BlockSpec((None, keys), lambda i, n, b: (b, 0)),
            pl.BlockSpec((None, 2, count), lambda i, n, b: (b, 0, 0)),
        ],
        [
            pl.BlockSpec((None, blocks.queries, None, wide), lambda i, n, b: (b, i, n, 0)),
            pl.BlockSpec((None, None, blocks.queries), lambda i, n, b: (b, n, i)),
        ],
        [
            jax.ShapeDtypeStruct((rows, queries, heads, wide), q.dtype),
            jax.ShapeDtypeStruct((rows, heads, queries), jnp.float32),
        ],
        interpret=interpret,
        name="attention_forward",
    )(q, k, v, walk.query_index, walk.key_index, walk.query_segments, walk.key_segments, walk.keys_of)
    return out[:, :length], lse[:, :, :length]


def _bare(mask: Mask) -> Mask:
    """What is known while compiling."""
    none: Any = None
    return Mask(none, none, None, None, mask.window, mask.causal)


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
    interpret: bool = False,
    blocks: Blocks | None = None,
) -> tuple[Array, Array, Array]:
    """Gradients with respect to q, k and v, from the output [B, S, N, U], its log-sum-exp [B, N, S] and its gradient.

    out and lse may be those of a softmax over further keys too: then this is those keys' share (Liu et al. 2023).
    """
    rows, length, heads, size = q.shape
    groups, wide = k.shape[2], v.shape[-1]
    share, key_length = heads // groups, k.shape[1]
    blocks = (blocks or blocks_for(max(size, wide))[1]).within(length, key_length)
    walk = _walk(mask, rows, blocks)
    queries, keys = walk.query_index.shape[0], walk.key_index.shape[0]
    delta = jnp.einsum("bsnu,bsnu->bns", out.astype(jnp.float32), dout.astype(jnp.float32))
    short = [(0, 0), (0, 0), (0, queries - length)]
    lse, delta = jnp.pad(lse, short), jnp.pad(delta, short)
    q, dout, k, v = _fill(q, queries), _fill(dout.astype(q.dtype), queries), _fill(k, keys), _fill(v, keys)
    known = {"mask": _bare(mask), "scale": scale, "blocks": blocks, "sizes": (size, wide)}
    places = walk.query_index, walk.key_index, walk.query_segments, walk.key_segments
    count = queries // blocks.queries
    dq = _call(
        partial(_query_kernel, **known),
        blocks,
        (count, heads, rows),
        [
            pl.BlockSpec((None, blocks.queries, None, size), lambda i, n, b: (b, i, n, 0)),
            pl.BlockSpec((None, keys, None, size), lambda i, n, b: (b, 0, lax.div(n, share), 0)),
            pl.BlockSpec((None, keys, None, wide), lambda i, n, b: (b, 0, lax.div(n, share), 0)),
            pl.BlockSpec((blocks.queries,), lambda i, n, b: (i,)),
            pl.BlockSpec((keys,), lambda i, n, b: (0,)),
            pl.BlockSpec((None, blocks.queries), lambda i, n, b: (b, i)),
            pl.BlockSpec((None, keys), lambda i, n, b: (b, 0)),
            pl.BlockSpec((None, 2, count), lambda i, n, b: (b, 0, 0)),
            pl.BlockSpec((None, blocks.queries, None, wide), lambda i, n, b: (b, i, n, 0)),
            pl.BlockSpec((None, None, blocks.queries), lambda i, n, b: (b, n, i)),
            pl.BlockSpec((None, None, blocks.queries), lambda i, n, b: (b, n, i)),
        ],
        pl.BlockSpec((None, blocks.queries, None, size), lambda i, n, b: (b, i, n, 0)),
        jax.ShapeDtypeStruct(q.shape, q.dtype),
        interpret=interpret,
        name="attention_backward_queries",
    )(q, k, v, *places, walk.keys_of, dout, lse, delta)
    count = keys // blocks.keys
    dk, dv = _call(
        partial(_key_kernel, **known, share=share),
        blocks,
        (count, groups, rows),
        [
            pl.BlockSpec((None, queries, share, size), lambda j, g, b: (b, 0, g, 0)),
            pl.BlockSpec((None, blocks.keys, None, size), lambda j, g, b: (b, j, g, 0)),
            pl.BlockSpec((None, blocks.keys, None, wide), lambda j, g, b: (b, j, g, 0)),
            pl.BlockSpec((queries,), lambda j, g, b: (0,)),
            pl.BlockSpec((blocks.keys,), lambda j, g, b: (j,)),
            pl.BlockSpec((None, queries), lambda j, g, b: (b, 0)),
            pl.BlockSpec((None, blocks.keys), lambda j, g, b: (b, j)),
            pl.BlockSpec((None, 2, count), lambda j, g, b: (b, 0, 0)),
            pl.BlockSpec((None, queries, share, wide), lambda j, g, b: (b, 0, g, 0)),
            pl.BlockSpec((None, share, queries), lambda j, g, b: (b, g, 0)),
            pl.BlockSpec((None, share, queries), lambda j, g, b: (b, g, 0)),
        ],
        [
            pl.BlockSpec((None, blocks.keys, None, size), lambda j, g, b: (b, j, g, 0)),
            pl.BlockSpec((None, blocks.keys, None, wide), lambda j, g, b: (b, j, g, 0)),
        ],
        [jax.ShapeDtypeStruct(k.shape, k.dtype), jax.ShapeDtypeStruct(v.shape, v.dtype)],
        interpret=interpret,
        name="attention_backward_keys",
    )(q, k, v, *places, walk.queries_of, dout, lse, delta)
    return dq[:, :length], dk[:, :key_length], dv[:, :key_length]
