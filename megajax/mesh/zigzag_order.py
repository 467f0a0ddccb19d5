"""The order of positions in rows sharded over `context`: zigzag for causal models, plain chunks for others.

With a causal mask, the last positions of a row have the most work. In zigzag order a row has 2 C chunks for C devices,
and device r holds chunks r and 2 C - 1 - r, so every device has the same work (Brandon et al. 2023, "Striped
Attention", discusses the imbalance; Grattafiori et al. 2024, "The Llama 3 Herd of Models", section 3.3.2, uses this
order). The loader arranges rows in this order (`places`), so devices move no tokens. Inside the step, `Context.index`
holds the positions of a device.

B rows, T positions of a row, S = T / C of a device.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from megajax.mesh.config import ContextSharding

AXIS = "context"


@dataclass(frozen=True, slots=True)
class SequenceSharding(ContextSharding):
    """A context sharding with the order of positions in arrays."""

    stride: int = 1
    """Distance along the mesh axis between neighbouring devices of the C."""

    def chunk_order(self) -> np.ndarray:
        """Numbers of the chunks in the row, device by device; ascending on each device."""
        if self.rounds == 0:
            return np.arange(self.devices)
        last = 2 * self.devices - 1
        return np.array(
            [n * (last + 1) + i for r in range(self.devices) for n in range(self.rounds) for i in (r, last - r)]
        )

    def places(self, length: int) -> np.ndarray:
        """int32 [T]: positions of a row, device by device; length: T."""
        return np.arange(length, dtype=np.int32).reshape(self.unit, -1)[self.chunk_order()].ravel()

    def arranged(self, values: np.ndarray, axes: Sequence[str | None]) -> np.ndarray:
        """A host array of whole rows with every dimension `seq` arranged device by device. axes: its logical axes."""
        for dimension, axis in enumerate(axes):
            if axis == "seq" and self.unit > 1:
                values = np.take(values, self.places(values.shape[dimension]), axis=dimension)
        return values

    def rank(self) -> Array:
        """int32 []: index of this device among the C; the mesh axis must be manual."""
        return lax.axis_index(AXIS) // self.stride if self.devices > 1 else jnp.zeros((), jnp.int32)

    def local_index(self, length: int, rank: Array | None = None) -> Array:
        """int32 [S]: positions of a device in the row; length: S; rank: index of the device, None for this one."""
        if self.devices == 1:
            return jnp.arange(length, dtype=jnp.int32)
        size = length // self.chunks
        starts = jnp.asarray(self.chunk_order().reshape(self.devices, -1), jnp.int32)
        starts = starts[self.rank() if rank is None else rank] * size
        return (starts[:, None] + jnp.arange(size, dtype=jnp.int32)[None]).reshape(length)

    def in_order(self, x: Array) -> Array:
        """[B, T, ...] gathered device by device -> in the row's order."""
        return self._by_chunk(x, np.argsort(self.chunk_order()))

    def by_device(self, x: Array) -> Array:
        """[B, T, ...] in the row's order -> device by device."""
        return self._by_chunk(x, self.chunk_order())

    def _by_chunk(self, x: Array, order: np.ndarray) -> Array:
        """Reorders the chunks of x [B, T, ...] by slices: a gather by index would copy position by position."""
        if (order == np.arange(len(order))).all():
            return x
        size = x.shape[1] // len(order)
        piece = partial(lax.slice_in_dim, x, axis=1)
        return jnp.concatenate([piece(i * size, (i + 1) * size) for i in order.tolist()], axis=1)

    def plain(self) -> "SequenceSharding":
        """This sharding with plain chunks: the layout of arrays if the mesh axis is not manual.

        Without a ring, because not every kernel supports plain chunks of causal rows in a ring.
        """
        return replace(self, rounds=0, strategy="all_gather" if "ring" in self.strategy else self.strategy)

    def exchanged(self) -> "SequenceSharding":
        """The sharding over groups that have exchanged heads: a group has the positions of all its devices."""
        groups = self.devices // self.exchanging
        return replace(self, devices=groups, exchanging=1, stride=self.exchanging)

    def neighbours(self) -> "SequenceSharding":
        """The sharding of a group's positions over its devices."""
        return replace(self, devices=self.exchanging, exchanging=1, strategy="all_gather")


UNSHARDED_ROWS = SequenceSharding()
"""Each device holds whole rows."""
