"""Attention of a decoding step to a paged cache and to the memory of rows; see megajax.layers.decoding.

T tokens of a step; R rows per group, W tokens per row, M blocks per table, N query heads, K key-value heads.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp
from jax import Array

from megajax.kernels.paged.attention import KERNELS
from megajax.kernels.paged.pools import PagedQueries, Pools
from megajax.layers.attention.core import CoreAttention
from megajax.layers.cache_spec import SCALE
from megajax.layers.context import Context
from megajax.layers.decoding import Cache, StepRows, rows_of, write
from megajax.layers.position.module import bias_of
from megajax.mesh.layout import Layout
from megajax.mesh.sharding_rules import LogicalAxes
from megajax.precision.quantization import rounded


def attend_to_cache(
    core: CoreAttention, q: Array, new: Cache, cache: Cache, ctx: Context, kv_axis: str | None, value_size: int
) -> tuple[Array, Cache]:
    """Writes the keys and values of this step's tokens, then attends to their rows, in an island without collectives.

    q [T, 1, N, H]; new: "key" and, unless values are the first `value_size` elements of keys, "value", each
    [T, 1, K, .]; cache: these leaves in blocks; an 8-bit cache also has "key_scale" and "value_scale" [layers, blocks,
    block, K]. Returns [T, 1, N, value_size] and the cache.
    """
    step, weights = rows_of(ctx), core.weights(ctx)
    axes = {name: (*[None] * (w.ndim - 1), "heads") for name, w in weights.items()}

    def local(
        q: Array, new: Cache, cache: Cache, step: StepRows, positions: Array, weights: Mapping[str, Array]
    ) -> tuple[Array, Cache]:
        stored = {leaf: x for name, array in new.items() for leaf, x in in_cache(name, array[:, 0], cache).items()}
        new_cache = {name: write(leaf, stored[name], step) for name, leaf in cache.items()}
        blocks = new_cache["key"].shape[1]
        # A view: indexing the pool by layer would copy it.
        flat = {name: leaf.reshape(-1, *leaf.shape[2:]) for name, leaf in new_cache.items()}
        pools = Pools(flat["key"], flat.get("value"), value_size, flat.get("key" + SCALE), flat.get("value" + SCALE))
        tables = [step.layer * blocks + table for table in step.tables]
        last = [positions[part].reshape(shape) for part, shape in zip(step.parts(), step.groups, strict=True)]
        return attend_by_groups(core, q, pools, step, tables, last, weights), new_cache

    heads, keyed = ("batch", None, "heads", None), ("batch", None, kv_axis, None)
    pools = {name: (None, "batch", None, kv_axis, None)[: leaf.ndim] for name, leaf in cache.items()}
    ins: tuple[Any, ...] = (heads, dict.fromkeys(new, keyed), pools, step.axes(), ("batch", None), axes)
    return core.layout.island(local, ins, (heads, pools))(q, new, cache, step, ctx.positions, weights)


def attend_by_groups(
    core: CoreAttention,
    q: Array,
    pools: Pools,
    step: StepRows,
    tables: Sequence[Array],
    last: Sequence[Array],
    weights: Mapping[str, Array],
) -> Array:
    """Attention of the tokens q [T, 1, N, H] to blocks of the pools, [T, 1, N, U].

    For each group, tables int32 [R, M]: the blocks of its rows; last int32 [R, W]: the last position that each token
    attends to.
    """
    cfg, bias, mixed = core.cfg, core.bias, []
    sink = jnp.zeros(q.shape[2]) if cfg.sink == "zero" else weights.get("sink")
    groups = zip(step.groups, step.parts(), step.counts, tables, last, strict=True)
    for (rows, width), part, count, table, positions in groups:
        queries = PagedQueries(
            q[part].reshape(rows, width, *q.shape[2:]),
            table,
            jnp.where(jnp.arange(width)[None] < count[:, None], positions, -1),
            core.scale,
            cfg.window,
            sink,
            None if bias is None else lambda after: bias_of(bias, weights["table"], after),
            core.cap,
            core.chunk,
        )
        out = KERNELS[step.kernel](queries, pools)
        mixed.append(out.reshape(rows * width, 1, *out.shape[2:]))
    return jnp.concatenate(mixed)


def attend_to_memory(core: CoreAttention, q: Array, cache: Cache, ctx: Context) -> Array:
    """Attention of the tokens q [T, 1, N, H] to the memory of their rows (`write_memory`), [T, 1, N, H]; an island."""
    weights = core.weights(ctx)
    axes = {name: (*[None] * (w.ndim - 1), "heads") for name, w in weights.items()}

    def local(q: Array, cache: Cache, step: StepRows, weights: Mapping[str, Array]) -> Array:
        slots, blocks = cache["key"].shape[1:3]
        keys, values = (cache[name].reshape(-1, *cache[name].shape[3:]) for name in ("key", "value"))
        tables, last = [], []
        for (rows, width), states in zip(step.groups, step.states, strict=True):
            slot = jnp.minimum(states, slots - 1)
            tables.append((step.layer * slots + slot)[:, None] * blocks + jnp.arange(blocks)[None])
            last.append(jnp.broadcast_to(cache["length"][step.layer, slot][:, None] - 1, (rows, width)))
        return attend_by_groups(core, q, Pools(keys, values, values.shape[-1]), step, tables, last, weights)

    heads, pools = ("batch", None, "heads", None), memory_axes(cache)
    ins = (heads, pools, rows_of(ctx).axes(), axes)
    return core.layout.island(local, ins, heads)(q, cache, rows_of(ctx), weights)


def write_memory(layout: Layout, new: Cache, cache: Cache, ctx: Context) -> Cache:
    """Writes the step's rows of `new`, keys and values [R, L, K, H], to the cache, and their lengths `counts`.

    cache: "key" and "value" [layers, slots, blocks, block, K, H], "length" int32 [layers, slots].
    """

    def local(new: Cache, cache: Cache, step: StepRows) -> Cache:
        (counts,), (states,), new_cache = step.counts, step.states, {}
        for name, leaf in cache.items():
            if name in new:
                behind = leaf.shape[2] * leaf.shape[3] - new[name].shape[1]
                x = jnp.pad(new[name], ((0, 0), (0, behind), (0, 0), (0, 0))).reshape(-1, *leaf.shape[2:])
            else:
                x = counts
            at = leaf.at[step.layer, states]
            new_cache[name] = at.set(x.astype(leaf.dtype), mode="drop", unique_indices=True)
        return new_cache

    keyed, pools = ("batch", None, "kv_heads", None), memory_axes(cache)
    ins = (dict.fromkeys(new, keyed), pools, rows_of(ctx).axes())
    return layout.island(local, ins, pools)(new, cache, rows_of(ctx))


def memory_axes(cache: Cache) -> dict[str, LogicalAxes]:
    """Logical axes of the leaves of cross-attention."""
    keyed = (None, "batch", None, None, "kv_heads", None)
    return {name: keyed[: leaf.ndim] for name, leaf in cache.items()}


def in_cache(name: str, x: Array, cache: Cache) -> dict[str, Array]:
    """The cache leaves that store x [T, K, .]: x itself, or 8-bit values and a scale for each token and head."""
    if name + SCALE not in cache:
        return {name: x}
    values, scale = rounded(x, cache[name].dtype.name, 1)
    return {name: values, name + SCALE: scale}
