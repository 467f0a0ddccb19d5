"""Functions of `jax.sharding.NamedSharding`s: what an array's sharding becomes without rows or a dimension."""

from collections.abc import Sequence

import jax
import numpy as np
from jax import Array
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from megajax.mesh.config import devices_over


def unsharded_rows(sharding: NamedSharding, shape: Sequence[int]) -> NamedSharding:
    """A sharding with dimension 0 unsharded: its mesh axes move to other dimensions.

    Each axis moves to the first dimension that it divides evenly, after the mesh axes of that dimension. If there is no
    such dimension, the array is replicated over the axis. The memory kind stays.
    """
    spec = [axes_of(sharding, dimension) for dimension in range(len(shape))]
    freed, spec[0] = spec[0], ()
    for axis in freed:
        for dimension, size in list(enumerate(shape))[1:]:
            if size % devices_over(sharding.mesh.shape, (*spec[dimension], axis)) == 0:
                spec[dimension] = (*spec[dimension], axis)
                break
    entries = [(axes if len(axes) > 1 else axes[0]) if axes else None for axes in spec]
    return NamedSharding(sharding.mesh, PartitionSpec(*entries), memory_kind=sharding.memory_kind)


def axes_of(sharding: NamedSharding, dimension: int) -> tuple[str, ...]:
    """Mesh axes that a dimension is sharded over."""
    entry = sharding.spec[dimension] if dimension < len(sharding.spec) else None
    return (entry,) if isinstance(entry, str) else tuple(entry or ())


def shard_count(sharding: NamedSharding, dimension: int) -> int:
    """Number of shards of a dimension."""
    return devices_over(sharding.mesh.shape, axes_of(sharding, dimension))


def without_dimension(sharding: NamedSharding, dimensions: int, left_out: int) -> NamedSharding:
    """The sharding of an array without one of the dimensions; it is replicated over that dimension's mesh axes."""
    spec = [*sharding.spec, *[None] * (dimensions - len(sharding.spec))]
    entries = *spec[:left_out], *spec[left_out + 1 :]
    return NamedSharding(sharding.mesh, PartitionSpec(*entries), memory_kind=sharding.memory_kind)


def replicated(mesh: Mesh) -> NamedSharding:
    """The sharding of a fully replicated array."""
    return NamedSharding(mesh, PartitionSpec())


def one_for_each_device(mesh: Mesh) -> PartitionSpec:
    """The spec of an array [devices of the mesh, ...] with one row per device."""
    return PartitionSpec(mesh.axis_names)


def one_for_each_group(axes: Sequence[str]) -> PartitionSpec:
    """The spec of an array with one row per index along these mesh axes."""
    return PartitionSpec(tuple(axes))


def each_process(mesh: Mesh, value: np.ndarray) -> Array:
    """[devices of the mesh, ...]: each device has the value of its process; all have the same shape and dtype."""
    sharding = NamedSharding(mesh, one_for_each_device(mesh))
    return jax.make_array_from_callback((mesh.size, *value.shape), sharding, lambda _: value[None])
