"""Reorders the layers of stacked weights: checkpoints store them in the order of their run's pipeline."""

from collections.abc import Mapping
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import NamedSharding

from megajax.interop.weights.regrouped import layers_of
from megajax.layers.param import ParamSpec, RowOrder
from megajax.mesh.named_shardings import shard_count, unsharded_rows


def stored_chunks(meta: Mapping[str, Any]) -> list[range]:
    """Layer numbers of each chunk of a checkpoint, in stored order."""
    return [range(*bounds) for bounds in meta["rows"]]


def like_stored[Tree](like: Tree, declared: Mapping[str, ParamSpec], order_of: RowOrder) -> Tree:
    """`like`, with the rows of stacked weights and their moments as they were stored.

    Rows are sharded as in `like` if their number is divisible, else another dimension is; see `unsharded_rows`.
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
    state: Tree, like: Tree, declared: Mapping[str, ParamSpec], stored: RowOrder, target_order: RowOrder
) -> Tree:
    """Reorders the rows of a state from `stored` to `target_order`, with the shardings of `like`.

    Arrays are reordered one by one, and `state`'s are deleted at once: memory never holds more than the state and a
    copy of one array. Leaves that are not stacked are returned unchanged.
    """

    @cache
    def compiled(layers: tuple[int, ...], target: NamedSharding, between: NamedSharding) -> jax.stages.Wrapped:
        place = {layer: row for row, layer in enumerate(stored(layers)) if layer >= 0}
        source = np.array([place.get(layer, 0) for layer in target_order(layers)], np.int32)
        none = np.array([layer < 0 for layer in target_order(layers)])
        return jax.jit(partial(_gather_rows, source=source, none=none, between=between), out_shardings=target)

    def moved(path: tuple, leaf: Array, target: jax.ShapeDtypeStruct) -> Array:
        if (layers := _layers(path, declared)) is None:
            return leaf
        sharding, device = target.sharding, _on_device(target.sharding)
        gather = compiled(layers, device, unsharded_rows(device, leaf.shape))
        placed = jax.device_put(gather(jax.device_put(leaf, _on_device(leaf.sharding))), sharding)
        placed.block_until_ready()
        leaf.delete()
        return placed

    return jax.tree_util.tree_map_with_path(moved, state, like)


def _gather_rows(leaf: Array, source: np.ndarray, none: np.ndarray, between: NamedSharding) -> Array:
    """Rows `source` of an array, zeros where `none`.

    The constraints give each device all rows of its part, so that it gathers from its own memory. Without them the
    compiler would copy the whole array to every device.
    """
    rows = jax.lax.with_sharding_constraint(leaf, between)
    empty = jnp.asarray(none).reshape(-1, *[1] * (leaf.ndim - 1))
    return jax.lax.with_sharding_constraint(jnp.where(empty, 0, rows[jnp.asarray(source)]), between)


def _on_device(sharding: jax.sharding.Sharding | None) -> NamedSharding:
    """The sharding with memory kind "device". Raises TypeError if it is no NamedSharding."""
    if not isinstance(sharding, NamedSharding):
        raise TypeError(f"the state's arrays have NamedShardings, not {sharding}")
    return NamedSharding(sharding.mesh, sharding.spec)


def same_order(declared: Mapping[str, ParamSpec], stored: RowOrder, target_order: RowOrder) -> bool:
    """Whether both orders are the same for every stacked weight."""
    stacks = {layers_of(spec) for spec in declared.values() if spec.layers}
    return all(stored(layers) == target_order(layers) for layers in stacks)


def _layers(path: tuple, declared: Mapping[str, ParamSpec]) -> tuple[int, ...] | None:
    """The layers of a leaf of the state, if it is a stacked weight or, under the same name, one of its moments."""
    key = getattr(path[-1], "key", None)
    spec = None if key is None else declared.get(key)
    return None if spec is None or not spec.layers else layers_of(spec)
