"""The arrays of a checkpoint as they are on disk, read with TensorStore alone: no JAX, no devices, no Orbax.

Orbax writes one OCDBT database for each process and merges their trees into one. In it an array is a Zarr 3 array
under its dotted name: NAME/zarr.json and one chunk for each shard that a device held.
"""

import json
import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import tensorstore as ts

from megajax.checkpoint.integrity import Damaged

DATABASE = "state"
"""Folder of the merged OCDBT database inside the folder that Orbax writes."""
DESCRIPTION = "/zarr.json"
PIECE_BYTES = 4 * 2**20
"""How much of an array is in memory at a time."""
BLOCK = 2**18
"""Elements that are taken to float64 at a time."""
INDEX_BYTES = 20
"""Index of a Zarr 3 shard with one inner chunk: offset and length as uint64, CRC-32C."""


@dataclass(frozen=True, slots=True)
class StoredArray:
    """An array as its zarr.json describes it."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    pieces: tuple[int, ...]
    """Along each dimension, the number of pieces it was written in. Orbax also divides what devices hold copies of."""
    elements: int
    bytes: int
    """Size of its elements."""


@dataclass(frozen=True, slots=True)
class Statistics:
    """Of one array. All but `count` and `nonfinite` are over its finite elements, None without any."""

    count: int
    nonfinite: int
    """How many elements are NaN or infinite."""
    min: float | None
    max: float | None
    mean: float | None
    rms: float | None
    """Root of the mean square."""


class StoredArrays:
    """Reads the arrays of one step. Raises Damaged where the database can't be read."""

    def __init__(self, path: Path):
        """path: the folder that Orbax wrote."""
        path = path.resolve()  # TensorStore refuses paths with ".." in them
        # As JSON, because a URL would need some characters of a path escaped.
        base = {"driver": "file", "path": f"{path / DATABASE}/"}
        # Without a cache: each chunk is read once.
        self._context = ts.Context({"cache_pool": {"total_bytes_limit": 0}})
        self._spec = {"driver": "ocdbt", "base": base}
        if not (path / DATABASE / "manifest.ocdbt").is_file():
            raise Damaged(f"{path / DATABASE} holds no OCDBT database (manifest.ocdbt)")
        try:
            self._store = ts.KvStore.open(self._spec, context=self._context).result()
            keys = sorted(key.decode() for key in self._store.list().result())
            names = [key.removesuffix(DESCRIPTION) for key in keys if key.endswith(DESCRIPTION)]
            reads = [self._store.read(name + DESCRIPTION) for name in names]
            self._described = {name: json.loads(read.result().value) for name, read in zip(names, reads, strict=True)}
            self.arrays = {name: _array(name, described) for name, described in self._described.items()}
        except (ValueError, KeyError, TypeError, OSError) as error:
            raise Damaged(f"the arrays in {path} can't be read: {_first_line(error)}") from error

    def value(self, name: str) -> int | float:
        """The value of an array of one element."""
        (piece,) = self._pieces_of(name)
        return piece.item()

    def statistics(self, name: str) -> Statistics:
        """Of one array, in float64, from pieces of at most PIECE_BYTES (one chunk if it is compressed)."""
        count = nonfinite = 0
        low, high, total, squares = np.inf, -np.inf, 0.0, 0.0
        try:
            for piece in self._pieces_of(name):
                for start in range(0, piece.size, BLOCK):
                    block = piece[start : start + BLOCK].astype(np.float64)
                    finite = block[np.isfinite(block)]
                    count, nonfinite = count + block.size, nonfinite + block.size - finite.size
                    if finite.size:
                        low, high = min(low, finite.min()), max(high, finite.max())
                        total, squares = total + finite.sum(), squares + np.square(finite).sum()
        except (ValueError, OSError) as error:
            raise Damaged(f"{name} can't be read: {_first_line(error)}") from error
        found = count - nonfinite
        if not found:
            return Statistics(count, nonfinite, None, None, None, None)
        return Statistics(
            count, nonfinite, float(low), float(high), float(total / found), float(np.sqrt(squares / found))
        )

    def _pieces_of(self, name: str) -> Iterator[np.ndarray]:
        """All elements of an array, each once, as flat arrays."""
        array, described = self.arrays[name], self._described[name]
        if array.bytes == 0:
            return
        chunk = _chunk_shape(described)
        whole = all(size % part == 0 for size, part in zip(array.shape, chunk, strict=True))
        size = prod(chunk) * _dtype(array.dtype).itemsize
        if size > PIECE_BYTES and whole and _is_plain(described, chunk):
            for place in product(*map(range, array.pieces)):
                yield from self._bytes_of("/".join((name, "c", *map(str, place))), size, _dtype(array.dtype))
            return
        spec = {"driver": "zarr3", "kvstore": self._spec | {"path": f"{name}/"}}
        opened = ts.open(spec, open=True, read=True, context=self._context).result()
        for place in product(*map(range, array.pieces)):
            box = tuple(
                slice(part * at, min(part * (at + 1), most))
                for part, at, most in zip(chunk, place, array.shape, strict=True)
            )
            yield np.asarray(opened[box].read().result()).reshape(-1)

    def _bytes_of(self, key: str, size: int, dtype: np.dtype) -> Iterator[np.ndarray]:
        """The elements of a large chunk, by ranges of bytes: an array would be read a whole chunk at a time."""
        index = self._store.read(key, byte_range=slice(-INDEX_BYTES, None)).result().value
        if len(index) != INDEX_BYTES:
            raise ValueError(f"chunk {key} is missing")
        offset, length, _ = struct.unpack("<QQI", index)
        if length != size:
            raise ValueError(f"chunk {key} has {length} bytes, its description says {size}")
        step = PIECE_BYTES // dtype.itemsize * dtype.itemsize
        for start in range(offset, offset + size, step):
            piece = slice(start, min(start + step, offset + size))
            yield np.frombuffer(self._store.read(key, byte_range=piece).result().value, dtype)


def _array(name: str, described: dict[str, Any]) -> StoredArray:
    shape, chunk = tuple(described["shape"]), _chunk_shape(described)
    pieces = tuple(-(-size // part) for size, part in zip(shape, chunk, strict=True))
    dtype = _dtype(described["data_type"])
    return StoredArray(name, shape, dtype.name, pieces, prod(shape), prod(shape) * dtype.itemsize)


def _dtype(name: str) -> np.dtype:
    """The numpy dtype of a name; TensorStore knows bfloat16 and the 8-bit floats too."""
    return ts.dtype(name).numpy_dtype


def _chunk_shape(described: dict[str, Any]) -> tuple[int, ...]:
    return tuple(described["chunk_grid"]["configuration"]["chunk_shape"])


def _is_plain(described: dict[str, Any], chunk: tuple[int, ...]) -> bool:
    """Whether a chunk is a shard of one inner chunk, of bare little-endian elements, with its index at the end."""
    codecs = described["codecs"]
    if [codec["name"] for codec in codecs] != ["sharding_indexed"]:
        return False
    inner = codecs[0]["configuration"]
    plain = [{"name": "bytes"}, {"name": "bytes", "configuration": {"endian": "little"}}]
    return (
        tuple(inner["chunk_shape"]) == chunk
        and len(inner["codecs"]) == 1
        and inner["codecs"][0] in plain
        and [each["name"] for each in inner["index_codecs"]] == ["bytes", "crc32c"]
        and inner.get("index_location", "end") == "end"
    )


def _first_line(error: BaseException) -> str:
    """What happened, without the source locations that TensorStore adds."""
    return re.split(r" \[\w+=", (str(error).splitlines() or [type(error).__name__])[0])[0]
