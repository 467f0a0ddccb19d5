"""Tiles of rows sorted by group: the rows of each tile belong to one group."""

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


def most_tiles(rows: int, groups: int, block: int, align: int = 1) -> int:
    """Upper bound of the number of tiles for any group sizes; arguments as in `tiles`."""
    return (rows + groups * (block + align - 2)) // block


def tiles(sizes: Array, rows: int, block: int, align: int = 1) -> Tiles:
    """Splits each group, sizes int32 [E], into tiles of at most `block` rows.

    A group's tiles start at its first row, or at the multiple of `align` before it: the first row of a tile, rounded
    down to a multiple of `align`, is at most `block` rows before the tile's end. On average, half a tile per group is
    empty; with tiles at multiples of `block` it would be a whole tile.
    """
    ends = jnp.cumsum(sizes, dtype=jnp.int32)
    starts = ends - sizes
    origins = starts // align * align
    counts = jnp.where(sizes > 0, -(-(ends - origins) // block), 0)
    until = jnp.cumsum(counts, dtype=jnp.int32)
    tile = jnp.arange(most_tiles(rows, sizes.shape[0], block, align), dtype=jnp.int32)
    group = jnp.minimum((tile[:, None] >= until[None]).sum(1, dtype=jnp.int32), sizes.shape[0] - 1)
    origin = origins[group] + (tile - until[group] + counts[group]) * block
    first, end = jnp.maximum(origin, starts[group]), jnp.minimum(origin + block, ends[group])
    live = tile < until[-1]
    return Tiles(jnp.where(live, group, 0), jnp.where(live, first, 0), jnp.where(live, end, 0), until[-1])
