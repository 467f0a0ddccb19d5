"""Writes the arrays of a process into packs, in an object store. Packs are hashed in memory: nothing is read back."""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from math import prod
from typing import Any, NamedTuple
from zlib import crc32

import jax
import numpy as np
import tensorstore as ts

from megajax.checkpoint.boxes import box_of, chunk_shape, chunks_of, relative
from megajax.checkpoint.integrity import Entries, entry_of
from megajax.checkpoint.local.shard_files import as_bytes
from megajax.checkpoint.step_folders import ARRAYS
from megajax.config.read_limits import parse_json
from megajax.storage.stores import in_parallel

PACK_BYTES = 2**27
"""A pack is written when it has this size. A chunk is smaller, and a request of a store is limited to 5 GB."""


class Chunk(NamedTuple):
    """A part of an array that this process writes."""

    key: str
    content: np.ndarray
    """Bytes."""


def copy_to_host(arrays: Mapping[str, jax.Array]) -> tuple[dict[str, str], list[Chunk]]:
    """Descriptions of the arrays by key, and the chunks of this process. The arrays may be donated when it returns.

    Of the devices with equal shards, one writes each; which one depends on its place, so that all processes write.
    On CPUs nothing is copied: JAX does not reuse the memory of an array while numpy refers to it.
    """
    descriptions, shards = dict[str, str](), list[tuple[str, Any, Any]]()
    for name, array in arrays.items():
        shape = array.sharding.shard_shape(array.shape)
        copies = len(array.sharding.device_set) * prod(shape) // array.size
        chunk = _even(shape, chunk_shape(shape, array.dtype.itemsize))
        descriptions[f"{name}/zarr.json"] = json.dumps(_description(array, chunk))
        for shard in array.addressable_shards:
            box = box_of(shard.index, array.shape)
            if shard.replica_id == crc32(f"{name}{[side.start for side in box]}".encode()) % copies:
                shard.data.copy_to_host_async()
                shards.append((name, box, shard.data))
    chunks = list[Chunk]()
    for name, box, data in shards:
        values = np.asarray(data)
        shape = parse_json(descriptions[f"{name}/zarr.json"])["chunk_grid"]["configuration"]["chunk_shape"]
        for part in chunks_of(box, shape):
            place = [side.start // size for side, size in zip(part, shape, strict=True)]
            key = "/".join((name, "c", *map(str, place)))
            chunks.append(Chunk(key, as_bytes(values[(*relative(part, box), ...)])))
    return descriptions, chunks


def _even(shape: Sequence[int], chunk: Sequence[int]) -> list[int]:
    """The largest chunk of at most this shape into which a shard can be cut without a rest."""
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
    process: int, descriptions: Mapping[str, str], chunks: Iterable[Chunk], write: Callable[[str, bytes], None]
) -> Entries:
    """Writes the packs of a process, some at a time, and their index -> their entries in the manifest.

    write: called in threads with the path in the step and the content.
    """
    folder, packs, size = f"{ARRAYS}/process_{process}", list[tuple[str, list[np.ndarray]]](), PACK_BYTES
    index: list[tuple[str, Any]] = [*descriptions.items()]
    for key, content in chunks:
        if size >= PACK_BYTES:
            packs.append((f"{folder}/{len(packs):05d}.bin", []))
            size = 0
        name, parts = packs[-1]
        index.append((key, (name, size, content.nbytes)))
        parts.append(content)
        size += content.nbytes

    def file(name: str, content: bytes) -> tuple[str, dict[str, Any]]:
        write(name, content)
        return name, entry_of(content)

    entries = in_parallel(lambda pack: file(pack[0], b"".join(pack[1])), packs)
    return dict([*entries, file(f"{folder}/index.json", json.dumps(index).encode())])
