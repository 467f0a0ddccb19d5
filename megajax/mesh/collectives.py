"""Explicit collectives between two layouts, for fully manual code.

A plain all_gather or psum_scatter over one manual axis first gathers the dimensions that the compiler shards.
Therefore everything here runs in an island (see Layout.island).
"""

from collections.abc import Sequence

from jax import Array, lax
from jax.experimental.layout import Layout, with_layout_constraint

from megajax.mesh.config import TOKEN_AXES
from megajax.mesh.layer_observations import Reduction
from megajax.mesh.mesh import manual_axes
from megajax.mesh.rules import LogicalAxes, Rules

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
    """All-gather of each dimension over its mesh axes; the transpose is a reduce-scatter."""
    for dimension, names in _by_dimension(moves).items():
        x = lax.all_gather(x, names, axis=dimension, tiled=True)
    return x


def reduce_shards(x: Array, moves: Moves, also: Sequence[str] = ()) -> Array:
    """Reduce-scatter over the mesh axes of `moves`, and all-reduce over `also`."""
    for dimension, names in _by_dimension(moves).items():
        x = lax.psum_scatter(x, names, scatter_dimension=dimension, tiled=True)
    return lax.psum(x, tuple(also)) if also else x


def row_major(x: Array) -> Array:
    """x in row-major order.

    By default a gather over the second dimension makes that dimension the outermost one. A layer's row of a stack is
    then not contiguous, and every use of the row copies it.
    """
    return with_layout_constraint(x, Layout(major_to_minor=tuple(range(x.ndim))))


def combined_over(x: Array, axes: Sequence[str], reduction: Reduction) -> Array:
    """All-reduce over the mesh axes, by maximum or sum."""
    return (lax.pmax if reduction == "max" else lax.psum)(x, tuple(axes))


def token_axes() -> tuple[str, ...]:
    """Manual mesh axes with more than one device, over which tokens are sharded."""
    return tuple(axis for axis in manual_replicas() if axis in TOKEN_AXES)


def manual_replicas() -> tuple[str, ...]:
    """Manual mesh axes with more than one device. A weight's gradient is summed over those that do not shard it."""
    return tuple(axis for axis, size in manual_axes().items() if size > 1)


def rotated(x: Array, axes: Sequence[str], size: int) -> Array:
    """x of the previous device along mesh axes of `size` devices together; the first device gets x of the last."""
    return lax.ppermute(x, tuple(axes), [(place, (place + 1) % size) for place in range(size)])
