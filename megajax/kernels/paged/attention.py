"""Attention to a paged cache: the reference, a loop over tiles, and the kernels by name.

One pool of blocks holds the keys and values of all rows; a row's table lists its blocks in order. A step computes a few
queries per row: one for a row that decodes, several for a prompt.

R rows, W queries of each, N query heads, K key-value heads (N a multiple of K), H head size, U size of a value head,
P blocks of the pool, M blocks of a row's table.
"""

from collections.abc import Mapping
from types import MappingProxyType

import jax.numpy as jnp
from jax import Array, lax

from megajax.kernels.attention.tiles import FENCES, QUERIES, TILE, Fence, Tile, attend_tiles, joined
from megajax.kernels.paged.capability import PagedKernel
from megajax.kernels.paged.pools import Attend, PagedQueries, Pools
from megajax.kernels.paged.triton import paged_attention
from megajax.kernels.soft_cap import soft_capped


def reference(queries: PagedQueries, pools: Pools) -> Array:
    """Gathers all blocks of every table. See `Attend`."""
    q, sink = queries.q, queries.sink
    k, v = pools.read(queries.table, q.dtype)
    at = jnp.arange(k.shape[1])
    scores, v = _scores(queries, k, at), _zero_unseen(v, queries, at)
    column = jnp.full(q.shape[2], -jnp.inf) if sink is None else sink.astype(jnp.float32)
    column = jnp.broadcast_to(column.reshape(1, *scores.shape[1:3], 1, 1), (*scores.shape[:-1], 1))
    # The sum is 0 for a query that sees no key, unless there is a sink.
    highest = jnp.maximum(scores.max(-1, keepdims=True), column)
    finite = jnp.where(jnp.isneginf(highest), 0.0, highest)
    weights = jnp.exp(scores - finite)
    total = weights.sum(-1, keepdims=True) + jnp.exp(column - finite)
    weights = weights / jnp.where(total > 0, total, 1)
    return joined(jnp.einsum("rkgwl,rlku->rkgwu", weights.astype(v.dtype), v), q)


def tiled(queries: PagedQueries, pools: Pools, tile: int = TILE) -> Array:
    """Loops over tiles of about `tile` positions, up to the end of the longest row. See `Attend`.

    A wide table costs nothing. The order of each row's sums does not depend on the other rows: a tile after the end of
    a row adds zeros.
    """
    return _in_tiles(queries, pools, tile, lambda values: values)


def fixed(queries: PagedQueries, pools: Pools) -> Array:
    """As `tiled`, by the operations of training's kernel `fixed`. See `Attend`."""
    q, positions = queries.q, queries.positions
    more = (0, max(0, QUERIES - q.shape[1]))
    padded = queries._replace(
        q=jnp.pad(q, ((0, 0), more, (0, 0), (0, 0))), positions=jnp.pad(positions, ((0, 0), more), constant_values=-1)
    )
    return _in_tiles(padded, pools, TILE, FENCES)[:, : q.shape[1]]


def _in_tiles(queries: PagedQueries, pools: Pools, tile: int, fence: Fence) -> Array:
    q, table, positions = queries.q, queries.table, queries.positions
    block, groups = pools.keys.shape[1:3]
    per = max(1, tile // block)
    step, table = per * block, jnp.pad(table, ((0, 0), (0, -table.shape[1] % per)))

    def tile_at(number: Array) -> Tile:
        k, v = pools.read(lax.dynamic_slice_in_dim(table, number * per, per, axis=1), q.dtype)
        at = number * step + jnp.arange(step)
        return Tile(k, _zero_unseen(v, queries, at), _visible(queries, at), _bias(queries, at, groups))

    bounds = queries.first(_lowest(positions).min()) // step, (positions.max() + step) // step
    settings = {"scale": queries.scale, "cap": queries.cap, "sink": queries.sink, "fence": fence}
    return attend_tiles(q, tile_at, bounds, groups, pools.value_size, **settings)[0]


KERNELS: Mapping[PagedKernel, Attend] = MappingProxyType(
    {"triton": paged_attention, "tiled": tiled, "fixed": fixed, "reference": reference}
)


def _scores(queries: PagedQueries, k: Array, at: Array) -> Array:
    """float32 [R, K, N/K, W, L] for the keys at positions `at` int32 [L]; -inf if the query does not see the key."""
    rows, width, heads, size = queries.q.shape
    split = queries.q.reshape(rows, width, k.shape[2], heads // k.shape[2], size)
    scores = jnp.einsum("rwkgh,rlkh->rkgwl", split, k, preferred_element_type=jnp.float32) * queries.scale
    scores, bias = soft_capped(scores, queries.cap), _bias(queries, at, k.shape[2])
    scores = scores if bias is None else scores + bias
    return jnp.where(_visible(queries, at)[:, None, None], scores, -jnp.inf)


def _visible(queries: PagedQueries, at: Array) -> Array:
    """bool [R, W, L]: whether a query sees the keys at positions `at` int32 [L]."""
    positions, at = queries.positions[..., None], at[None, None]
    return (positions >= at) & (at >= queries.first(queries.positions)[..., None]) & (positions >= 0)


def _bias(queries: PagedQueries, at: Array, groups: int) -> Array | None:
    """float32 [R, K, N/K, W, L]: the bias of scores of keys at positions `at` int32 [L]; None if there is none."""
    if queries.bias is None:
        return None
    bias = jnp.moveaxis(queries.bias(at[None, None] - queries.positions[..., None]).astype(jnp.float32), -1, 1)
    return bias.reshape(bias.shape[0], groups, -1, *bias.shape[2:])


def _zero_unseen(v: Array, queries: PagedQueries, at: Array) -> Array:
    """Values [R, L, K, U] at positions `at` int32 [L], with zeros after the end of each row, and before its window. A
    block may hold nonfinite numbers of another request there, and 0 times these is not 0."""
    visible = at[None] <= queries.positions.max(1)[:, None]
    visible &= at[None] >= queries.first(_lowest(queries.positions))[:, None]
    return jnp.where(visible[..., None, None], v, 0)


def _lowest(positions: Array) -> Array:
    """int32 [R]: the lowest position of each row's queries."""
    return jnp.where(positions < 0, jnp.iinfo(jnp.int32).max, positions).min(1)
