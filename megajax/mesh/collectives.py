"""Explicit collectives between two layouts, for fully manual code, and products whose partial sums are added.

A plain all_gather or psum_scatter over one manual axis first gathers the dimensions that the compiler shards.
Therefore the collectives here run in an island (see Layout.island).
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax import Array, lax
from jax.experimental.layout import Layout, with_layout_constraint
from jax.sharding import PartitionSpec

from megajax.mesh.config import TOKEN_AXES
from megajax.mesh.layer_observations import Reduction
from megajax.mesh.mesh import free_axes, manual_axes
from megajax.mesh.sharding_rules import LogicalAxes, Rules

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


type LetterSharding = tuple[tuple[str, tuple[str, ...]], ...]
"""Letters of an einsum equation with the free mesh axes over which their dimensions are sharded; others are not."""


def sharded_product(
    local: Callable[..., Array], terms: Sequence[Sequence[str]], out: Sequence[str], sharding: LetterSharding
) -> Callable[..., Array]:
    """`local`, on the parts of a device; partial sums are added over devices.

    terms: for each array, the letters of its dimensions, several letters for a dimension that joins them, of which only
    the first is sharded; out: those of the result. Letters that are not in `out` are summed over.

    Free axes become manual even where they shard nothing: a compiler for several devices would partition the product.
    """
    over = dict(sharding)
    if not free_axes():
        return local
    summed = {letters[0] for term in terms for letters in term if letters not in out}
    axes = tuple(axis for letter in sorted(summed) for axis in over.get(letter, ()))

    def part(*arrays: Array) -> Array:
        product = local(*arrays)
        return lax.psum(product, axes) if axes else product

    specs = [PartitionSpec(*(over.get(letters[0]) for letters in term)) for term in (*terms, out)]
    return jax.shard_map(
        part, axis_names=set(free_axes()), in_specs=tuple(specs[:-1]), out_specs=specs[-1], check_vma=False
    )


def on_each_device(local: Callable[..., Any]) -> Callable[..., Any]:
    """`local`, by every device on whole arrays. It is not differentiated.

    The compiler cuts blocks that lie on two devices by exchanges between neighbours. These are operations of all
    devices of a mesh, which stages of a pipeline, with loops of different lengths, wait for in vain.
    """
    if max(free_axes().values(), default=1) == 1:
        return local
    whole = PartitionSpec()
    return jax.shard_map(local, axis_names=set(free_axes()), in_specs=whole, out_specs=whole, check_vma=False)
