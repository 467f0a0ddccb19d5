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
    return _joined(jnp.einsum("rkgwl,rlku->rkgwu", weights.astype(v.dtype), v), q)


def tiled(queries: PagedQueries, pools: Pools, tile: int = 64) -> Array:
    """Loops over tiles of about `tile` positions, up to the end of the longest row. See `Attend`.

    A wide table costs nothing. The order of each row's sums does not depend on the other rows: a tile after the end of
    a row adds zeros.
    """
    q, table, positions, sink = queries.q, queries.table, queries.positions, queries.sink
    rows, width, heads, _ = q.shape
    block, groups = pools.keys.shape[1:3]
    per = max(1, tile // block)
    step, table = per * block, jnp.pad(table, ((0, 0), (0, -table.shape[1] % per)))

    def add_tile(number: Array, carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        highest, total, mixed = carry
        k, v = pools.read(lax.dynamic_slice_in_dim(table, number * per, per, axis=1), q.dtype)
        at = number * step + jnp.arange(step)
        scores, v = _scores(queries, k, at), _zero_unseen(v, queries, at)
        higher = jnp.maximum(highest, scores.max(-1))
        finite = jnp.where(jnp.isneginf(higher), 0.0, higher)
        weights, shrink = jnp.exp(scores - finite[..., None]), jnp.exp(highest - finite)
        product = jnp.einsum("rkgwl,rlku->rkgwu", weights.astype(v.dtype), v, preferred_element_type=jnp.float32)
        return higher, total * shrink + weights.sum(-1), mixed * shrink[..., None] + product

    shape = (rows, groups, heads // groups, width)
    if sink is None:
        highest, total = jnp.full(shape, -jnp.inf), jnp.zeros(shape)
    else:
        first = sink.astype(jnp.float32).reshape(1, groups, -1, 1)
        highest, total = jnp.broadcast_to(first, shape), jnp.ones(shape)
    first = queries.first(_lowest(positions).min()) // step
    zero = (highest, total, jnp.zeros((*shape, pools.value_size)))
    _, total, mixed = lax.fori_loop(first, (positions.max() + step) // step, add_tile, zero)
    return _joined(mixed / jnp.where(total > 0, total, 1)[..., None], q)


KERNELS: Mapping[PagedKernel, Attend] = MappingProxyType(
    {"triton": paged_attention, "tiled": tiled, "reference": reference}
)


def _scores(queries: PagedQueries, k: Array, at: Array) -> Array:
    """float32 [R, K, N/K, W, L] for the keys at positions `at` int32 [L]; -inf if the query does not see the key."""
    q, positions, bias = queries.q, queries.positions, queries.bias
    rows, width, heads, size = q.shape
    split = q.reshape(rows, width, k.shape[2], heads // k.shape[2], size)
    scores = jnp.einsum("rwkgh,rlkh->rkgwl", split, k, preferred_element_type=jnp.float32) * queries.scale
    scores = soft_capped(scores, queries.cap)
    before = positions[..., None] - at[None, None]
    if bias is not None:
        scores = scores + jnp.moveaxis(bias(-before).astype(jnp.float32), -1, 1).reshape(scores.shape)
    visible = (before >= 0) & (at[None, None] >= queries.first(positions)[..., None])
    return jnp.where((visible & (positions[..., None] >= 0))[:, None, None], scores, -jnp.inf)


def _zero_unseen(v: Array, queries: PagedQueries, at: Array) -> Array:
    """Values [R, L, K, U] at positions `at` int32 [L], with zeros after the end of each row, and before its window. A
    block may hold nonfinite numbers of another request there, and 0 times these is not 0."""
    visible = at[None] <= queries.positions.max(1)[:, None]
    visible &= at[None] >= queries.first(_lowest(queries.positions))[:, None]
    return jnp.where(visible[..., None, None], v, 0)


def _lowest(positions: Array) -> Array:
    """int32 [R]: the lowest position of each row's queries."""
    return jnp.where(positions < 0, jnp.iinfo(jnp.int32).max, positions).min(1)


def _joined(mixed: Array, q: Array) -> Array:
    """[R, K, N/K, W, U] -> [R, W, N, U] in q's dtype."""
    return jnp.moveaxis(mixed, 3, 1).reshape(*q.shape[:3], mixed.shape[-1]).astype(q.dtype)
