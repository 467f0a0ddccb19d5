"""Attention in tiles of keys, with one running softmax for each query (Milakov and Gimelshein 2018): for whole rows, as
the kernel `fixed` of training, and for a paged cache.

With `FENCES`, the compiler joins no operation of a tile with others, so that training and an engine, whose programs
have little else in common, compute a query by the same operations in the same order. On CPUs the results then have the
same bits, if the products have at least `QUERIES` queries and the tiles begin at the same positions of a text: a packed
document has to begin at a multiple of `TILE`. Tiles that a query does not see add exact zeros.

R rows, W queries of each, L keys of a tile, N query heads, K key-value heads (N a multiple of K), H head size, U size
of a value head.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp
from jax import Array, lax

from megajax.kernels.attention.mask import Mask
from megajax.kernels.soft_cap import soft_capped

TILE = 64
"""Keys of a tile."""
QUERIES = 64
"""Queries of a row from which the products of CPUs have the same bits for any number of them; measured."""

type Fence = Callable[[tuple[Array, ...]], tuple[Array, ...]]
FENCES: Fence = lax.optimization_barrier
"""The values before it are computed apart from those after it."""


class Tile(NamedTuple):
    """Keys and values of a tile."""

    k: Array
    """[R, L, K, H]."""
    v: Array
    """[R, L, K, U]; finite also where no query sees it."""
    visible: Array
    """bool [R or 1, W, L]."""
    bias: Array | None = None
    """float32 [R, K, N/K, W, L], added to the scores."""


def attend_tiles(
    q: Array,
    tile_at: Callable[[Array], Tile],
    bounds: tuple[Array | int, Array | int],
    groups: int,
    value_size: int,
    *,
    scale: float,
    cap: float | None = None,
    sink: Array | None = None,
    fence: Fence = lambda values: values,
) -> tuple[Array, Array]:
    """The output [R, W, N, U] in q's dtype and its log-sum-exp float32 [R, N, W]; 0 and -inf for a query without keys.

    q [R, W, N, H]; tile_at: the tile of a number; bounds: the first number, and the one after the last; groups: K;
    cap: soft cap of scores; sink: [N], a score without a value.
    """
    rows, width, heads, size = q.shape
    split = q.reshape(rows, width, groups, heads // groups, size)

    def add_tile(number: Array, carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        highest, total, mixed = carry
        tile = tile_at(number)
        k, v = fence((tile.k, tile.v))
        scores = jnp.einsum("rwkgh,rlkh->rkgwl", split, k, preferred_element_type=jnp.float32) * scale
        scores = soft_capped(scores, cap)
        scores = scores if tile.bias is None else scores + tile.bias
        scores, v = fence((jnp.where(tile.visible[:, None, None], scores, -jnp.inf), v))
        higher = jnp.maximum(highest, scores.max(-1))
        finite = jnp.where(jnp.isneginf(higher), 0.0, higher)
        weights, shrink = fence((jnp.exp(scores - finite[..., None]), jnp.exp(highest - finite)))
        product = jnp.einsum("rkgwl,rlku->rkgwu", weights.astype(v.dtype), v, preferred_element_type=jnp.float32)
        product, added = fence((product, weights.sum(-1)))
        return higher, total * shrink + added, mixed * shrink[..., None] + product

    shape = (rows, groups, heads // groups, width)
    if sink is None:
        highest, total = jnp.full(shape, -jnp.inf), jnp.zeros(shape)
    else:
        first = sink.astype(jnp.float32).reshape(1, groups, -1, 1)
        highest, total = jnp.broadcast_to(first, shape), jnp.ones(shape)
    highest, total, mixed = lax.fori_loop(*bounds, add_tile, (highest, total, jnp.zeros((*shape, value_size))))
    mixed, total = fence((mixed, total))
    (out,) = fence((joined(mixed / jnp.where(total > 0, total, 1)[..., None], q),))
    return out, (highest + jnp.log(total)).reshape(rows, heads, width)


def joined(mixed: Array, q: Array) -> Array:
    """[R, K, N/K, W, U] -> [R, W, N, U] in q's dtype."""
    return jnp.moveaxis(mixed, 3, 1).reshape(*q.shape[:3], mixed.shape[-1]).astype(q.dtype)


def forward(q: Array, k: Array, v: Array, mask: Mask, *, scale: float, cap: float | None = None) -> tuple[Array, Array]:
    """`megajax.kernels.attention.attention.Passes.forward` of the kernel `fixed`, over whole rows of keys."""
    length, width = k.shape[1], q.shape[1]
    more = ((0, 0), (0, max(0, QUERIES - width)))
    q = jnp.pad(q, (*more, (0, 0), (0, 0)))
    query_segments = None if mask.query_segments is None else jnp.pad(mask.query_segments, more)
    mask = mask._replace(query_index=jnp.pad(mask.query_index, more[1]), query_segments=query_segments)
    padding = (0, -length % TILE)
    k, v = (jnp.pad(x, ((0, 0), padding, (0, 0), (0, 0))) for x in (k, v))
    index = jnp.pad(mask.key_index, padding)
    segments = None if mask.key_segments is None else jnp.pad(mask.key_segments, ((0, 0), padding))

    def tile_at(number: Array) -> Tile:
        def part(x: Array, axis: int = 1) -> Array:
            return lax.dynamic_slice_in_dim(x, number * TILE, TILE, axis)

        keys = mask._replace(key_index=part(index, 0), key_segments=None if segments is None else part(segments))
        inside = number * TILE + jnp.arange(TILE) < length
        return Tile(part(k), part(v), keys.visible() & inside[None, None])

    bounds = 0, k.shape[1] // TILE
    groups, value_size = k.shape[2], v.shape[-1]
    out, log_sum = attend_tiles(q, tile_at, bounds, groups, value_size, scale=scale, cap=cap, fence=FENCES)
    return out[:, :width], log_sum[..., :width]
