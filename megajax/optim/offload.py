"""Offloads moments to host memory between updates.

Shapes, not shardings, determine which moments are offloaded: virtual devices have no memory kinds.
"""

from collections.abc import Callable, Mapping
from typing import Any

import jax

from megajax.optim.optimizer import OptimizerState

HOST = "pinned_host"


def offloaded(shapes: Mapping[str, Any], share: float) -> frozenset[tuple[str, str]]:
    """(kind of moment, path) of the largest moments, until their bytes reach the share.

    shapes: an OptimizerState of arrays or of jax.ShapeDtypeStruct.
    """
    sizes = {
        (name, path): array.size * array.dtype.itemsize
        for name, part in shapes.items()
        if isinstance(part, dict)
        for path, array in part.items()
    }
    remaining, moved = share * sum(sizes.values()), set()
    for key in sorted(sizes, key=lambda key: -sizes[key]):
        if remaining > 0:
            moved.add(key)
            remaining -= sizes[key]
    return frozenset(moved)


def in_host_memory(shardings: Mapping[str, Any], shapes: Mapping[str, Any], share: float) -> dict[str, Any]:
    """An optimizer's shardings with the offloaded moments in host memory."""
    return _changed(shardings, offloaded(shapes, share), lambda sharding: sharding.with_memory_kind(HOST))


def to_device(state: OptimizerState, share: float) -> OptimizerState:
    """The state with its offloaded moments on the device; traced."""
    return _changed(state, offloaded(state, share), lambda array: jax.device_put(array, jax.memory.Space.Device))


def to_host(state: OptimizerState, share: float) -> OptimizerState:
    """The state with its offloaded moments in host memory; traced."""
    return _changed(state, offloaded(state, share), lambda array: jax.device_put(array, jax.memory.Space.Host))


def _changed(tree: Mapping[str, Any], moved: frozenset[tuple[str, str]], change: Callable) -> dict[str, Any]:
    changed = {name: dict(part) if isinstance(part, dict) else part for name, part in tree.items()}
    for name, path in moved:
        changed[name][path] = change(changed[name][path])
    return changed
