"""Rows sorted by group, each to be multiplied by the matrix of its group, as recipes round them.

T rows, E groups; rows [T, K], matrices [E, N, K]. A group has scales of its own, and blocks of rows begin at its first
row: each group is rounded as if its product were computed alone.
"""

from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
from jax import Array, lax

from megajax.mesh.collectives import combined_over
from megajax.precision.blocks import amax_of


@partial(jax.tree_util.register_dataclass, data_fields=("sizes", "of_rows"), meta_fields=("axes",))
@dataclass(frozen=True, slots=True)
class Groups:
    """The groups of rows on a device."""

    sizes: Array
    """Rows of each group, int32 [E]."""
    of_rows: Array
    """Group of each row, int32 [T]; E for rows past the groups, which may hold anything."""
    axes: tuple[str, ...] = ()
    """Mesh axes that shard the columns of rows or matrices: largest magnitudes are over all of these devices."""

    @classmethod
    def of(cls, sizes: Array, rows: int, axes: tuple[str, ...] = ()) -> "Groups":
        ends = jnp.cumsum(sizes, dtype=jnp.int32)
        return cls(sizes, jnp.sum(jnp.arange(rows)[:, None] >= ends[None], axis=1, dtype=jnp.int32), axes)

    def aligned(self, x: Array, block: int) -> tuple[Array, "Groups"]:
        """Rows [T, K] with zeros after each group up to a multiple of `block` rows, [T', K], and their groups.

        So that blocks of rows hold rows of one group. T' is that of the worst case, in which each group needs padding.
        """
        if block == 1:
            return x, self
        number, rows = self.sizes.size, x.shape[0]
        most = rows + min(number, rows) * (block - 1)
        padded = Groups.of(-(-self.sizes // block) * block, -(-most // block) * block, self.axes)
        group = jnp.minimum(padded.of_rows, number - 1)
        row = jnp.arange(padded.of_rows.size) - (jnp.cumsum(padded.sizes) - padded.sizes)[group]
        source = row + (jnp.cumsum(self.sizes) - self.sizes)[group]
        source = jnp.where((padded.of_rows < number) & (row < self.sizes[group]), source, rows)
        return jnp.take(x, source, axis=0, mode="fill", fill_value=0), padded

    def amax(self, x: Array) -> Array:
        """Largest magnitudes of the rows [T, K] of each group, or of matrices [E, N, K]; float32 [E]."""
        sizes = amax_of(x, tuple(range(1, x.ndim))).astype(jnp.float32)
        if x.ndim == 2:
            number = jnp.arange(self.sizes.size)
            sizes = amax_of(jnp.where(self.of_rows[None] == number[:, None], sizes[None], 0), (1,))
        return combined_over(sizes, self.axes, "max") if self.axes else sizes

    def spread(self, values: Array, ndim: int) -> Array:
        """Numbers of groups [E] -> numbers for rows [T, 1] if ndim is 2, for matrices [E, 1, 1] if it is 3."""
        if ndim == 3:
            return values[:, None, None]
        return values[jnp.minimum(self.of_rows, values.size - 1)][:, None]

    def copies(self) -> int:
        """Devices along `axes`."""
        return lax.axis_size(self.axes) if self.axes else 1
