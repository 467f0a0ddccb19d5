"""Moments that wait in host memory between updates.

Which they are follows from shapes, not from shardings: devices that are not there have no kinds of memory.
"""

from collections.abc import Mapping
from typing import Any

import jax

from megajax.optim.optimizer import OptimizerState

HOST = "pinned_host"


def away(shapes: Mapping[str, Any], share: float) -> frozenset[tuple[str, str]]:
    """(kind of moment, path) of the largest moments, until their bytes reach the share.

    shapes: as an OptimizerState has arrays, or of jax.ShapeDtypeStruct.
    """
    sizes = {
        (name, path): array.size * array.dtype.itemsize
        for name, part in shapes.items()
        if isinstance(part, dict)
        for path, array in part.items()
    }
    wanted, found = share * sum(sizes.values()), set()
    for key in sorted(sizes, key=lambda key: -sizes[key]):
        if wanted <= 0:
            break
        found.add(key)
        wanted -= sizes[key]
    return frozenset(found)


def in_host_memory(shardings: Mapping[str, Any], shapes: Mapping[str, Any], share: float) -> dict[str, Any]:
    """An optimizer's shardings with those moments in host memory."""
    moved = away(shapes, share)
    found = {name: dict(part) if isinstance(part, dict) else part for name, part in shardings.items()}
    for name, path in moved:
        found[name][path] = found[name][path].with_memory_kind(HOST)
    return found


def on_device(state: OptimizerState, share: float) -> OptimizerState:
    """What waits in host memory brought to the device; traced."""
    return _moved(state, share, jax.memory.Space.Device)


def at_rest(state: OptimizerState, share: float) -> OptimizerState:
    """What is to wait in host memory sent there; traced."""
    return _moved(state, share, jax.memory.Space.Host)


def _moved(state: OptimizerState, share: float, space: jax.memory.Space) -> OptimizerState:
    found = {name: dict(part) if isinstance(part, dict) else part for name, part in state.items()}
    for name, path in away(state, share):
        found[name][path] = jax.device_put(found[name][path], space)
    return found
