"""Storage of moments between steps: float32, bfloat16, or float16 with a scale per array; on the device or the host.

Shapes, not shardings, determine which moments are offloaded: virtual devices have no memory kinds.
"""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from megajax.precision.cast import from_float16, to_float16

type OptimizerState = dict[str, Any]
"""count int32 []; for each kind of moment a dict from path to array, with float16 also KIND_scale float32 [paths]."""

SQUARES = ("second_moment",)
"""Averages of squares; updates are divided by their roots. float16 stores the roots: squares would need twice its
range, and a root that underflows to 0 would make updates unbounded."""

HOST = "pinned_host"
"""Memory kind of offloaded moments."""

SCALE = "_scale"
"""Suffix of a moment's name for the scales of its arrays, in the order of their sorted paths."""


def packed(moments: Mapping[str, Mapping[str, Array]], dtype: str) -> OptimizerState:
    """Moments in float32 by kind and path -> the stored state."""
    if dtype != "float16":
        return {name: {path: x.astype(dtype) for path, x in part.items()} for name, part in moments.items()}
    state: OptimizerState = {}
    for name, part in moments.items():
        square = name in SQUARES
        pairs = {path: to_float16(jnp.sqrt(x) if square else x, divisor=square) for path, x in part.items()}
        state[name] = {path: x for path, (x, _) in pairs.items()}
        state[name + SCALE] = jnp.stack([pairs[path][1] for path in sorted(pairs)])
    return state


def unpacked(state: OptimizerState) -> dict[str, dict[str, Array]]:
    """The stored state -> moments in float32 by kind and path."""
    moments: dict[str, dict[str, Array]] = {}
    for name, part in state.items():
        if not isinstance(part, dict):
            continue
        if name + SCALE not in state:
            moments[name] = {path: x.astype(jnp.float32) for path, x in part.items()}
            continue
        decoded = {
            path: from_float16(part[path], state[name + SCALE][place]) for place, path in enumerate(sorted(part))
        }
        moments[name] = {path: jnp.square(x) for path, x in decoded.items()} if name in SQUARES else decoded
    return moments


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
