"""Computations of which each device makes its part, or all, over axes otherwise left to the compiler."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax import Array, lax
from jax.sharding import PartitionSpec

from megajax.mesh.mesh import free_axes

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
