"""Other layouts made from the one an array has."""

from collections.abc import Sequence
from math import prod

from jax.sharding import NamedSharding, PartitionSpec


def uncut(sharding: NamedSharding, shape: Sequence[int]) -> NamedSharding:
    """Each device has all rows of a part of the array: the mesh axes of dimension 0 go to another dimension.

    Each goes to the first one whose size it divides, after the axes which that one is cut over already. Where there is
    none the array is replicated over the axis. The kind of memory stays.
    """
    spec = [axes_of(sharding, dimension) for dimension in range(len(shape))]
    freed, spec[0] = spec[0], ()
    for axis in freed:
        for dimension, size in list(enumerate(shape))[1:]:
            if size % prod(sharding.mesh.shape[name] for name in (*spec[dimension], axis)) == 0:
                spec[dimension] = (*spec[dimension], axis)
                break
    entries = [(axes if len(axes) > 1 else axes[0]) if axes else None for axes in spec]
    return NamedSharding(sharding.mesh, PartitionSpec(*entries), memory_kind=sharding.memory_kind)


def axes_of(sharding: NamedSharding, dimension: int) -> tuple[str, ...]:
    """Mesh axes that a dimension is cut over."""
    entry = sharding.spec[dimension] if dimension < len(sharding.spec) else None
    return (entry,) if isinstance(entry, str) else tuple(entry or ())


def parts(sharding: NamedSharding, dimension: int) -> int:
    """Number of parts that a dimension is cut into."""
    return prod(sharding.mesh.shape[axis] for axis in axes_of(sharding, dimension))
