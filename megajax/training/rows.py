"""Stacked weights stored in one order of rows, for a run that has another: another pipeline, or none."""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import NamedSharding, PartitionSpec

from megajax.layers.param import ParamSpec
from megajax.training.state import TrainState


def like_stored(like: TrainState, declared: Mapping[str, ParamSpec], order: Sequence[int]) -> TrainState:
    """`like`, with the rows of stacked weights and their moments as `order` has them.

    Each device gets as many rows as in `like`, if they divide, else all of them.
    """

    def stored(path: tuple, leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        if not _stacked(path, declared):
            return leaf
        sharding: Any = leaf.sharding
        shape = (len(order), *leaf.shape[1:])
        over, *rest = sharding.spec
        axes = (over,) if isinstance(over, str) else tuple(over or ())
        if len(order) % int(np.prod([sharding.mesh.shape[axis] for axis in axes])):
            sharding = NamedSharding(sharding.mesh, PartitionSpec(None, *rest))
        return jax.ShapeDtypeStruct(shape, leaf.dtype, sharding=sharding)

    return jax.tree_util.tree_map_with_path(stored, like)


def reorder(
    state: TrainState, like: TrainState, declared: Mapping[str, ParamSpec], stored: Sequence[int], wanted: Sequence[int]
) -> TrainState:
    """A state with rows in the order `stored`, in the order `wanted` and laid out like `like`; array after array.

    stored, wanted: for each row the repeat of the stack it holds, or -1 for a row of zeros that is none.
    """
    place = {repeat: row for row, repeat in enumerate(stored) if repeat >= 0}
    source = np.array([place.get(repeat, 0) for repeat in wanted], np.int32)
    none = np.array([repeat < 0 for repeat in wanted])

    def moved(path: tuple, leaf: Array, target: jax.ShapeDtypeStruct) -> Array:
        if not _stacked(path, declared):
            return leaf
        return _take(leaf, source, none, target.sharding)

    return jax.tree_util.tree_map_with_path(moved, state, like)


def _take(leaf: Array, source: np.ndarray, none: np.ndarray, sharding: Any) -> Array:
    def rows(leaf: Array) -> Array:
        taken = leaf[jnp.asarray(source)]
        return jnp.where(jnp.asarray(none).reshape(-1, *[1] * (leaf.ndim - 1)), 0, taken)

    return jax.jit(rows, out_shardings=sharding)(leaf)


def _stacked(path: tuple, declared: Mapping[str, ParamSpec]) -> bool:
    """Whether a leaf of the state is a stacked weight, or one of its moments: those are kept under its name."""
    key = getattr(path[-1], "key", None)
    return key in declared and bool(declared[key].layers)
