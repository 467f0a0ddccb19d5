"""The shards of a state on the devices of each process, and their copies in host memory."""

from collections.abc import Iterable, Mapping
from functools import cache
from math import prod
from typing import Any

import jax
import numpy as np

from megajax.checkpoint.boxes import Box, box_of, shape_of
from megajax.checkpoint.local.sets import HostCopy, Shard
from megajax.checkpoint.weights.foreign import contiguous

type Shards = frozenset[Shard]


def shards_of_processes(leaves: Mapping[str, Any]) -> dict[int, Shards]:
    """Process -> shards on its devices. leaves: name -> array, or jax.ShapeDtypeStruct with a sharding."""

    @cache
    def boxes(sharding: jax.sharding.Sharding, shape: tuple[int, ...]) -> dict[int, set[Box]]:
        by_process: dict[int, set[Box]] = {}
        for device, index in sharding.devices_indices_map(shape).items():
            by_process.setdefault(device.process_index, set()).add(box_of(index, shape))
        return by_process

    result: dict[int, set[Shard]] = {}
    for name, leaf in leaves.items():
        for process, leaf_boxes in boxes(leaf.sharding, tuple(leaf.shape)).items():
            result.setdefault(process, set()).update((name, box) for box in leaf_boxes)
    return {process: frozenset(shards) for process, shards in result.items()}


def complete_parts(present: Shards, shards: Mapping[int, Shards]) -> tuple[int, ...]:
    """The processes whose shards are all present."""
    return tuple(sorted(process for process, process_shards in shards.items() if process_shards <= present))


def copy_to_host(leaves: Mapping[str, jax.Array]) -> list[HostCopy]:
    """Each shard on devices of this process, once. The arrays may be donated when it returns.

    On CPUs nothing is copied: JAX does not reuse the memory of an array while numpy refers to it.
    """
    shards: dict[Shard, jax.Array] = {}
    for name, array in leaves.items():
        for shard in array.addressable_shards:
            key = name, box_of(shard.index, array.shape)
            if key not in shards:
                shard.data.copy_to_host_async()
                shards[key] = shard.data
    return [
        HostCopy(name, tuple(leaves[name].shape), np.dtype(data.dtype).name, box, as_bytes(np.asarray(data)))
        for (name, box), data in shards.items()
    ]


def as_bytes(array: np.ndarray) -> np.ndarray:
    """The bytes of an array in C order."""
    return contiguous(array).reshape(-1).view(np.uint8)


def byte_count(shards: Iterable[Shard], leaves: Mapping[str, Any]) -> int:
    """Size of shards."""
    return sum(prod(shape_of(box)) * np.dtype(leaves[name].dtype).itemsize for name, box in shards)
