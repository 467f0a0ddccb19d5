"""Writes packs: the arrays of a process in an object store or a local checkpoint, in one format.

arrays/process_3/00000.bin   chunks, one after another: a request for each 128 MiB, not for each chunk
arrays/process_3/index.json  [[key, value]]: NAME/zarr.json -> an array's description; NAME/c/0/1 -> its place

Keys and descriptions are those of Zarr 3, as in a shared folder, where Orbax writes them into a database. Orbax has no
s3://, and merges what the processes wrote, which would be written, read and written again. Packs are hashed in memory:
nothing is read back.
"""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from math import prod
from typing import Any
from zlib import crc32

import jax
import numpy as np
import tensorstore as ts

from megajax.checkpoint.boxes import Box, box_of, chunk_shape, chunks_of, relative
from megajax.checkpoint.manifest import Entries, entry_of
from megajax.checkpoint.step_folders import ARRAYS
from megajax.checkpoint.weight_source import contiguous
from megajax.checkpoint.zarr_reader import DESCRIPTION
from megajax.config.read_limits import parse_json

PACK_BYTES = 2**27
"""A pack is written when it has this size. A chunk is smaller, and a request of a store is limited to 5 GB."""

type Shard = tuple[str, Box]
"""Name of an array, and a box of it that is on a device."""


type Shards = dict[Shard, np.ndarray]
"""Values of shards, in host memory."""


def copy_to_host(arrays: Mapping[str, jax.Array], *, once: bool) -> tuple[dict[str, str], Shards]:
    """Descriptions of the arrays by name, and shards on the devices of this process. The arrays may be donated then.

    once: of the devices with equal shards, one writes each; which one depends on its place, so that all processes
    write. False: each process has all shards on its own devices.
    On CPUs nothing is copied: JAX does not reuse the memory of an array while numpy refers to it.
    """
    descriptions, shards = dict[str, str](), dict[Shard, jax.Array]()
    for name, array in arrays.items():
        shape = array.sharding.shard_shape(array.shape)
        copies = len(array.sharding.device_set) * prod(shape) // array.size
        descriptions[name] = json.dumps(_description(array, _even(shape, chunk_shape(shape, array.dtype.itemsize))))
        for shard in array.addressable_shards:
            box = box_of(shard.index, array.shape)
            writer = crc32(f"{name}{[side.start for side in box]}".encode()) % copies if once else shard.replica_id
            if shard.replica_id == writer and (name, box) not in shards:
                shard.data.copy_to_host_async()
                shards[name, box] = shard.data
    return descriptions, {key: np.asarray(data) for key, data in shards.items()}


def drained(shards: Shards) -> Iterator[tuple[Shard, np.ndarray]]:
    """The shards, removed one by one, so that their memory is free once they are written."""
    while shards:
        key = next(iter(shards))
        yield key, shards.pop(key)


def as_bytes(array: np.ndarray) -> np.ndarray:
    """The bytes of an array in C order."""
    return contiguous(array).reshape(-1).view(np.uint8)


def _even(shape: Sequence[int], chunk: Sequence[int]) -> list[int]:
    """The largest chunk of at most this shape into which a shard can be cut without a remainder."""
    return [
        next(part for part in range(most, 0, -1) if size % part == 0) for size, most in zip(shape, chunk, strict=True)
    ]


def _description(array: jax.Array, chunk: list[int]) -> dict[str, Any]:
    """A zarr.json."""
    dtype = np.dtype(array.dtype)
    return {
        "zarr_format": 3,
        "node_type": "array",
        "shape": [*array.shape],
        "data_type": ts.dtype(dtype).name,
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": chunk}},
        "chunk_key_encoding": {"name": "default"},
        "codecs": [{"name": "bytes", "configuration": {"endian": "little"}}],
        "fill_value": 0,
    }


def write_packs(
    process: int,
    descriptions: Mapping[str, str],
    shards: Iterable[tuple[Shard, np.ndarray]],
    write: Callable[[str, bytes], None],
    apply: Callable[..., Iterable[Any]] = map,
) -> Entries:
    """Writes packs of the shards of a process, and their index -> their entries in the manifest.

    write: called with the path in the step and the content. apply: applies a function to each pack.
    """
    folder = f"{ARRAYS}/process_{process}"
    index: list[tuple[str, Any]] = [(name + DESCRIPTION, text) for name, text in descriptions.items()]

    def packs() -> Iterator[tuple[str, list[np.ndarray]]]:
        number, parts, size = 0, list[np.ndarray](), 0
        for key, content in _chunks(descriptions, shards):
            name = f"{folder}/{number:05d}.bin"
            index.append((key, (name, size, content.nbytes)))
            parts.append(content)
            size += content.nbytes
            if size >= PACK_BYTES:
                yield name, parts
                number, parts, size = number + 1, [], 0
        if parts:
            yield f"{folder}/{number:05d}.bin", parts

    def file(name: str, content: bytes) -> tuple[str, dict[str, Any]]:
        write(name, content)
        return name, entry_of(content)

    entries = dict(apply(lambda pack: file(pack[0], b"".join(pack[1])), packs()))
    return entries | dict([file(f"{folder}/index.json", json.dumps(index).encode())])


def _chunks(
    descriptions: Mapping[str, str], shards: Iterable[tuple[Shard, np.ndarray]]
) -> Iterator[tuple[str, np.ndarray]]:
    """Key and bytes of each chunk of the shards."""
    for (name, box), values in shards:
        shape = parse_json(descriptions[name])["chunk_grid"]["configuration"]["chunk_shape"]
        for part in chunks_of(box, shape):
            place = [side.start // size for side, size in zip(part, shape, strict=True)]
            yield "/".join((name, "c", *map(str, place))), as_bytes(values[(*relative(part, box), ...)])
