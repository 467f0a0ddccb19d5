"""The stored arrays of a checkpoint, read without JAX, devices and Orbax, and verified while they are read.

In a folder, Orbax writes one OCDBT database per process and merges them into one. In it, an array is a Zarr 3 array
under its dotted name: NAME/zarr.json and one chunk per shard of a device. In an object store, packs.py is the database.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from math import prod
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import unquote

import numpy as np
import tensorstore as ts

from megajax.checkpoint import integrity, packs
from megajax.checkpoint.block_reader import BlockReader, ByteRange
from megajax.checkpoint.boxes import Box, box_of, chunk_shape, chunks_of, overlap, relative, shape_of
from megajax.checkpoint.integrity import Damaged
from megajax.checkpoint.packs import Index, ValueLocation
from megajax.checkpoint.step_folders import ARRAYS
from megajax.config.read_limits import parse_json
from megajax.storage.folders import Folder

WEIGHTS, OBSERVED = "params.", "observed."
"""Prefixes of the array names of weights and of observations."""

DATABASE = "state"
"""Folder of the merged OCDBT database inside the folder that Orbax writes."""
DESCRIPTION = "/zarr.json"
FILES = f"{ARRAYS}/{DATABASE}/"
"""Before the names of the database's files, in the manifest of a step."""
SHARD_INDEX_BYTES = 20
"""After the elements of a chunk, with the codec that Orbax uses: offset, size and CRC-32C."""
BUFFER_BYTES = 2**28
"""Maximum size of the buffers of chunks whose parts lie apart; a larger chunk has a buffer of its size."""
BLOCK = 2**18
"""Elements that are converted to float64 at a time."""


MANIFEST = "manifest.ocdbt"
"""Root of the index, in the folder of the database."""


def read_index(folder: Path, verify: Callable[[ValueLocation], object]) -> Index:
    """The newest version of a database. TensorStore compares all nodes of the index with their CRC-32C.

    verify: called with the place of each node before it is read. Raises ValueError, KeyError or OSError if the index
    can't be read.
    """
    # JSON rather than a URL, in which some characters of a path would need escaping.
    base = ts.KvStore.open({"driver": "file", "path": f"{folder}/"}).result()
    versions = ts.ocdbt.dump(base).result()["versions"]
    newest = max(versions, key=lambda version: version["generation_number"])["root"]
    index: Index = {}
    locations = set[str]()
    nodes: list[tuple[str, bytes]] = [(newest["location"], b"")] if "location" in newest else []
    while nodes:
        location, prefix = nodes.pop()
        if location in locations:  # no writer does this, and a circle of nodes would be read without end
            raise ValueError(f"two nodes of its index refer to {location}")
        locations.add(location)
        verify(_parsed(location).below(FILES))
        for entry in ts.ocdbt.dump(base, location).result()["entries"]:
            if "location" in entry:
                nodes.append((entry["location"], prefix + entry["subtree_common_prefix"]))
            else:
                index[(prefix + entry["key"]).decode()] = _value(entry)
    return index


def _value(entry: dict[str, Any]) -> bytes | ValueLocation:
    if "inline_value" in entry:
        return entry["inline_value"]
    return _parsed(entry["indirect_value"])


def _parsed(location: str) -> ValueLocation:
    _, base, name, start, size = location.split(":")
    return ValueLocation(unquote(base) + unquote(name), int(start), int(size))


@dataclass(frozen=True, slots=True)
class StoredArray:
    """An array as its zarr.json describes it."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    pieces: tuple[int, ...]
    """Number of chunks along each dimension. Orbax also divides replicated arrays."""
    elements: int
    bytes: int


class StoredArrays:
    """Reads the arrays of one step, whose bytes are compared with the manifest as they are read."""

    def __init__(self, step: Folder):
        """step: the folder of a step. Raises Damaged if its manifest or its index can't be read."""
        self.step = step.resolve() if isinstance(step, Path) else step  # TensorStore refuses paths that contain ".."
        self._entries = integrity.read_manifest(self.step)
        self._blocks = BlockReader(self.step, self._entries)
        self._other: _OtherArrays | None = None
        indices = packs.index_names(self._entries)
        try:
            if indices:
                self._index = packs.read_index([self._read_file(name) for name in indices])
            else:
                self._index = self._database_index()
            names = sorted(key.removesuffix(DESCRIPTION) for key in self._index if key.endswith(DESCRIPTION))
            self._metadata = {name: parse_json(self._value(name + DESCRIPTION)) for name in names}
            self.arrays = {name: _array(name, metadata) for name, metadata in self._metadata.items()}
        except (ValueError, KeyError, TypeError, OSError) as error:
            raise Damaged(f"the arrays of {self.step} can't be read: {_first_line(error)}") from error

    def _database_index(self) -> Index:
        """Of the database that Orbax writes."""
        if not isinstance(self.step, Path) or not (self.step / FILES / MANIFEST).is_file():
            raise Damaged(f"{self.step} holds neither packs of arrays nor an OCDBT database ({FILES}{MANIFEST})")
        self._other = _OtherArrays(self.step, self._entries)
        index = read_index(self.step / ARRAYS / DATABASE, self._read_place)
        return {key: value if isinstance(value, bytes) else value.below(FILES) for key, value in index.items()}

    def value(self, name: str) -> int | float:
        """The value of an array of one element."""
        return self.read(name, box_of((), self.arrays[name].shape)).item()

    def read(self, name: str, box: Box) -> np.ndarray:
        """A box of an array, in its dtype. Raises Damaged."""
        return self.read_all([(name, box)])[0]

    def read_all(self, wanted: Sequence[tuple[str, Box]]) -> list[np.ndarray]:
        """Boxes of arrays, in their dtypes. Each block of the files is read once. Raises Damaged."""
        results, parts = list[np.ndarray](), dict[tuple[str, str], list[_Part]]()
        for name, index in wanted:
            metadata, box = self._metadata[name], box_of(index, self.arrays[name].shape)
            if not _is_plain(metadata):
                if self._other is None:
                    raise Damaged(f"{name} has another codec than arrays in packs have")
                results.append(self._other.read(name, box))
                continue
            results.append(np.empty(shape_of(box), _dtype(metadata)))
            for key, chunk_box in _chunks(name, metadata, box):
                common = overlap(box, chunk_box)
                if common is not None:
                    region = results[-1][(*relative(common, box), ...)]
                    part = _Part(region, _strides(metadata), relative(common, chunk_box))
                    parts.setdefault((name, key), []).append(part)
        buffers, spans, waiting = list[_Buffer](), list[ByteRange](), 0
        for (name, key), chunk_parts in parts.items():
            place, first = self._place(name, key), min(part.first for part in chunk_parts)
            size = max(part.last for part in chunk_parts) - first
            region = chunk_parts[0].region
            # A part that lies in the file as in the result needs no buffer.
            direct = len(chunk_parts) == 1 and region.nbytes == size and region.flags.c_contiguous
            buffer = region.reshape(-1).view(np.uint8) if direct else np.empty(size, np.uint8)
            if isinstance(place, bytes):
                buffer[:] = np.frombuffer(place, np.uint8, size, first)
            else:
                spans.append(ByteRange(place.name, place.start + first, buffer))
            if not direct:
                buffers.append(_Buffer(chunk_parts, first, buffer))
                waiting += size
            if waiting >= BUFFER_BYTES:
                self._fill(spans, buffers)
                buffers, spans, waiting = [], [], 0
        self._fill(spans, buffers)
        return results

    def _fill(self, spans: Sequence[ByteRange], buffers: Sequence["_Buffer"]) -> None:
        self._blocks.read(spans)
        for parts, first, content in buffers:
            for part in parts:
                part.fill(content, first)

    def verify_rest(self, share: slice) -> None:
        """Verifies what `read_all` of all arrays does not read. share: this process's part. Raises Damaged."""
        used = []
        for name, metadata in self._metadata.items():
            whole = box_of((), metadata["shape"])
            for key, chunk_box in _chunks(name, metadata, whole) if _is_plain(metadata) else ():
                common, place = overlap(whole, chunk_box), self._place(name, key)
                if common is not None and isinstance(place, ValueLocation):
                    part = _Part(np.empty(0), _strides(metadata), relative(common, chunk_box))
                    used.append((place.name, place.start + part.first, place.start + part.last))
        self._blocks.verify_except(used, share)

    def statistics(self, name: str) -> dict[str, float | None]:
        """count, nonfinite (NaN or infinite); min, max, mean and rms of the finite elements, None if there are none.

        In float64, read a part of a chunk at a time. Raises Damaged.
        """
        count = nonfinite = 0
        low, high, total, squares = np.inf, -np.inf, 0.0, 0.0
        for chunk in self._parts(name):
            for start in range(0, chunk.size, BLOCK):
                block = chunk[start : start + BLOCK].astype(np.float64)
                finite = block[np.isfinite(block)]
                count, nonfinite = count + block.size, nonfinite + block.size - finite.size
                if finite.size:
                    low, high = min(low, finite.min()), max(high, finite.max())
                    total, squares = total + finite.sum(), squares + np.square(finite).sum()
        finite = count - nonfinite
        values = (low, high, total / finite, np.sqrt(squares / finite)) if finite else (None,) * 4
        counts: dict[str, float | None] = {"count": count, "nonfinite": nonfinite}
        return counts | {
            name: value if value is None else float(value)
            for name, value in zip(("min", "max", "mean", "rms"), values, strict=True)
        }

    def _parts(self, name: str) -> Iterator[np.ndarray]:
        """The elements of an array, flat, a part of a chunk at a time."""
        array = self.arrays[name]
        if array.bytes == 0:
            return
        chunk = _chunk_shape(self._metadata[name])
        for box in chunks_of(box_of((), array.shape), chunk):
            for part in chunks_of(box, chunk_shape(shape_of(box), _dtype(self._metadata[name]).itemsize)):
                yield self.read(name, part).reshape(-1)

    def _place(self, name: str, key: str) -> bytes | ValueLocation:
        """A chunk, or its place. Raises Damaged if it is missing or has another size than its array says."""
        place, metadata = self._index.get(key), self._metadata[name]
        size = prod(_chunk_shape(metadata)) * _dtype(metadata).itemsize
        if metadata["codecs"][0]["name"] == "sharding_indexed":
            size += SHARD_INDEX_BYTES
        actual = None if place is None else place.bytes if isinstance(place, ValueLocation) else len(place)
        if place is None or actual != size:
            raise Damaged(f"{key} has {actual} bytes, not {size}" if place is not None else f"{key} is missing")
        return place

    def _value(self, key: str) -> bytes:
        place = self._index[key]
        return self._read_place(place) if isinstance(place, ValueLocation) else place

    def _read_place(self, place: ValueLocation) -> bytes:
        content = np.empty(place.bytes, np.uint8)
        self._blocks.read([ByteRange(place.name, place.start, content)])
        return content.tobytes()

    def _read_file(self, name: str) -> bytes:
        return self._read_place(ValueLocation(name, 0, self._entries[name]["bytes"]))


class _Part(NamedTuple):
    """A part of a chunk that is wanted."""

    region: np.ndarray
    """Where to put it."""
    strides: tuple[int, ...]
    """Of the chunk, in bytes, and the size of an element."""
    box: Box
    """Its place in the chunk."""

    @property
    def first(self) -> int:
        """First byte in the chunk."""
        return sum(side.start * stride for side, stride in zip(self.box, self.strides[:-1], strict=True))

    @property
    def last(self) -> int:
        """The byte in the chunk after the last."""
        stops = zip(self.box, self.strides[:-1], strict=True)
        return sum((side.stop - 1) * stride for side, stride in stops) + self.strides[-1]

    def fill(self, buffer: np.ndarray, start: int) -> None:
        """buffer: the bytes of the chunk from `start` on."""
        self.region[...] = np.ndarray(
            shape_of(self.box), self.region.dtype, buffer.data, self.first - start, self.strides[:-1]
        )


class _Buffer(NamedTuple):
    """Bytes of a chunk between parts that lie apart in it, as a column does."""

    parts: list[_Part]
    first: int
    """First byte in the chunk."""
    content: np.ndarray


class _OtherArrays:
    """Arrays that Orbax did not write as a run does, such as compressed ones: all files are verified, then read."""

    def __init__(self, step: Path, entries: integrity.Entries):
        self._step, self._entries = step, entries
        self._open: dict[str, Any] = {}

    def read(self, name: str, box: Box) -> np.ndarray:
        if not self._open:
            integrity.verify(self._step, self._entries)
        try:
            if name not in self._open:
                spec = {"driver": "zarr3", "kvstore": database(self._step / ARRAYS) | {"path": f"{name}/"}}
                context = ts.Context({"cache_pool": {"total_bytes_limit": 0}})  # each chunk is read once
                self._open[name] = ts.open(spec, open=True, read=True, context=context).result()
            return np.asarray(self._open[name][box].read().result())
        except (ValueError, OSError) as error:
            raise Damaged(f"{name} can't be read: {_first_line(error)}") from error


def database(path: Path) -> dict[str, Any]:
    """TensorStore's spec of the database in the folder that Orbax writes, an absolute path without "..".

    JSON rather than a URL, in which some characters of a path would need escaping.
    """
    return {"driver": "ocdbt", "base": {"driver": "file", "path": f"{path / DATABASE}/"}}


def _array(name: str, metadata: dict[str, Any]) -> StoredArray:
    shape, chunk = tuple(metadata["shape"]), _chunk_shape(metadata)
    pieces = tuple(-(-size // part) for size, part in zip(shape, chunk, strict=True))
    dtype = _dtype(metadata)
    return StoredArray(name, shape, dtype.name, pieces, prod(shape), prod(shape) * dtype.itemsize)


def _dtype(metadata: dict[str, Any]) -> np.dtype:
    """The numpy dtype, including bfloat16 and the 8-bit floats."""
    return np.dtype(ts.dtype(metadata["data_type"]).numpy_dtype)


def _is_plain(metadata: dict[str, Any]) -> bool:
    """Whether a chunk begins with its uncompressed elements in order, as Orbax writes it without compression."""
    if metadata["chunk_key_encoding"] != {"name": "default"}:
        return False
    codecs = metadata["codecs"]
    if len(codecs) == 1 and codecs[0]["name"] == "sharding_indexed":
        settings = codecs[0]["configuration"]
        codecs = settings["codecs"]
        if settings["chunk_shape"] != [*_chunk_shape(metadata)] or settings.get("index_location") == "start":
            return False
    # Without an endianness for elements of one byte.
    order = codecs[0].get("configuration", {}).get("endian", "little")
    return len(codecs) == 1 and codecs[0]["name"] == "bytes" and order == "little"


def _chunks(name: str, metadata: dict[str, Any], box: Box) -> Iterator[tuple[str, Box]]:
    """Key and box of each chunk that has elements of a box."""
    chunk = _chunk_shape(metadata)
    for place in product(*(range(a.start // n, -(-a.stop // n)) for a, n in zip(box, chunk, strict=True))):
        chunk_box = tuple(slice(at * n, (at + 1) * n) for at, n in zip(place, chunk, strict=True))
        yield "/".join((name, "c", *map(str, place))), chunk_box


def _strides(metadata: dict[str, Any]) -> tuple[int, ...]:
    """Of a chunk, in bytes, and the size of an element."""
    chunk, size = _chunk_shape(metadata), _dtype(metadata).itemsize
    return (*(prod(chunk[axis + 1 :]) * size for axis in range(len(chunk))), size)


def _chunk_shape(metadata: dict[str, Any]) -> tuple[int, ...]:
    return tuple(metadata["chunk_grid"]["configuration"]["chunk_shape"])


def _first_line(error: BaseException) -> str:
    """The message without the source locations that TensorStore adds."""
    return re.split(r" \[\w+=", (str(error).splitlines() or [type(error).__name__])[0])[0]
