"""Flash attention as Pallas kernels: one forward kernel, and two backward kernels without atomics.

A program keeps blocks of scores in registers while it loops over the keys of one block of queries (Dao 2023,
algorithms 1 and 2). The range of the loop is computed beforehand from positions and segments, so fully masked blocks
(before the window, after the diagonal, in other documents) cost nothing. Sums are in float32 in a fixed order: the
results are deterministic.

A head of 192 is computed as 128 + 64, because Triton's tiles are powers of two.

B rows, S queries, T keys, N query heads, K key-value heads (N a multiple of K), H head size, U size of a value head.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, Ref, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from megajax.kernels.attention.mask import Mask
from megajax.kernels.soft_cap import soft_cap_slope, soft_capped

LOG2_E = 1 / 0.6931471805599453
PADDING_SEGMENT = -(2**31)
"""Segment of padding among the queries; padding among the keys has the next number, so neither sees the other."""


class AttentionBlocks(NamedTuple):
    """Block sizes, powers of two from 16 on, and warps per block."""

    queries: int
    keys: int
    warps: int

    def within(self, queries: int, keys: int) -> "AttentionBlocks":
        """Blocks no larger than these numbers of queries and keys need."""
        return AttentionBlocks(min(self.queries, next_power(queries)), min(self.keys, next_power(keys)), self.warps)


def next_power(length: int) -> int:
    """The smallest power of two from 16 on that is at least the length."""
    return max(16, 1 << (length - 1).bit_length())


def blocks_for(size: int) -> tuple[AttentionBlocks, AttentionBlocks]:
    """Blocks of the forward and the backward kernels for this head size; they fit into an A100's shared memory."""
    if size <= 64:
        return AttentionBlocks(128, 64, 4), AttentionBlocks(64, 64, 4)
    if size <= 128:
        return AttentionBlocks(128, 64, 8), AttentionBlocks(64, 64, 8)
    return AttentionBlocks(64, 32, 8), AttentionBlocks(32, 32, 4)


def head_tiles(size: int) -> tuple[tuple[int, int], ...]:
    """(first, size) of the powers of two that make up a head: 192 -> (0, 128), (128, 64)."""
    tiles, first = [], 0
    for bit in reversed(range(size.bit_length())):
        if size >> bit & 1:
            tiles.append((first, 1 << bit))
            first += 1 << bit
    return tuple(tiles)


class _Blocked(NamedTuple):
    """A mask split into blocks: the position and segment of each token, and which blocks may see each other."""

    query_index: Array
    """int32 [S], padded to whole blocks, as are the next three."""
    key_index: Array
    query_segments: Array
    key_segments: Array
    keys_of: Array
    """int32 [B, 2, blocks of queries]: the first visible block of keys, and the one after the last."""
    queries_of: Array
    """int32 [B, 2, blocks of keys]."""

    @property
    def positions(self) -> tuple[Array, Array, Array, Array]:
        return self.query_index, self.key_index, self.query_segments, self.key_segments


def _split_into_blocks(mask: Mask, rows: int, blocks: AttentionBlocks) -> _Blocked:
    def padded(x: Array, block: int, value: int) -> Array:
        missing = -x.shape[-1] % block
        return jnp.pad(x.astype(jnp.int32), [(0, 0)] * (x.ndim - 1) + [(0, missing)], constant_values=value)

    if mask.query_segments is None or mask.key_segments is None:
        zero = jnp.zeros((rows, 1), jnp.int32)
        queries = jnp.broadcast_to(zero, (rows, mask.query_index.shape[0]))
        keys = jnp.broadcast_to(zero, (rows, mask.key_index.shape[0]))
    else:
        queries, keys = mask.query_segments, mask.key_segments
        if mask.padded:
            queries, keys = jnp.ones_like(queries), (keys != 0).astype(jnp.int32)
    query_segments = padded(queries, blocks.queries, PADDING_SEGMENT)
    key_segments = padded(keys, blocks.keys, PADDING_SEGMENT + 1)
    query_index, key_index = padded(mask.query_index, blocks.queries, 0), padded(mask.key_index, blocks.keys, 0)

    def bounds(x: Array, block: int) -> tuple[Array, Array]:
        by_block = x.reshape(*x.shape[:-1], x.shape[-1] // block, block)
        return by_block.min(-1), by_block.max(-1)

    q_low, q_high = bounds(query_index, blocks.queries)
    k_low, k_high = bounds(key_index, blocks.keys)
    visible = jnp.ones((q_low.shape[0], k_low.shape[0]), bool)
    if mask.causal:
        visible &= q_high[:, None] >= k_low[None, :]
    if mask.window is not None:
        visible &= q_low[:, None] - k_high[None, :] <= mask.window
    q_low, q_high = bounds(query_segments, blocks.queries)
    k_low, k_high = bounds(key_segments, blocks.keys)
    visible = visible[None] & (q_high[:, :, None] >= k_low[:, None, :]) & (q_low[:, :, None] <= k_high[:, None, :])

    def ranges(visible: Array) -> Array:
        """bool [B, X, Y] -> int32 [B, 2, X]: the first visible block and the one after the last; 0 and 0 for none."""
        any_visible, count = visible.any(-1), visible.shape[-1]
        first = jnp.where(any_visible, visible.argmax(-1), 0)
        last = jnp.where(any_visible, count - visible[..., ::-1].argmax(-1), 0)
        return jnp.stack([first, last], axis=1).astype(jnp.int32)

    by_key = ranges(jnp.swapaxes(visible, 1, 2))
    return _Blocked(query_index, key_index, query_segments, key_segments, ranges(visible), by_key)


def visited(mask: Mask, rows: int, blocks: AttentionBlocks) -> tuple[Array, Array]:
    """Number of blocks that the kernels compute, int32 [B] each: by blocks of queries, and by blocks of keys."""
    blocked = _split_into_blocks(mask, rows, blocks)
    by_query, by_key = ((ranges[:, 1] - ranges[:, 0]).sum(-1) for ranges in (blocked.keys_of, blocked.queries_of))
    return by_query, by_key


def _padded(x: Array, length: int) -> Array:
    """Zero-pads dimension 1, the positions, to `length`."""
    return jnp.pad(x, [(0, 0), (0, length - x.shape[1])] + [(0, 0)] * (x.ndim - 2)) if x.shape[1] < length else x


def dot_float32(x: Array, y: Array) -> Array:
    """Matmul with float32 accumulation; float32 operands at full precision."""
    exact = lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    return jnp.dot(x, y, preferred_element_type=jnp.float32, precision=exact)


def _visible(qi: Array, ki: Array, qs: Array, ks: Array, mask: Mask) -> Array:
    visible = qs[:, None] == ks[None, :]
    distance = qi[:, None] - ki[None, :]
    visible = visible & (distance >= 0) if mask.causal else visible
    return visible if mask.window is None else visible & (distance <= mask.window)


def _head(ref: Ref, start: Array | int, block: int, size: int, *head: Array | int) -> list[Array]:
    """The tiles of a block's head, each [block, tile]; `head` selects one where the block has several heads."""
    return [ref[(pl.ds(start, block), *head, pl.ds(first, tile))] for first, tile in head_tiles(size)]


def _scores(q: list[Array], k: list[Array]) -> Array:
    return sum((dot_float32(x, y.T) for x, y in zip(q, k, strict=True)), start=jnp.float32(0))


def _zeros(block: int, size: int) -> tuple[Array, ...]:
    """Float32 accumulators, one for each tile of a head."""
    return tuple(jnp.zeros((block, tile), jnp.float32) for _, tile in head_tiles(size))


def _store(ref: Ref, sums: tuple[Array, ...], size: int) -> None:
    for (first, tile), value in zip(head_tiles(size), sums, strict=True):
        ref[:, pl.ds(first, tile)] = value.astype(ref.dtype)


def _forward_kernel(
    q_ref: Ref, k_ref: Ref, v_ref: Ref, qi_ref: Ref, ki_ref: Ref, qs_ref: Ref, ks_ref: Ref, range_ref: Ref,
    out_ref: Ref, lse_ref: Ref, *,
    mask: Mask, scale: float, cap: float | None, blocks: AttentionBlocks, sizes: tuple[int, int],
) -> None:  # fmt: skip
    """Output and log-sum-exp of one block of queries of one head."""
    block = pl.program_id(0)
    q = _head(q_ref, 0, blocks.queries, sizes[0])
    qi, qs = qi_ref[...], qs_ref[...]

    def step(j: Array, carry: tuple) -> tuple:
        maximum, total, sums = carry
        start = j * blocks.keys
        keys = pl.ds(start, blocks.keys)
        s = _scores(q, _head(k_ref, start, blocks.keys, sizes[0]))
        s = s * (scale * LOG2_E) if cap is None else soft_capped(s * scale, cap) * LOG2_E
        s = jnp.where(_visible(qi, ki_ref[keys], qs, ks_ref[keys], mask), s, -jnp.inf)
        new_maximum = jnp.maximum(maximum, s.max(1))
        finite = jnp.where(new_maximum == -jnp.inf, 0.0, new_maximum)
        p, shrink = jnp.exp2(s - finite[:, None]), jnp.exp2(maximum - finite)
        v = _head(v_ref, start, blocks.keys, sizes[1])
        sums = tuple(a * shrink[:, None] + dot_float32(p.astype(x.dtype), x) for a, x in zip(sums, v, strict=True))
        return new_maximum, total * shrink + p.sum(1), sums

    start = (
        jnp.full((blocks.queries,), -jnp.inf, jnp.float32),
        jnp.zeros((blocks.queries,), jnp.float32),
        _zeros(blocks.queries, sizes[1]),
    )
    maximum, total, sums = lax.fori_loop(range_ref[0, block], range_ref[1, block], step, start)
    lse_ref[...] = jnp.where(total > 0, (maximum + jnp.log2(total)) / LOG2_E, -jnp.inf)
    divisor = jnp.where(total > 0, total, 1.0)[:, None]
    _store(out_ref, tuple(a / divisor for a in sums), sizes[1])


def _query_gradient_kernel(
    q_ref: Ref, k_ref: Ref, v_ref: Ref, qi_ref: Ref, ki_ref: Ref, qs_ref: Ref, ks_ref: Ref, range_ref: Ref,
    dout_ref: Ref, lse_ref: Ref, out_ref: Ref, dq_ref: Ref, delta_ref: Ref, *,
    mask: Mask, scale: float, cap: float | None, blocks: AttentionBlocks, sizes: tuple[int, int],
) -> None:  # fmt: skip
    """Gradient of one block of queries of one head, and for each query the product of its output and the gradient.

    Outside of the kernel the compiler would choose an order of dimensions for the product, and copy the outputs that
    all layers have saved into that order before the loop over layers: 4 GiB for 16k tokens of Llama 3 8B.
    """
    block = pl.program_id(0)
    q, dout = _head(q_ref, 0, blocks.queries, sizes[0]), _head(dout_ref, 0, blocks.queries, sizes[1])
    out = _head(out_ref, 0, blocks.queries, sizes[1])
    products = (x.astype(jnp.float32) * y.astype(jnp.float32) for x, y in zip(out, dout, strict=True))
    delta = sum((x.sum(axis=1) for x in products), start=jnp.zeros((blocks.queries,), jnp.float32))
    delta_ref[...] = delta
    qi, qs, lse = qi_ref[...], qs_ref[...], lse_ref[...]

    def step(j: Array, dq: tuple) -> tuple:
        start = j * blocks.keys
        keys = pl.ds(start, blocks.keys)
        k, v = _head(k_ref, start, blocks.keys, sizes[0]), _head(v_ref, start, blocks.keys, sizes[1])
        visible = _visible(qi, ki_ref[keys], qs, ks_ref[keys], mask)
        _, ds = _weights_and_score_gradients(q, k, v, dout, lse, delta, visible, scale, cap)
        return tuple(a + dot_float32(ds, x) for a, x in zip(dq, k, strict=True))

    dq = lax.fori_loop(range_ref[0, block], range_ref[1, block], step, _zeros(blocks.queries, sizes[0]))
    _store(dq_ref, dq, sizes[0])


def _key_gradient_kernel(
    q_ref: Ref, k_ref: Ref, v_ref: Ref, qi_ref: Ref, ki_ref: Ref, qs_ref: Ref, ks_ref: Ref, range_ref: Ref,
    dout_ref: Ref, lse_ref: Ref, delta_ref: Ref, dk_ref: Ref, dv_ref: Ref, *,
    mask: Mask, scale: float, cap: float | None, blocks: AttentionBlocks, sizes: tuple[int, int], share: int,
) -> None:  # fmt: skip
    """Gradients of one block of keys and values of one key-value head, summed over its query heads."""
    block = pl.program_id(0)
    k, v = _head(k_ref, 0, blocks.keys, sizes[0]), _head(v_ref, 0, blocks.keys, sizes[1])
    ki, ks = ki_ref[...], ks_ref[...]
    first, last = range_ref[0, block], range_ref[1, block]

    def of_head(head: Array, sums: tuple) -> tuple:
        def step(i: Array, sums: tuple) -> tuple:
            dk, dv = sums
            start = i * blocks.queries
            queries = pl.ds(start, blocks.queries)
            q = _head(q_ref, start, blocks.queries, sizes[0], head)
            dout = _head(dout_ref, start, blocks.queries, sizes[1], head)
            visible = _visible(qi_ref[queries], ki, qs_ref[queries], ks, mask)
            lse, delta = lse_ref[head, queries], delta_ref[head, queries]
            p, ds = _weights_and_score_gradients(q, k, v, dout, lse, delta, visible, scale, cap)
            p = p.astype(dout[0].dtype)
            dk = tuple(a + dot_float32(ds.T, x) for a, x in zip(dk, q, strict=True))
            return dk, tuple(a + dot_float32(p.T, x) for a, x in zip(dv, dout, strict=True))

        return lax.fori_loop(first, last, step, sums)

    dk, dv = lax.fori_loop(0, share, of_head, tuple(_zeros(blocks.keys, size) for size in sizes))
    _store(dk_ref, dk, sizes[0])
    _store(dv_ref, dv, sizes[1])


def _weights_and_score_gradients(
    q: list[Array], k: list[Array], v: list[Array], dout: list[Array],
    lse: Array, delta: Array, visible: Array, scale: float, cap: float | None,
) -> tuple[Array, Array]:  # fmt: skip
    """Softmax weights of a block, float32, and the gradients of its scores, in q's dtype; each [queries, keys]."""
    s = soft_capped(_scores(q, k) * scale, cap)
    p = jnp.where(visible, jnp.exp2((s - lse[:, None]) * LOG2_E), 0.0)
    return p, (p * (_scores(dout, v) - delta[:, None]) * (soft_cap_slope(s, cap) * scale)).astype(q[0].dtype)


def _query_block(blocks: AttentionBlocks, size: int) -> pl.BlockSpec:
    return pl.BlockSpec((None, blocks.queries, None, size), lambda i, n, b: (b, i, n, 0))


def _key_block(blocks: AttentionBlocks, size: int) -> pl.BlockSpec:
    return pl.BlockSpec((None, blocks.keys, None, size), lambda j, g, b: (b, j, g, 0))


def _query_statistics(blocks: AttentionBlocks) -> pl.BlockSpec:
    return pl.BlockSpec((None, None, blocks.queries), lambda i, n, b: (b, n, i))


def _inputs_by_query(blocks: AttentionBlocks, q: Array, k: Array, v: Array) -> list[pl.BlockSpec]:
    """Inputs of a kernel that loops over the keys of one block of queries, from q to the ranges of keys."""
    keys, share = k.shape[1], q.shape[2] // k.shape[2]
    return [
        _query_block(blocks, q.shape[3]),
        pl.BlockSpec((None, keys, None, k.shape[3]), lambda i, n, b: (b, 0, lax.div(n, share), 0)),
        pl.BlockSpec((None, keys, None, v.shape[3]), lambda i, n, b: (b, 0, lax.div(n, share), 0)),
        pl.BlockSpec((blocks.queries,), lambda i, n, b: (i,)),
        pl.BlockSpec((keys,), lambda i, n, b: (0,)),
        pl.BlockSpec((None, blocks.queries), lambda i, n, b: (b, i)),
        pl.BlockSpec((None, keys), lambda i, n, b: (b, 0)),
        pl.BlockSpec((None, 2, q.shape[1] // blocks.queries), lambda i, n, b: (b, 0, 0)),
    ]


def _call(
    kernel: Callable, mask: Mask, scale: float, cap: float | None, blocks: AttentionBlocks, **arguments: Any
) -> Callable:
    none: Any = None
    static = Mask(none, none, None, None, mask.window, mask.causal)
    return pl.pallas_call(
        partial(kernel, mask=static, scale=scale, cap=cap, blocks=blocks),
        compiler_params=triton.CompilerParams(num_warps=blocks.warps, num_stages=2),
        **arguments,
    )


def forward(
    q: Array,
    k: Array,
    v: Array,
    mask: Mask,
    *,
    scale: float,
    cap: float | None = None,
    interpret: bool = False,
    blocks: AttentionBlocks | None = None,
) -> tuple[Array, Array]:
    """softmax(q k^T * scale) v over the visible keys. cap: soft cap of scores; None: no cap.

    q [B, S, N, H], k [B, T, K, H], v [B, T, K, U], H and U multiples of 16; mask of any positions and documents
    -> [B, S, N, U] in q's dtype, and the log-sum-exp of each query's scores, float32 [B, N, S]: 0 and -inf if the
    query sees no key. `interpret` runs the kernel on a CPU. Not differentiable: `backward` is its gradient.
    """
    rows, length, heads, size = q.shape
    value_size = v.shape[-1]
    blocks = (blocks or blocks_for(max(size, value_size))[0]).within(length, k.shape[1])
    blocked = _split_into_blocks(mask, rows, blocks)
    queries, keys = blocked.query_index.shape[0], blocked.key_index.shape[0]
    q, k, v = _padded(q, queries), _padded(k, keys), _padded(v, keys)
    out, lse = _call(
        partial(_forward_kernel, sizes=(size, value_size)),
        mask,
        scale,
        cap,
        blocks,
        grid=(queries // blocks.queries, heads, rows),
        in_specs=_inputs_by_query(blocks, q, k, v),
        out_specs=[_query_block(blocks, value_size), _query_statistics(blocks)],
        out_shape=[
            jax.ShapeDtypeStruct((rows, queries, heads, value_size), q.dtype),
            jax.ShapeDtypeStruct((rows, heads, queries), jnp.float32),
        ],
        interpret=interpret,
        name="attention_forward",
    )(q, k, v, *blocked.positions, blocked.keys_of)
    return out[:, :length], lse[:, :, :length]


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
    cap: float | None = None,
    interpret: bool = False,
    blocks: AttentionBlocks | None = None,
) -> tuple[Array, Array, Array]:
    """Gradients with respect to q, k and v, as `reference_backward` in kernels/attention/attention.py computes them."""
    rows, length, heads, size = q.shape
    groups, value_size, key_length = k.shape[2], v.shape[-1], k.shape[1]
    share, sizes = heads // groups, (size, value_size)
    blocks = (blocks or blocks_for(max(sizes))[1]).within(length, key_length)
    blocked = _split_into_blocks(mask, rows, blocks)
    queries, keys = blocked.query_index.shape[0], blocked.key_index.shape[0]
    lse = jnp.pad(lse, [(0, 0), (0, 0), (0, queries - length)])
    q, out, dout = (_padded(x, queries) for x in (q, out, dout.astype(q.dtype)))
    k, v = _padded(k, keys), _padded(v, keys)
    dq, delta = _call(
        partial(_query_gradient_kernel, sizes=sizes),
        mask,
        scale,
        cap,
        blocks,
        grid=(queries // blocks.queries, heads, rows),
        in_specs=[
            *_inputs_by_query(blocks, q, k, v),
            _query_block(blocks, value_size),
            _query_statistics(blocks),
            _query_block(blocks, value_size),
        ],
        out_specs=[_query_block(blocks, size), _query_statistics(blocks)],
        out_shape=[jax.ShapeDtypeStruct(q.shape, q.dtype), jax.ShapeDtypeStruct(lse.shape, jnp.float32)],
        interpret=interpret,
        name="attention_backward_queries",
    )(q, k, v, *blocked.positions, blocked.keys_of, dout, lse, out)
    dk, dv = _call(
        partial(_key_gradient_kernel, sizes=sizes, share=share),
        mask,
        scale,
        cap,
        blocks,
        grid=(keys // blocks.keys, groups, rows),
        in_specs=[
            pl.BlockSpec((None, queries, share, size), lambda j, g, b: (b, 0, g, 0)),
            _key_block(blocks, size),
            _key_block(blocks, value_size),
            pl.BlockSpec((queries,), lambda j, g, b: (0,)),
            pl.BlockSpec((blocks.keys,), lambda j, g, b: (j,)),
            pl.BlockSpec((None, queries), lambda j, g, b: (b, 0)),
            pl.BlockSpec((None, blocks.keys), lambda j, g, b: (b, j)),
            pl.BlockSpec((None, 2, keys // blocks.keys), lambda j, g, b: (b, 0, 0)),
            pl.BlockSpec((None, queries, share, value_size), lambda j, g, b: (b, 0, g, 0)),
            *[pl.BlockSpec((None, share, queries), lambda j, g, b: (b, g, 0))] * 2,
        ],
        out_specs=[_key_block(blocks, size), _key_block(blocks, value_size)],
        out_shape=[jax.ShapeDtypeStruct(k.shape, k.dtype), jax.ShapeDtypeStruct(v.shape, v.dtype)],
        interpret=interpret,
        name="attention_backward_keys",
    )(q, k, v, *blocked.positions, blocked.queries_of, dout, lse, delta)
    return dq[:, :length], dk[:, :key_length], dv[:, :key_length]
