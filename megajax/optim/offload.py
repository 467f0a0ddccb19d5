"""Moments that wait in host memory between updates."""

from collections.abc import Mapping
from typing import Any

import jax
from jax import Array
from jax.sharding import NamedSharding

from megajax.optim.optimizer import OptimizerState

HOST = "pinned_host"


def in_host_memory(shardings: Mapping[str, Any], shapes: Mapping[str, Any], share: float) -> dict[str, Any]:
    """An optimizer's shardings with the largest moments in host memory, until their bytes reach the share.

    shardings, shapes: as an OptimizerState has arrays; shapes of jax.ShapeDtypeStruct.
    """
    sizes = {
        (name, path): array.size * array.dtype.itemsize
        for name, part in shapes.items()
        if isinstance(part, dict)
        for path, array in part.items()
    }
    wanted = share * sum(sizes.values())
    found = {name: dict(part) if isinstance(part, dict) else part for name, part in shardings.items()}
    for name, path in sorted(sizes, key=lambda key: -sizes[key]):
        if wanted <= 0:
            break
        found[name][path] = found[name][path].with_memory_kind(HOST)
        wanted -= sizes[name, path]
    return found


def on_device(state: OptimizerState, shardings: Mapping[str, Any]) -> OptimizerState:
    """What waits in host memory brought to the device; traced."""
    return jax.tree.map(lambda x, s: _moved(x, s, jax.memory.Space.Device), state, dict(shardings))


def at_rest(state: OptimizerState, shardings: Mapping[str, Any]) -> OptimizerState:
    """What is to wait in host memory sent there; traced."""
    return jax.tree.map(lambda x, s: _moved(x, s, jax.memory.Space.Host), state, dict(shardings))


def _moved(x: Array, sharding: NamedSharding, space: jax.memory.Space) -> Array:
    return jax.device_put(x, space) if sharding.memory_kind == HOST else x
