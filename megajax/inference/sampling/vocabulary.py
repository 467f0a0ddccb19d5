"""Orders and sums over a sharded vocabulary, inside an island.

Devices exchange sums and their few largest entries, never all logits. R rows, V ids of this device's shard.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import Array, lax

from megajax.kernels.cross_entropy import VocabularyShard

BITS = 32


def ids_of(shard: VocabularyShard, count: int) -> Array:
    """Ids of the `count` columns of this device, int32 [V]."""
    return shard.first + jnp.arange(count, dtype=jnp.int32)


def best(x: Array, k: int, shard: VocabularyShard) -> tuple[Array, Array]:
    """The k largest entries of each row of x [R, V] over all devices, and their ids, int32: both [R, k].

    In descending order; equal entries by ascending id, like numpy.argmax.
    """
    if k == 1:
        places = jnp.argmax(x, -1).astype(jnp.int32)[:, None]
        values = jnp.take_along_axis(x, places, -1)
    else:
        values, places = lax.top_k(x, min(k, x.shape[1]))
    ids = ids_of(shard, x.shape[1])[places]
    if shard.axes:
        values, ids = (lax.all_gather(part, shard.axes, axis=1, tiled=True) for part in (values, ids))
        values, places = lax.top_k(values, min(k, values.shape[1]))
        ids = jnp.take_along_axis(ids, places, -1)
    return values, ids


def entries(x: Array, ids: Array, shard: VocabularyShard) -> Array:
    """x [R, V] at ids int32 [R], float32 [R]. 0 for ids of other devices, so the sum over devices is the entry."""
    place = ids - shard.first
    local = (place >= 0) & (place < x.shape[1])
    return jnp.where(local, jnp.take_along_axis(x, jnp.where(local, place, 0)[:, None], -1)[:, 0], 0)


def order_of(x: Array) -> Array:
    """float32 -> uint32 with the same order; -0 and 0 are equal, NaN is not allowed."""
    bits = lax.bitcast_convert_type(jnp.where(x == 0, 0, x), jnp.uint32)
    return jnp.where(bits >> (BITS - 1) == 1, ~bits, bits | jnp.uint32(1 << (BITS - 1)))


def threshold(order: Array, enough: Callable[[Array], Array]) -> Array:
    """The largest t with `enough(order >= t)`, uint32 [R]; 0 if there is none. A binary search, without a sort.

    order: uint32 [R, V]; enough: kept entries bool [R, V] -> bool [R], monotonic in the kept entries.
    """

    def step(bit: Array, t: Array) -> Array:
        higher = t | (jnp.uint32(1) << (BITS - 1 - bit).astype(jnp.uint32))
        return jnp.where(enough(order >= higher[:, None]), higher, t)

    return jax.lax.fori_loop(0, BITS, step, jnp.zeros(order.shape[0], jnp.uint32))
