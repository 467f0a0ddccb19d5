"""Attention to gathered keys and values (Grattafiori et al. 2024, "The Llama 3 Herd of Models", section 3.3.2).

Each device gathers the keys and values of whole rows, and its own queries attend to them. The backward pass gathers
them again, because saving them would take memory for T positions in every layer.

Kernels without position arguments, such as cuDNN's, compute attention chunk by chunk.

The causal mask of these kernels starts at the first query and the first key of a call. A chunk therefore attends to
itself in one call (a triangle), and to the keys before it in another call without a mask (a rectangle). The two results
are merged by their log-sum-exps. In a ring, the keys of another device lie entirely before or entirely after a chunk of
queries: in zigzag order with two chunks per device, each step is two squares.

In the backward pass, each call takes the output and log-sum-exp over all keys, and the gradients add up (Liu et al.
2023). A branch on a GPU waits for the host, so only documents use one: their number decides which kernel runs
(`megajax.kernels.attention.cudnn`).

B rows, S positions of a device, T of a row, N query heads.
"""

import jax.numpy as jnp
from jax import Array

from megajax.kernels.attention.attention import Passes, merge_parts
from megajax.kernels.attention.dropout import AttentionDropout
from megajax.kernels.attention.mask import Mask
from megajax.kernels.context.collectives import gather_rows, reduce_rows
from megajax.mesh.zigzag_order import SequenceSharding


def whole_keys(sharding: SequenceSharding, k: Array, v: Array, mask: Mask) -> tuple[Array, Array, Mask]:
    """A device's keys and values -> those of whole rows in order, and the mask of its queries over them.

    Differentiable.
    """
    segments = None if mask.key_segments is None else gather_rows(sharding, mask.key_segments)
    keys = gather_rows(sharding, k)
    index = jnp.arange(keys.shape[1], dtype=jnp.int32)
    return keys, gather_rows(sharding, v), mask._replace(key_index=index, key_segments=segments)


def all_gather(sharding: SequenceSharding, passes: Passes) -> Passes:
    """Attention over whole rows, computed from each device's shard by a backend that supports any mask."""

    def forward(
        q: Array, k: Array, v: Array, mask: Mask, *, scale: float, dropout: AttentionDropout | None = None
    ) -> tuple[Array, Array]:
        return passes.with_arguments(dropout=dropout).forward(q, *whole_keys(sharding, k, v, mask), scale=scale)

    def backward(
        q: Array, k: Array, v: Array, mask: Mask, *saved: Array, scale: float, dropout: AttentionDropout | None = None
    ) -> tuple[Array, Array, Array]:
        keys, values, mask = whole_keys(sharding, k, v, mask)
        dq, dk, dv = passes.with_arguments(dropout=dropout).backward(q, keys, values, mask, *saved, scale=scale)
        return dq, reduce_rows(sharding, dk), reduce_rows(sharding, dv)

    return Passes(forward, backward, passes.dropout)


def _as_rows(x: Array, count: int, axis: int = 1) -> Array:
    """Splits x [B, S, ...] into one row per chunk, [count * B, S / count, ...]. axis: the dimension of positions."""
    return jnp.concatenate(jnp.split(x, count, axis=axis))


def _from_rows(x: Array, count: int, axis: int = 1) -> Array:
    """The inverse of `_as_rows`."""
    return jnp.concatenate(jnp.split(x, count), axis=axis)


def _inside(mask: Mask, count: int) -> Mask:
    """The mask of each chunk within itself, with one row per chunk."""
    index = jnp.arange(mask.query_index.shape[0] // count, dtype=jnp.int32)
    ids = [None if x is None else _as_rows(x, count) for x in (mask.query_segments, mask.key_segments)]
    return mask._replace(query_index=index, key_index=index, query_segments=ids[0], key_segments=ids[1])


def _before(mask: Mask, row_mask: Mask, count: int) -> list[Mask]:
    """The mask of each chunk over the keys before it: all its queries have the position of the last of these keys.

    row_mask: the mask over the keys of whole rows.
    """
    size = mask.query_index.shape[0] // count
    ids = [None] * count if mask.query_segments is None else jnp.split(mask.query_segments, count, axis=1)
    return [
        row_mask._replace(query_index=jnp.full((size,), mask.query_index[place * size] - 1), query_segments=ids[place])
        for place in range(count)
    ]


def _demand_chunks(mask: Mask) -> None:
    if mask.window is not None:
        raise ValueError(f"chunks have no windows, window={mask.window}: kernels.capability refuses it earlier")


def chunks_with_gathered_keys(sharding: SequenceSharding, passes: Passes, rectangles: Passes) -> Passes:
    """Attention over whole rows, computed from a device's chunks of queries and gathered keys and values.

    passes: supports rows that start at the first query and the first key; rectangles: supports causal masks whose
    queries all have the same position. Bidirectional attention is computed as in `all_gather`.
    """
    gathered, count = all_gather(sharding, passes), sharding.chunks

    def forward(q: Array, k: Array, v: Array, mask: Mask, *, scale: float) -> tuple[Array, Array]:
        if not mask.causal:
            return gathered.forward(q, k, v, mask, scale=scale)
        _demand_chunks(mask)
        # The triangles need no key of another device: they run while keys are gathered.
        keys, values, everywhere = whole_keys(sharding, k, v, mask)
        rows = (_as_rows(x, count) for x in (q, k, v))
        out, lse = passes.forward(*rows, _inside(mask, count), scale=scale)
        triangles = zip(jnp.split(out, count), jnp.split(lse, count), strict=True)
        chunks = zip(jnp.split(q, count, axis=1), _before(mask, everywhere, count), triangles, strict=True)
        parts = [
            merge_parts(triangle, rectangles.forward(part, keys, values, part_mask, scale=scale))
            for part, part_mask, triangle in chunks
        ]
        outs, sums = zip(*parts, strict=True)
        return jnp.concatenate(outs, axis=1).astype(q.dtype), jnp.concatenate(sums, axis=2)

    def backward(
        q: Array, k: Array, v: Array, mask: Mask, out: Array, lse: Array, dout: Array, *, scale: float
    ) -> tuple[Array, Array, Array]:
        if not mask.causal:
            return gathered.backward(q, k, v, mask, out, lse, dout, scale=scale)
        keys, values, everywhere = whole_keys(sharding, k, v, mask)
        saved = _as_rows(out, count), _as_rows(lse, count, 2), _as_rows(dout, count)
        rows = (_as_rows(x, count) for x in (q, k, v))
        inside = passes.backward(*rows, _inside(mask, count), *saved, scale=scale)
        dq, dk, dv = (_from_rows(x.astype(jnp.float32), count) for x in inside)
        queries, sums = [], [jnp.zeros(x.shape, jnp.float32) for x in (keys, values)]
        for part, part_mask, o, statistics, do in zip(
            jnp.split(q, count, axis=1),
            _before(mask, everywhere, count),
            jnp.split(out, count, axis=1),
            jnp.split(lse, count, axis=2),
            jnp.split(dout, count, axis=1),
            strict=True,
        ):
            new = rectangles.backward(part, keys, values, part_mask, o, statistics, do, scale=scale)
            queries.append(new[0])
            sums = [x + y.astype(jnp.float32) for x, y in zip(sums, new[1:], strict=True)]
        dq = dq + jnp.concatenate(queries, axis=1).astype(jnp.float32)
        rest_dk, rest_dv = (reduce_rows(sharding, y.astype(k.dtype)).astype(jnp.float32) for y in sums)
        return dq.astype(q.dtype), (dk + rest_dk).astype(k.dtype), (dv + rest_dv).astype(v.dtype)

    return Passes(forward, backward)


def two_squares(passes: Passes) -> Passes:
    """Attention to the keys of another device in a ring over causal rows, with two chunks per device.

    If the keys come from an earlier device, both chunks of queries see the lower chunk of keys; if they come from a
    later one, the upper chunk of queries sees both chunks of keys. Either case is one call with two rows. passes:
    supports rows without a mask, and computes bidirectional attention directly. Results and gradients are float32.
    """

    def keys_are_earlier(mask: Mask) -> Array:
        _demand_chunks(mask)
        if mask.query_segments is not None:
            raise ValueError("squares have no documents: kernels.capability refuses them earlier")
        return mask.key_index[0] < mask.query_index[0]

    def queries(early: Array, x: Array, axis: int = 1) -> Array:
        low, high = jnp.split(x, 2, axis=axis)
        return jnp.concatenate([jnp.where(early, low, high), high])

    def keys(early: Array, x: Array) -> Array:
        low, high = jnp.split(x, 2, axis=1)
        return jnp.concatenate([low, jnp.where(early, low, high)])

    def unmasked(mask: Mask) -> Mask:
        index = jnp.arange(mask.query_index.shape[0] // 2, dtype=jnp.int32)
        return mask._replace(query_index=index, key_index=index, causal=False)

    def forward(q: Array, k: Array, v: Array, mask: Mask, *, scale: float) -> tuple[Array, Array]:
        if not mask.causal:
            return passes.forward(q, k, v, mask, scale=scale)
        early = keys_are_earlier(mask)
        squares = passes.forward(queries(early, q), keys(early, k), keys(early, v), unmasked(mask), scale=scale)
        (out1, out2), (lse, other_lse) = (jnp.split(x, 2) for x in squares)
        # The first square has the lower or the upper queries, the second one always the upper queries.
        low, low_lse = jnp.where(early, out1, 0).astype(jnp.float32), jnp.where(early, lse, -jnp.inf)
        high, high_lse = merge_parts((out1, jnp.where(early, -jnp.inf, lse)), (out2, other_lse))
        return jnp.concatenate([low, high], axis=1), jnp.concatenate([low_lse, high_lse], axis=2)

    def backward(
        q: Array, k: Array, v: Array, mask: Mask, out: Array, lse: Array, dout: Array, *, scale: float
    ) -> tuple[Array, Array, Array]:
        if not mask.causal:
            return passes.backward(q, k, v, mask, out, lse, dout, scale=scale)
        early = keys_are_earlier(mask)
        rows = queries(early, q), keys(early, k), keys(early, v)
        saved = queries(early, out), queries(early, lse, 2), queries(early, dout)
        squares = passes.backward(*rows, unmasked(mask), *saved, scale=scale)
        (dq1, dq2), *keyed = (jnp.split(x.astype(jnp.float32), 2) for x in squares)
        dq = jnp.concatenate([jnp.where(early, dq1, 0), jnp.where(early, 0, dq1) + dq2], axis=1)
        dk, dv = (jnp.concatenate([x + jnp.where(early, y, 0), jnp.where(early, 0, y)], axis=1) for x, y in keyed)
        return dq, dk, dv

    return Passes(forward, backward)
