"""Stacked weights stored in one order of rows, for a run that has another: another pipeline, or none."""

from collections.abc import Mapping
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import NamedSharding

from megajax.layers.param import ParamSpec, RowOrder
from megajax.mesh.shardings import shard_count, unsharded_rows


def stored_chunks(meta: Mapping[str, Any]) -> list[range]:
    """Numbers of the layers of each chunk of a checkpoint, in the order in which they are stored; one is of all."""
    return [range(*ends) for ends in meta["rows"]]


def like_stored[Tree](like: Tree, declared: Mapping[str, ParamSpec], order_of: RowOrder) -> Tree:
    """`like`, with the rows of stacked weights and their moments as they were stored.

    Rows are cut over the mesh as in `like` where their number divides, else another dimension is; see `unsharded_rows`.
    """

    def stored(path: tuple, leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        if (layers := _layers(path, declared)) is None:
            return leaf
        rows, sharding = len(order_of(layers)), leaf.sharding
        shape = rows, *leaf.shape[1:]
        if rows % shard_count(sharding, 0):
            sharding = unsharded_rows(sharding, shape)
        return jax.ShapeDtypeStruct(shape, leaf.dtype, sharding=sharding)

    return jax.tree_util.tree_map_with_path(stored, like)


def reorder[Tree](
    state: Tree, like: Tree, declared: Mapping[str, ParamSpec], stored: RowOrder, wanted: RowOrder
) -> Tree:
    """A state with rows in the order `stored`, in the order `wanted` and laid out like `like`.

    Arrays are reordered one after another and `state`'s are deleted as soon as they have been read: memory never holds
    more than the state and one array twice. Leaves that are not stacked are returned as they are.
    """

    @cache
    def compiled(layers: tuple[int, ...], target: NamedSharding, between: NamedSharding) -> jax.stages.Wrapped:
        place = {layer: row for row, layer in enumerate(stored(layers)) if layer >= 0}
        source = np.array([place.get(layer, 0) for layer in wanted(layers)], np.int32)
        none = np.array([layer < 0 for layer in wanted(layers)])
        return jax.jit(partial(_take, source=source, none=none, between=between), out_shardings=target)

    def moved(path: tuple, leaf: Array, target: jax.ShapeDtypeStruct) -> Array:
        if (layers := _layers(path, declared)) is None:
            return leaf
        kept, device = target.sharding, _on_device(target.sharding)
        take = compiled(layers, device, unsharded_rows(device, leaf.shape))
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


def same_order(declared: Mapping[str, ParamSpec], stored: RowOrder, wanted: RowOrder) -> bool:
    """Whether the rows of every stacked weight are in the same order."""
    each = {layers_of(spec) for spec in declared.values() if spec.layers}
    return all(stored(layers) == wanted(layers) for layers in each)


def _layers(path: tuple, declared: Mapping[str, ParamSpec]) -> tuple[int, ...] | None:
    """The layers of a leaf of the state that is a stacked weight, or one of its moments, kept under its name."""
    key = getattr(path[-1], "key", None)
    spec = None if key is None else declared.get(key)
    return None if spec is None or not spec.layers else layers_of(spec)


def layers_of(spec: ParamSpec) -> tuple[int, ...]:
    """Numbers of the layers that have a stacked weight, in their order."""
    return tuple(sorted(layer for layer in spec.layers if layer >= 0))
