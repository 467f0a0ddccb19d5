"""Moving arrays between two layouts by hand, inside fully manual code.

Bare all_gather or psum_scatter over a manual axis first gathers the dimensions left to the compiler, so everything here
runs in an island (see Layout.island).
"""

from collections.abc import Sequence

from jax import Array, lax
from jax.experimental.layout import Layout, with_layout_constraint

from megajax.mesh.mesh import manual_axes
from megajax.mesh.observations import Reduction
from megajax.mesh.rules import SHARDS, LogicalAxes, Rules

type Moves = tuple[tuple[int, str], ...]


def moved_axes(source: Rules, target: Rules, axes: LogicalAxes) -> Moves:
    """(dimension, mesh axis) pairs that are sharded under `source` and not under `target`, outermost first."""
    pairs = zip(source.dimensions(axes), target.dimensions(axes), strict=True)
    return tuple(
        (dimension, axis) for dimension, (before, after) in enumerate(pairs) for axis in before if axis not in after
    )


def _by_dimension(moves: Moves) -> dict[int, tuple[str, ...]]:
    grouped: dict[int, tuple[str, ...]] = {}
    for dimension, axis in moves:
        grouped[dimension] = (*grouped.get(dimension, ()), axis)
    return grouped


def gather_shards(x: Array, moves: Moves) -> Array:
    """All-gather the named dimensions over the named mesh axes; transposes to the reduce-scatter."""
    for dimension, names in _by_dimension(moves).items():
        x = lax.all_gather(x, names, axis=dimension, tiled=True)
    return x


def reduce_shards(x: Array, moves: Moves, also: Sequence[str] = ()) -> Array:
    """Sum over the mesh axes of `moves`, each device keeping its shard, and over `also`, each keeping all of it."""
    for dimension, names in _by_dimension(moves).items():
        x = lax.psum_scatter(x, names, scatter_dimension=dimension, tiled=True)
    return lax.psum(x, tuple(also)) if also else x


def row_major(x: Array) -> Array:
    """x, stored with its last dimension contiguous.

    A gather over the second dimension leaves that one outermost unless told otherwise, and a layer's row of a stack is
    then spread over memory: every use of the row would copy it.
    """
    return with_layout_constraint(x, Layout(major_to_minor=tuple(range(x.ndim))))


def combined_over(x: Array, axes: Sequence[str], reduction: Reduction) -> Array:
    """The maximum or the sum over the mesh axes, on all their devices."""
    return (lax.pmax if reduction == "max" else lax.psum)(x, tuple(axes))


def replica_axes() -> tuple[str, ...]:
    """Manual mesh axes with more than one device that work on different tokens."""
    sizes = manual_axes()
    return tuple(axis for axis in SHARDS if sizes.get(axis, 1) > 1)


def manual_replicas() -> tuple[str, ...]:
    """Manual mesh axes with more than one device: a weight's gradient is a sum over those that do not cut it."""
    return tuple(axis for axis, size in manual_axes().items() if size > 1)
