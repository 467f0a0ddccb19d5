"""The division of rows that are sorted by group into tiles of one group each."""

from typing import NamedTuple

import jax.numpy as jnp
from jax import Array


class Tiles(NamedTuple):
    """Rows [first, end) and group of each tile, int32 [tiles] each. Tiles without rows come last, first == end == 0."""

    group: Array
    first: Array
    end: Array
    live: Array
    """Number of tiles with rows, int32 []."""


def most_tiles(rows: int, groups: int, block: int) -> int:
    """Number of tiles of up to `block` rows that are enough, however the rows are divided into groups."""
    return -(-rows // block) + groups - 1


def tiles(sizes: Array, rows: int, block: int) -> Tiles:
    """Cuts each group, sizes int32 [E], from its first row on into tiles of at most `block` rows.

    On average half a tile a group is empty. Tiles at fixed multiples of `block` would leave a whole one.
    """
    ends = jnp.cumsum(sizes, dtype=jnp.int32)
    starts = ends - sizes
    until = jnp.cumsum(-(-sizes // block), dtype=jnp.int32)
    tile = jnp.arange(most_tiles(rows, sizes.shape[0], block), dtype=jnp.int32)
    group = jnp.minimum((tile[:, None] >= until[None]).sum(1, dtype=jnp.int32), sizes.shape[0] - 1)
    before = jnp.where(group > 0, until[group - 1], 0)
    first = starts[group] + (tile - before) * block
    end = jnp.minimum(first + block, ends[group])
    live = tile < until[-1]
    return Tiles(jnp.where(live, group, 0), jnp.where(live, first, 0), jnp.where(live, end, 0), until[-1])
