"""Moments that wait in host memory between updates.

Which they are follows from shapes, not from shardings: devices that are not there have no kinds of memory.
"""

from collections.abc import Callable, Mapping
from typing import Any

import jax

from megajax.optim.optimizer import OptimizerState

HOST = "pinned_host"


def offloaded(shapes: Mapping[str, Any], share: float) -> frozenset[tuple[str, str]]:
    """(kind of moment, path) of the largest moments, until their bytes reach the share.

    shapes: as an OptimizerState has arrays, or of jax.ShapeDtypeStruct.
    """
    sizes = {
        (name, path): array.size * array.dtype.itemsize
        for name, part in shapes.items()
        if isinstance(part, dict)
        for path, array in part.items()
    }
    left, moved = share * sum(sizes.values()), set()
    for key in sorted(sizes, key=lambda key: -sizes[key]):
        if left > 0:
            moved.add(key)
            left -= sizes[key]
    return frozenset(moved)


def in_host_memory(shardings: Mapping[str, Any], shapes: Mapping[str, Any], share: float) -> dict[str, Any]:
    """An optimizer's shardings with those moments in host memory."""
    return _changed(shardings, offloaded(shapes, share), lambda sharding: sharding.with_memory_kind(HOST))


def to_device(state: OptimizerState, share: float) -> OptimizerState:
    """What waits in host memory brought to the device; traced."""
    return _changed(state, offloaded(state, share), lambda array: jax.device_put(array, jax.memory.Space.Device))


def to_host(state: OptimizerState, share: float) -> OptimizerState:
    """What is to wait in host memory sent there; traced."""
    return _changed(state, offloaded(state, share), lambda array: jax.device_put(array, jax.memory.Space.Host))


def _changed(tree: Mapping[str, Any], moved: frozenset[tuple[str, str]], change: Callable) -> dict[str, Any]:
    changed = {name: dict(part) if isinstance(part, dict) else part for name, part in tree.items()}
    for name, path in moved:
        changed[name][path] = change(changed[name][path])
    return changed
