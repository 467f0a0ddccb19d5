"""The shards of a state that each process has, and their copies in host memory."""

from collections.abc import Iterable, Mapping
from functools import cache
from math import prod
from typing import Any

import jax
import numpy as np

from megajax.checkpoint.boxes import Box, box_of, shape_of
from megajax.checkpoint.local.sets import HostCopy, Shard
from megajax.checkpoint.weights.copying import contiguous

type Shards = frozenset[Shard]


def shards_of_processes(named: Mapping[str, Any]) -> dict[int, Shards]:
    """Process -> shards that its devices have. named: arrays, or jax.ShapeDtypeStructs with shardings."""

    @cache
    def boxes(sharding: jax.sharding.Sharding, shape: tuple[int, ...]) -> dict[int, set[Box]]:
        by_process: dict[int, set[Box]] = {}
        for device, index in sharding.devices_indices_map(shape).items():
            by_process.setdefault(device.process_index, set()).add(box_of(index, shape))
        return by_process

    result: dict[int, set[Shard]] = {}
    for name, leaf in named.items():
        for process, some in boxes(leaf.sharding, tuple(leaf.shape)).items():
            result.setdefault(process, set()).update((name, box) for box in some)
    return {process: frozenset(shards) for process, shards in result.items()}


def complete_parts(present: Shards, shards: Mapping[int, Shards]) -> tuple[int, ...]:
    """The processes all of whose shards are present."""
    return tuple(sorted(process for process, own in shards.items() if own <= present))


def copy_to_host(named: Mapping[str, jax.Array]) -> list[HostCopy]:
    """Each shard that devices of this process have, once. The arrays may be donated when it returns.

    On CPUs nothing is copied: jax does not reuse the memory of an array while numpy refers to it.
    """
    shards: dict[Shard, jax.Array] = {}
    for name, array in named.items():
        for shard in array.addressable_shards:
            key = name, box_of(shard.index, array.shape)
            if key not in shards:
                shard.data.copy_to_host_async()
                shards[key] = shard.data
    return [
        HostCopy(name, tuple(named[name].shape), np.dtype(data.dtype).name, box, as_bytes(np.asarray(data)))
        for (name, box), data in shards.items()
    ]


def as_bytes(array: np.ndarray) -> np.ndarray:
    """The bytes of an array, in the order of its dimensions."""
    return contiguous(array).reshape(-1).view(np.uint8)


def byte_count(shards: Iterable[Shard], named: Mapping[str, Any]) -> int:
    """Size of shards."""
    return sum(prod(shape_of(box)) * np.dtype(named[name].dtype).itemsize for name, box in shards)
