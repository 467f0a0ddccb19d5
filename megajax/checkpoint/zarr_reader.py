"""The stored arrays of a checkpoint, read without JAX, devices and Orbax, and verified while they are read.

In a folder, Orbax writes one OCDBT database per process and merges them into one. In it, an array is a Zarr 3 array
under its dotted name: NAME/zarr.json and one chunk per shard of a device. In an object store and in local checkpoints,
the indices of packs are the database; see pack_writer.py.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from math import prod
from pathlib import Path
from typing import Any, NamedTuple, Self
from urllib.parse import unquote

import numpy as np
import tensorstore as ts

from megajax.checkpoint import manifest
from megajax.checkpoint.boxes import Box, box_of, chunk_shape, chunks_of, overlap, relative, shape_of
from megajax.checkpoint.manifest import Damaged
from megajax.checkpoint.step_folders import ARRAYS
from megajax.checkpoint.verified_reads import ByteRange, VerifiedReads
from megajax.config.read_limits import parse_json
from megajax.storage.folders import Folder

WEIGHTS, OBSERVED = "params.", "observed."
"""Prefixes of the array names of weights and of observations."""

DATABASE = "state"
"""Folder of the merged OCDBT database inside the folder that Orbax writes."""
FILES = f"{ARRAYS}/{DATABASE}/"
"""Before the names of the database's files, in the manifest of a step."""
SHARD_INDEX_BYTES = 20
"""After the elements of a chunk, with the codec that Orbax uses: offset, size and CRC-32C."""
DESCRIPTION = "/zarr.json"
PACK_INDEX = re.compile(rf"{ARRAYS}/process_(\d+)/index\.json")
BUFFER_BYTES = 2**28
"""Maximum size of the buffers of chunks whose parts lie apart; a larger chunk has a buffer of its size."""
BLOCK = 2**18
"""Elements that are converted to float64 at a time."""


class ValueLocation(NamedTuple):
    """A value in a file of a step."""

    name: str
    """Path in the folder of the step."""
    start: int
    bytes: int

    def below(self, folder: str) -> Self:
        """The place, if its name is relative to a folder, which ends with "/"."""
        return self._replace(name=folder + self.name)


type KeyIndex = dict[str, bytes | ValueLocation]
"""Key -> value, or its place."""


def pack_index(texts: Iterable[bytes]) -> KeyIndex:
    """The index of packs from those of the processes. Raises ValueError or TypeError for another content."""
    index: KeyIndex = {}
    for text in texts:
        for key, value in parse_json(text):
            index[key] = value.encode() if isinstance(value, str) else ValueLocation(*value)
    return index


MANIFEST = "manifest.ocdbt"
"""Root of the index, in the folder of the database."""


def database_index(folder: Path, verify: Callable[[ValueLocation], object]) -> KeyIndex:
    """The newest version of a database. TensorStore compares all nodes of the index with their CRC-32C.

    verify: called with the place of each node before it is read. Raises ValueError, KeyError or OSError if the index
    can't be read.
    """
    # JSON rather than a URL, in which some characters of a path would need escaping.
    base = ts.KvStore.open({"driver": "file", "path": f"{folder}/"}).result()
    versions = ts.ocdbt.dump(base).result()["versions"]
    newest = max(versions, key=lambda version: version["generation_number"])["root"]
    index: KeyIndex = {}
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

    def __init__(self, step: Folder, entries: manifest.Entries | None = None):
        """step: the folder of a step. entries: its manifest, if that was read.

        Raises Damaged if its manifest or its index can't be read.
        """
        self.step = step.resolve() if isinstance(step, Path) else step  # TensorStore refuses paths that contain ".."
        entries = manifest.read_manifest(self.step) if entries is None else entries
        self.files = VerifiedReads(self.step, entries)
        self._other: _OtherArrays | None = None
        indices = sorted(filter(PACK_INDEX.fullmatch, entries))
        try:
            if indices:
                self._index = pack_index([self.files.content(name) for name in indices])
            else:
                self._index = self._database_index()
            names = sorted(key.removesuffix(DESCRIPTION) for key in self._index if key.endswith(DESCRIPTION))
            self._metadata = {name: parse_json(self._value(name + DESCRIPTION)) for name in names}
            self.arrays = {name: _array(name, metadata) for name, metadata in self._metadata.items()}
        except (ValueError, KeyError, TypeError, OSError) as error:
            raise Damaged(f"the arrays of {self.step} can't be read: {_first_line(error)}") from error

    def _database_index(self) -> KeyIndex:
        """Of the database that Orbax writes."""
        if not isinstance(self.step, Path) or not (self.step / FILES / MANIFEST).is_file():
            raise Damaged(f"{self.step} holds neither packs of arrays nor an OCDBT database ({FILES}{MANIFEST})")
        self._other = _OtherArrays(self.step, self.files.entries)
        index = database_index(self.step / ARRAYS / DATABASE, self._read_place)
        return {key: value if isinstance(value, bytes) else value.below(FILES) for key, value in index.items()}

    def value(self, name: str) -> int | float:
        """The value of an array of one element."""
        return self.read(name, box_of((), self.arrays[name].shape)).item()

    def read(self, name: str, box: Box) -> np.ndarray:
        """A box of an array, in its dtype. Raises Damaged."""
        return self.read_all([(name, box)])[0]

    def read_all(self, wanted: Sequence[tuple[str, Box]]) -> list[np.ndarray]:
        """Boxes of arrays, in their dtypes. Each block of the files is read once. Raises Damaged."""
        boxes = [(name, box_of(index, self.arrays[name].shape)) for name, index in wanted]
        results = [np.empty(shape_of(box), _dtype(self._metadata[name])) for name, box in boxes]
        if faults := self.fill([(name, box, target) for (name, box), target in zip(boxes, results, strict=True)]):
            raise Damaged(faults[min(faults)])
        return results

    def fill(self, wanted: Sequence[tuple[str, Box, np.ndarray]]) -> dict[int, str]:
        """Reads boxes of arrays into targets -> number of a box -> why it is damaged.

        Raises Damaged for an array that can't be read, ConnectionError.
        """
        parts, faults = dict[tuple[str, str], list[_Part]](), dict[int, str]()
        for number, (name, box, target) in enumerate(wanted):
            metadata = self._metadata[name]
            if not _is_plain(metadata):
                if self._other is None:
                    raise Damaged(f"{name} has another codec than arrays in packs have")
                target[...] = self._other.read(name, box)
                continue
            for key, chunk_box in _chunks(name, metadata, box):
                common = overlap(box, chunk_box)
                if common is not None:
                    region = target[(*relative(common, box), ...)]
                    part = _Part(region, _strides(metadata), relative(common, chunk_box), number)
                    parts.setdefault((name, key), []).append(part)
        reads, waiting = list[_Read](), 0
        for (name, key), chunk_parts in parts.items():
            place, first = self._place(name, key), min(part.first for part in chunk_parts)
            size = max(part.last for part in chunk_parts) - first
            region = chunk_parts[0].region
            # A part that lies in the file as in the result needs no buffer.
            direct = len(chunk_parts) == 1 and region.nbytes == size and region.flags.c_contiguous
            buffer = region.reshape(-1).view(np.uint8) if direct else np.empty(size, np.uint8)
            reads.append(_Read(chunk_parts, place, first, buffer, direct))
            waiting += 0 if direct else size
            if waiting >= BUFFER_BYTES:
                faults |= self._read_parts(reads)
                reads, waiting = [], 0
        return faults | self._read_parts(reads)

    def _read_parts(self, reads: Sequence["_Read"]) -> dict[int, str]:
        """Number of a box -> why it is damaged."""
        stored = [(read, read.place) for read in reads if isinstance(read.place, ValueLocation)]
        spans = [ByteRange(place.name, place.start + read.first, read.buffer) for read, place in stored]
        by_span = self.files.read(spans)
        faults = {part.number: fault for span, fault in by_span.items() for part in stored[span][0].parts}
        for parts, place, first, content, direct in reads:
            if isinstance(place, bytes):
                content[:] = np.frombuffer(place, np.uint8, content.size, first)
            for part in () if direct else parts:
                part.fill(content, first)
        return faults

    def has(self, name: str, box: Box) -> bool:
        """Whether the index has all chunks of a box."""
        metadata = self._metadata.get(name)
        return metadata is not None and all(key in self._index for key, _ in _chunks(name, metadata, box))

    def chunks(self, name: str, box: Box) -> list[Box]:
        """Cuts a box where the stored array is cut."""
        chunks = (overlap(box, chunk_box) for _, chunk_box in _chunks(name, self._metadata[name], box))
        return [chunk for chunk in chunks if chunk is not None]

    def description(self, name: str) -> str:
        """The zarr.json of an array."""
        return self._value(name + DESCRIPTION).decode()

    def verify_unread(self) -> None:
        """Verifies the blocks that were not read. Raises Damaged, ConnectionError."""
        self.files.verify_except(self.files.checked)

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
        self.files.verify_except(self.files.used_blocks(used), share)

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
        return self.files.content(place.name, place.start, place.start + place.bytes)


class _Part(NamedTuple):
    """A part of a chunk that is wanted."""

    region: np.ndarray
    """Where to put it."""
    strides: tuple[int, ...]
    """Of the chunk, in bytes, and the size of an element."""
    box: Box
    """Its place in the chunk."""
    number: int = 0
    """Of the box that it is a part of."""

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


class _Read(NamedTuple):
    """Bytes of a chunk, from the first wanted one to the last."""

    parts: list[_Part]
    """They may lie apart, as a column does."""
    place: bytes | ValueLocation
    """Of the chunk."""
    first: int
    """First byte in the chunk."""
    buffer: np.ndarray
    direct: bool
    """Whether the buffer is the memory of the result."""


class _OtherArrays:
    """Arrays that Orbax did not write as a run does, such as compressed ones: all files are verified, then read."""

    def __init__(self, step: Path, entries: manifest.Entries):
        self._step, self._entries = step, entries
        self._open: dict[str, Any] = {}

    def read(self, name: str, box: Box) -> np.ndarray:
        if not self._open:
            manifest.verify(self._step, self._entries)
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
