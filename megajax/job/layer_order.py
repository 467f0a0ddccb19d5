"""Stacked weights stored in one order of rows, for a run that has another: another pipeline, or none."""

from collections.abc import Mapping, Sequence
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import NamedSharding

from megajax.layers.param import ParamSpec
from megajax.mesh.shardings import parts, uncut


def like_stored[Tree](like: Tree, declared: Mapping[str, ParamSpec], order: Sequence[int]) -> Tree:
    """`like`, with the rows of stacked weights and their moments as `order` has them.

    Rows are cut over the mesh as in `like` where their number divides, else another dimension is; see `uncut`.
    """

    def stored(path: tuple, leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        if not _stacked(path, declared):
            return leaf
        shape, sharding = (len(order), *leaf.shape[1:]), leaf.sharding
        if len(order) % parts(sharding, 0):
            sharding = uncut(sharding, shape)
        return jax.ShapeDtypeStruct(shape, leaf.dtype, sharding=sharding)

    return jax.tree_util.tree_map_with_path(stored, like)


def reorder[Tree](
    state: Tree, like: Tree, declared: Mapping[str, ParamSpec], stored: Sequence[int], wanted: Sequence[int]
) -> Tree:
    """A state with rows in the order `stored`, in the order `wanted` and laid out like `like`.

    Arrays are reordered one after another and `state`'s are deleted as soon as they have been read: memory never holds
    more than the state and one array twice. Leaves that are not stacked are returned as they are.

    stored, wanted: for each row the repeat of the stack it holds, or -1 for a row of zeros that is none.
    """
    place = {repeat: row for row, repeat in enumerate(stored) if repeat >= 0}
    source = np.array([place.get(repeat, 0) for repeat in wanted], np.int32)
    none = np.array([repeat < 0 for repeat in wanted])

    @cache
    def compiled(target: NamedSharding, between: NamedSharding) -> jax.stages.Wrapped:
        return jax.jit(partial(_take, source=source, none=none, between=between), out_shardings=target)

    def moved(path: tuple, leaf: Array, target: jax.ShapeDtypeStruct) -> Array:
        if not _stacked(path, declared):
            return leaf
        kept, device = target.sharding, _on_device(target.sharding)
        take = compiled(device, uncut(device, leaf.shape))
        placed = jax.device_put(take(jax.device_put(leaf, _on_device(leaf.sharding))), kept)
        placed.block_until_ready()
        leaf.delete()
        return placed

    return jax.tree_util.tree_map_with_path(moved, state, like)


def _take(leaf: Array, source: np.ndarray, none: np.ndarray, between: NamedSharding) -> Array:
    """Rows `source` of an array, zeros where `none`.

    A device with all rows of a part takes them from its own memory. Left alone, the compiler would bring the whole
    array to every device.
    """
    whole = jax.lax.with_sharding_constraint(leaf, between)
    empty = jnp.asarray(none).reshape(-1, *[1] * (leaf.ndim - 1))
    return jax.lax.with_sharding_constraint(jnp.where(empty, 0, whole[jnp.asarray(source)]), between)


def _on_device(sharding: jax.sharding.Sharding | None) -> NamedSharding:
    """The same in device memory, where programs compute. Raises TypeError if it is no NamedSharding."""
    if not isinstance(sharding, NamedSharding):
        raise TypeError(f"the state's arrays have NamedShardings, not {sharding}")
    return NamedSharding(sharding.mesh, sharding.spec)


def _stacked(path: tuple, declared: Mapping[str, ParamSpec]) -> bool:
    """Whether a leaf of the state is a stacked weight, or one of its moments: those are kept under its name."""
    key = getattr(path[-1], "key", None)
    spec = None if key is None else declared.get(key)
    return spec is not None and bool(spec.layers)
