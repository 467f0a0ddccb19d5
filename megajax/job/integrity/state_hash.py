"""A hash of every array of the train state, computed by each device over its own bytes.

Devices with the same part of an array have the same hash if their bytes are the same. Positions count in the whole
array, so the sum of the hashes of its parts, each part once, does not depend on the layout.
"""

from collections.abc import Iterator, Mapping, Sequence
from math import prod
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from megajax.mesh.array_hash import array_hash
from megajax.mesh.named_shardings import axes_of, one_for_each_device, replicated
from megajax.mesh.xla_options import Value
from megajax.optim.moments import to_device
from megajax.training.state import TrainState

LANES = 2
"""A hash is two uint32."""


class HashedLeaf(NamedTuple):
    """An array of the state, and its sharding."""

    path: str
    """Path in the state, for example "params.stack.blocks.0.mlp.up"."""
    sharded: tuple[bool, ...]
    """For each mesh axis, whether the array is sharded over it."""
    bytes: int
    """Bytes on each device."""

    def copies(self, mesh: Mesh) -> int:
        """Number of devices that hold the same bytes."""
        sizes = zip(mesh.devices.shape, self.sharded, strict=True)
        return prod(size for size, sharded in sizes if not sharded)


class Mismatch(NamedTuple):
    """Devices whose bytes differ from those of other devices with the same part of an array."""

    path: str
    devices: tuple[int, ...]
    """Positions in the mesh. Of two copies both, because either may be right."""
    copies: int
    """Number of devices that hold the part."""


class StateHash:
    """state -> uint32 [devices of the mesh, arrays, 2], the same on every process; compiled at the first call."""

    def __init__(
        self, shardings: Any, like: TrainState, mesh: Mesh, offload: float, options: Mapping[str, Value] | None = None
    ):
        """shardings, like: the state as NamedSharding and as jax.ShapeDtypeStruct; offload: the optimizer's share."""
        self.mesh, self._offload = mesh, offload
        placed: list[NamedSharding] = jax.tree.leaves(shardings)
        self._specs = [sharding.spec for sharding in placed]
        self.leaves = [
            HashedLeaf(_name(path), _sharded_axes(sharding, mesh), _bytes(leaf, sharding))
            for (path, leaf), sharding in zip(jax.tree_util.tree_leaves_with_path(like), placed, strict=True)
        ]
        self._hash = jax.jit(
            self.state_hash,
            out_shardings=replicated(mesh),
            compiler_options=None if options is None else dict(options),
        )

    def __call__(self, state: TrainState) -> np.ndarray:
        return np.asarray(self._hash(state))

    def state_hash(self, state: TrainState) -> Array:
        """The function that is compiled."""
        optimizer = to_device(state.optimizer, self._offload)
        arrays = [*jax.tree.leaves(state)]
        at = [i for i, leaf in enumerate(self.leaves) if leaf.path.startswith("optimizer.")]
        for i, array in zip(at, jax.tree.leaves(optimizer), strict=True):
            arrays[i] = array

        def local(*shards: Array) -> Array:
            hashes = [array_hash(x, offsets(spec, x.shape)) for x, spec in zip(shards, self._specs, strict=True)]
            return jnp.stack(hashes)[None]

        return jax.shard_map(
            local,
            mesh=self.mesh,
            in_specs=tuple(self._specs),
            out_specs=one_for_each_device(self.mesh),
            check_vma=False,
        )(*arrays)


def offsets(spec: PartitionSpec, shape: Sequence[int]) -> list[Array]:
    """Per dimension, uint32 []: index of this device's first element in the whole array. Called in a shard_map."""
    entries = [*spec, *[None] * (len(shape) - len(spec))]
    parts = [lax.axis_index(entry) if entry else jnp.int32(0) for entry in entries]
    return [part.astype(jnp.uint32) * jnp.uint32(size) for part, size in zip(parts, shape, strict=True)]


def mismatches(hashes: np.ndarray, leaves: Sequence[HashedLeaf], mesh: Mesh) -> Iterator[Mismatch]:
    """Arrays with copies that differ. hashes: from StateHash."""
    shape = mesh.devices.shape
    positions = np.arange(mesh.size).reshape(shape)
    for number, leaf in enumerate(leaves):
        order = [*_indices(leaf.sharded, sharded=True), *_indices(leaf.sharded, sharded=False)]
        copies = leaf.copies(mesh)
        table = hashes[:, number].reshape(*shape, LANES).transpose(*order, len(shape)).reshape(-1, copies, LANES)
        if (table == table[:, :1]).all():
            continue
        devices_by_part = positions.transpose(order).reshape(-1, copies)
        for row, devices in zip(table, devices_by_part, strict=True):
            if odd := _minority(row):
                yield Mismatch(leaf.path, tuple(int(devices[i]) for i in odd), copies)


def _minority(row: np.ndarray) -> list[int]:
    """Indices of the rows that differ from the majority; all rows if there is none."""
    _, kind, count = np.unique(row, axis=0, return_inverse=True, return_counts=True)
    kind = kind.reshape(-1)
    if len(count) == 1:
        return []
    top = int(count.max())
    if (count == top).sum() > 1:
        return list(range(len(row)))
    return [i for i, index in enumerate(kind) if count[index] < top]


def group_hashes(hashes: np.ndarray, leaves: Sequence[HashedLeaf], mesh: Mesh) -> dict[str, str]:
    """Part of the state -> 16 hexadecimal digits, the same on every layout that stores rows in the same order."""
    shape, sums = mesh.devices.shape, dict[str, np.ndarray]()
    for number, leaf in enumerate(leaves):
        first = tuple(slice(None) if sharded else 0 for sharded in leaf.sharded)
        parts = hashes[:, number].reshape(*shape, LANES)[first].reshape(-1, LANES)
        # Swapping two arrays must change the sum, so each is weighted by its place in the state.
        weight = np.uint64(2 * number + 1)
        group = group_of(leaf.path)
        total = parts.sum(0, dtype=np.uint64) * weight
        sums[group] = (sums.get(group, np.zeros(LANES, np.uint64)) + total) & np.uint64(0xFFFFFFFF)
    return {group: "".join(f"{int(lane):08x}" for lane in lanes) for group, lanes in sums.items()}


def group_of(path: str) -> str:
    """The group of an array's hash, for example params or optimizer.mu; all scalars are one group."""
    first, *more = path.split(".")
    if first == "optimizer":
        return ".".join([first, *more[:1]])
    return first if more else "counters"


def _indices(values: Sequence[bool], *, sharded: bool) -> list[int]:
    return [i for i, value in enumerate(values) if value is sharded]


def _name(path: Sequence[Any]) -> str:
    return ".".join(str(getattr(key, "name", getattr(key, "key", getattr(key, "idx", key)))) for key in path)


def _sharded_axes(sharding: NamedSharding, mesh: Mesh) -> tuple[bool, ...]:
    over = {axis for dimension in range(len(sharding.spec)) for axis in axes_of(sharding, dimension)}
    return tuple(axis in over for axis in mesh.axis_names)


def _bytes(leaf: Any, sharding: NamedSharding) -> int:
    return prod(sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
