"""How rows are cut over the devices of `context`: in zigzag for causal models, in plain chunks for others.

A causal mask gives the last positions of a row the most work. In zigzag order a row has 2 C chunks for C devices, and
device r holds chunks r and 2 C - 1 - r: every device has the same work (Brandon et al. 2023, "Striped Attention",
discusses the imbalance; Grattafiori et al. 2024, "The Llama 3 Herd of Models", section 3.3.2, has this order). The
loader makes the order (`places`), so no device moves tokens for it. Inside the step `Context.index` says which
positions a device holds, and everything else reads that.

B rows, T positions of a row, S = T / C of a device.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from megajax.mesh.context_sharding import ContextSharding

AXIS = "context"


@dataclass(frozen=True, slots=True)
class SequenceSharding(ContextSharding):
    """A cut, with the order of positions in arrays."""

    stride: int = 1
    """Places along the mesh axis from one of the C devices to the next."""

    def chunk_order(self) -> np.ndarray:
        """Number in the row of each chunk, device by device; a device's chunks ascend."""
        if self.rounds == 0:
            return np.arange(self.devices)
        last = 2 * self.devices - 1
        return np.array(
            [n * (last + 1) + i for r in range(self.devices) for n in range(self.rounds) for i in (r, last - r)]
        )

    def places(self, length: int) -> np.ndarray:
        """int32 [T]: positions of a row in the order in which devices hold them; length: T."""
        return np.arange(length, dtype=np.int32).reshape(self.unit, -1)[self.chunk_order()].ravel()

    def arranged(self, values: np.ndarray, axes: Sequence[str | None]) -> np.ndarray:
        """An array of whole rows on the host with every dimension `seq` device by device. axes: of its dimensions."""
        for dimension, axis in enumerate(axes):
            if axis == "seq" and self.unit > 1:
                values = np.take(values, self.places(values.shape[dimension]), axis=dimension)
        return values

    def rank(self) -> Array:
        """int32 []: number of this device among the C, where the mesh axis is manual."""
        return lax.axis_index(AXIS) // self.stride if self.devices > 1 else jnp.zeros((), jnp.int32)

    def local_index(self, length: int, rank: Array | None = None) -> Array:
        """int32 [S]: positions in the row that a device holds; length: S; rank: of the device, None for this one."""
        if self.devices == 1:
            return jnp.arange(length, dtype=jnp.int32)
        size = length // self.chunks
        starts = jnp.asarray(self.chunk_order().reshape(self.devices, -1), jnp.int32)
        starts = starts[self.rank() if rank is None else rank] * size
        return (starts[:, None] + jnp.arange(size, dtype=jnp.int32)[None]).reshape(length)

    def in_order(self, x: Array) -> Array:
        """[B, T, ...] as gathered device by device -> in the row's order."""
        return self._by_chunk(x, np.argsort(self.chunk_order()))

    def by_device(self, x: Array) -> Array:
        """[B, T, ...] in the row's order -> device by device."""
        return self._by_chunk(x, self.chunk_order())

    def _by_chunk(self, x: Array, order: np.ndarray) -> Array:
        """Chunks of x [B, T, ...] in another order, as slices: a gather by index would copy position by position."""
        if (order == np.arange(len(order))).all():
            return x
        size = x.shape[1] // len(order)
        cut = partial(lax.slice_in_dim, x, axis=1)
        return jnp.concatenate([cut(i * size, (i + 1) * size) for i in order.tolist()], axis=1)

    def plain(self) -> "SequenceSharding":
        """The same devices with rows in plain chunks: how arrays are laid out where the mesh axis is not manual.

        Without a ring, in which not every kernel takes plain chunks of causal rows.
        """
        return replace(self, rounds=0, strategy="all_gather" if "ring" in self.strategy else self.strategy)

    def exchanged(self) -> "SequenceSharding":
        """Of the groups of devices that have exchanged heads: each holds the positions of all its devices."""
        groups = self.devices // self.exchanging
        return replace(self, devices=groups, exchanging=1, stride=self.exchanging)

    def neighbours(self) -> "SequenceSharding":
        """Of the devices of a group, among the positions of the group."""
        return replace(self, devices=self.exchanging, exchanging=1, strategy="all_gather")


UNSHARDED_ROWS = SequenceSharding()
"""Every device holds whole rows."""
