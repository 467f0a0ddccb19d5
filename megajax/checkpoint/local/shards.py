"""Which boxes of the arrays of a state each process has, and their copies in host memory."""

from collections.abc import Iterable, Mapping
from functools import cache
from typing import Any, NamedTuple

import jax
import numpy as np

from megajax.checkpoint.local.sets import Box
from megajax.checkpoint.weights.copying import contiguous

type Boxes = frozenset[tuple[str, Box]]
"""Names of arrays and boxes in them."""


def box_of(index: tuple[slice, ...], shape: tuple[int, ...]) -> Box:
    """The box of a shard's index."""
    ends = [side.indices(size)[:2] for side, size in zip(index, shape, strict=True)]
    return tuple((start, stop) for start, stop in ends)


def boxes_of_processes(named: Mapping[str, Any]) -> dict[int, Boxes]:
    """Process -> boxes that its devices have. named: arrays, or jax.ShapeDtypeStructs with shardings."""

    @cache
    def boxes(sharding: jax.sharding.Sharding, shape: tuple[int, ...]) -> dict[int, set[Box]]:
        each: dict[int, set[Box]] = {}
        for device, index in sharding.devices_indices_map(shape).items():
            each.setdefault(device.process_index, set()).add(box_of(index, shape))
        return each

    result: dict[int, set[tuple[str, Box]]] = {}
    for name, leaf in named.items():
        for process, each in boxes(leaf.sharding, tuple(leaf.shape)).items():
            result.setdefault(process, set()).update((name, box) for box in each)
    return {process: frozenset(each) for process, each in result.items()}


def parts_in(held: Boxes, boxes: Mapping[int, Boxes]) -> tuple[int, ...]:
    """The processes all of whose boxes are held."""
    return tuple(sorted(process for process, each in boxes.items() if each <= held))


class HostCopy(NamedTuple):
    """A box of an array, in host memory."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    box: Box
    content: np.ndarray
    """Its bytes."""


def copy_to_host(named: Mapping[str, jax.Array]) -> list[HostCopy]:
    """Each box that devices of this process have, once. The arrays may be donated when it returns.

    On CPUs nothing is copied: jax does not reuse the memory of an array while numpy refers to it.
    """
    shards = []
    for name, array in named.items():
        seen: set[Box] = set()
        for shard in array.addressable_shards:
            box = box_of(shard.index, array.shape)
            if box not in seen:
                seen.add(box)
                shard.data.copy_to_host_async()
                shards.append((name, array, box, shard.data))
    return [
        HostCopy(name, tuple(array.shape), np.dtype(array.dtype).name, box, as_bytes(np.asarray(data)))
        for name, array, box, data in shards
    ]


def as_bytes(array: np.ndarray) -> np.ndarray:
    """The bytes of an array, in the order of its dimensions."""
    return contiguous(array).reshape(-1).view(np.uint8)


def byte_count(boxes: Iterable[tuple[str, Box]], named: Mapping[str, Any]) -> int:
    """Size of boxes."""
    total = 0
    for name, box in boxes:
        elements = 1
        for start, stop in box:
            elements *= stop - start
        total += elements * np.dtype(named[name].dtype).itemsize
    return total
