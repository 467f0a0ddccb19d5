"""Collectives over the `context` mesh axis. Call them where every mesh axis is manual, in an island.

B rows, S positions of a device, T of a row, N heads.
"""

from functools import partial

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from megajax.mesh.mesh import manual_axes
from megajax.mesh.zigzag_order import AXIS, SequenceSharding


def _same_heads(sharding: SequenceSharding) -> list[list[int]] | None:
    """Groups of devices that hold different positions of the same heads; None: all devices of the axis."""
    if sharding.stride == 1:
        return None
    return [[first + n * sharding.stride for n in range(sharding.devices)] for first in range(sharding.stride)]


def _same_positions(sharding: SequenceSharding) -> list[list[int]] | None:
    """Groups of neighbours that exchange heads; None: all devices of the axis."""
    if sharding.exchanging == sharding.devices:
        return None
    groups = range(sharding.devices // sharding.exchanging)
    return [[group * sharding.exchanging + n for n in range(sharding.exchanging)] for group in groups]


def gather_devices(sharding: SequenceSharding, x: Array) -> Array:
    """[B, S, ...] -> whole rows, device by device, [B, T, ...]."""
    return lax.all_gather(x, AXIS, axis=1, tiled=True, axis_index_groups=_same_heads(sharding))


def gather_rows(sharding: SequenceSharding, x: Array) -> Array:
    """[B, S, ...] -> whole rows in order, [B, T, ...]."""
    return sharding.in_order(gather_devices(sharding, x))


def reduce_rows(sharding: SequenceSharding, x: Array) -> Array:
    """The transpose of `gather_rows`: [B, T, ...] -> the sum over devices of each one's positions, [B, S, ...]."""
    return lax.psum_scatter(
        sharding.by_device(x), AXIS, scatter_dimension=1, tiled=True, axis_index_groups=_same_heads(sharding)
    )


def from_before(sharding: SequenceSharding, x: Array, places: int) -> Array:
    """x of the device that is `places` before this one in the ring.

    All devices of the mesh take part in a permute, even those that exchange nothing. Pipeline stages compute their
    layers in different ticks, so a permute would wait for stages that never reach it. In a pipeline, groups of devices
    within a stage exchange instead.
    """
    if manual_axes().get("pipeline", 1) > 1:
        return _from_before_in_stage(sharding, x, places % sharding.devices)
    total = sharding.devices * sharding.stride
    return lax.ppermute(x, AXIS, [(i, (i + places * sharding.stride) % total) for i in range(total)])


def _from_before_in_stage(sharding: SequenceSharding, x: Array, places: int) -> Array:
    """`from_before` by exchanges between pairs: a rotation of an even number of devices is one or two of them,
    r -> -r -> places + r.

    Two exchanges send twice the bytes of a permute. An odd number of devices gathers.
    """
    count, ranks = sharding.devices, range(sharding.devices)
    if count % 2:
        every = lax.all_gather(x, AXIS, axis_index_groups=_same_heads(sharding))
        return lax.dynamic_index_in_dim(every, (sharding.rank() - places) % count, keepdims=False)
    if 2 * places % count == 0:
        return _exchanged(sharding, x, [(r + places) % count for r in ranks])
    return _exchanged(
        sharding, _exchanged(sharding, x, [-r % count for r in ranks]), [(places - r) % count for r in ranks]
    )


def _exchanged(sharding: SequenceSharding, x: Array, partners: list[int]) -> Array:
    """x of each device's partner. Two devices or none are their own partners and keep their x."""
    unpaired = [r for r, partner in enumerate(partners) if r == partner]
    pairs = [[r, partner] for r, partner in enumerate(partners) if r < partner] + [unpaired] * bool(unpaired)
    groups = [[r * sharding.stride + first for r in pair] for pair in pairs for first in range(sharding.stride)]
    place = np.zeros(sharding.devices, np.int32)
    for pair in pairs:
        place[pair] = (0, 1) if pair == unpaired else (1, 0)
    pair_values = lax.all_gather(x, AXIS, axis_index_groups=groups)
    return lax.dynamic_index_in_dim(pair_values, jnp.asarray(place)[sharding.rank()], keepdims=False)


def to_heads(sharding: SequenceSharding, x: Array) -> Array:
    """[B, S, N, ...] -> all positions of the group, in order, for a part of the heads."""
    move = partial(lax.all_to_all, axis_name=AXIS, axis_index_groups=_same_positions(sharding), tiled=True)
    return sharding.neighbours().in_order(move(x, split_axis=2, concat_axis=1))


def to_positions(sharding: SequenceSharding, x: Array) -> Array:
    """The inverse of `to_heads`."""
    move = partial(lax.all_to_all, axis_name=AXIS, axis_index_groups=_same_positions(sharding), tiled=True)
    return move(sharding.neighbours().by_device(x), split_axis=1, concat_axis=2)


def gather_group(sharding: SequenceSharding, x: Array) -> Array:
    """[B, S] -> the values of all positions of the group, in order."""
    return sharding.neighbours().in_order(
        lax.all_gather(x, AXIS, axis=1, tiled=True, axis_index_groups=_same_positions(sharding))
    )
