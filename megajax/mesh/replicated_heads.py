"""Replication of key-value heads for tensor parallelism with more devices than heads.

K heads, T devices of `tensor`, T a multiple of K. At rest and in the optimizer, a weight has K heads as in any other
layout. During the step, each device has the head that its query heads use. Query heads are sharded in order, so devices
i T/K to (i + 1) T/K - 1 have copies of head i. The gradients of the copies are summed once per step.
"""

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from megajax.mesh.collectives import reduce_shards
from megajax.mesh.layout import Layout
from megajax.mesh.mesh import free_axes
from megajax.mesh.sharding_rules import LogicalAxes

COPIED = "kv_heads_copied"


def copy_heads(layout: Layout, w: Array, axes: LogicalAxes) -> Array:
    """A weight with K heads, replicated over `tensor` -> T heads, one on each device; no communication.

    Weights without the axis or with copies already are returned unchanged, and all weights if there is no mesh.
    """
    if COPIED not in axes:
        return w
    dimension, (over, devices) = axes.index(COPIED), _devices(layout)
    heads = w.shape[dimension]
    if heads % devices == 0:
        return w

    def local_head(w: Array) -> Array:
        return lax.dynamic_slice_in_dim(w, lax.axis_index(over) * heads // devices, 1, dimension)

    return layout.island(local_head, (axes,), layout.plan.axes_in_step(axes))(w)


def with_copied_heads(w: np.ndarray, axes: LogicalAxes, devices: int) -> np.ndarray:
    """As `copy_heads`, of a whole weight on the host. devices: of `tensor`."""
    if COPIED not in axes or (heads := w.shape[dimension := axes.index(COPIED)]) % devices == 0:
        return w
    return np.repeat(w, devices // heads, axis=dimension)


def sum_copies(layout: Layout, g: Array, axes: LogicalAxes, heads: int) -> Array:
    """Gradient of a weight with T copied heads -> gradient of the weight with K heads, replicated.

    One all-reduce over `tensor`, of the K heads. Gradients of weights without copies are returned unchanged.
    """
    if COPIED not in axes:
        return g
    dimension, (over, devices) = axes.index(COPIED), _devices(layout)
    if devices == 1:
        return g

    def summed(g: Array) -> Array:
        number = jnp.arange(heads).reshape(-1, *[1] * (g.ndim - dimension - 1))
        mask = number[(None,) * dimension] == lax.axis_index(over) * heads // devices
        return reduce_shards(jnp.where(mask, g, 0), (), over)

    return layout.island(summed, (layout.plan.axes_in_step(axes),), axes)(g)


def _devices(layout: Layout) -> tuple[tuple[str, ...], int]:
    """Free mesh axes of key-value heads, and their number of devices."""
    free, over, devices = free_axes(), layout.plan.compute.mesh_axes("kv_heads"), 1
    for axis in over:
        devices *= free.get(axis, 1)
    return over, devices
