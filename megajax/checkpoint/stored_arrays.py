"""The stored arrays of a checkpoint, read with TensorStore only: no JAX, no devices, no Orbax.

Orbax writes one OCDBT database per process and merges them into one. In it, an array is a Zarr 3 array under its
dotted name: NAME/zarr.json and one chunk per shard of a device.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import tensorstore as ts

from megajax.checkpoint.boxes import Box, box_of, chunks_of, overlap, relative, shape_of
from megajax.checkpoint.integrity import Damaged
from megajax.config.budget import parse_json

WEIGHTS, OBSERVED = "params.", "observed."
"""Prefixes of the array names of weights and of observations."""

DATABASE = "state"
"""Folder of the merged OCDBT database inside the folder that Orbax writes."""
DESCRIPTION = "/zarr.json"
PART_BYTES = 2**26
"""Larger chunks are read in parts. A run writes a chunk for each shard of a device, which may be gigabytes."""
BLOCK = 2**18
"""Elements that are converted to float64 at a time."""


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
    """Reads the arrays of one step. Raises Damaged if the database can't be read."""

    def __init__(self, path: Path):
        """path: the folder that Orbax wrote."""
        path = path.resolve()  # TensorStore refuses paths that contain ".."
        # No cache: each chunk is read once.
        self._context = ts.Context({"cache_pool": {"total_bytes_limit": 0}})
        self._spec = database(path)
        if not (path / DATABASE / "manifest.ocdbt").is_file():
            raise Damaged(f"{path / DATABASE} holds no OCDBT database (manifest.ocdbt)")
        try:
            self._store = ts.KvStore.open(self._spec, context=self._context).result()
            keys = sorted(key.decode() for key in self._store.list().result())
            names = [key.removesuffix(DESCRIPTION) for key in keys if key.endswith(DESCRIPTION)]
            reads = [self._store.read(name + DESCRIPTION) for name in names]
            self._metadata = {name: parse_json(read.result().value) for name, read in zip(names, reads, strict=True)}
            self.arrays = {name: _array(name, metadata) for name, metadata in self._metadata.items()}
            self._open: dict[str, Any] = {}
        except (ValueError, KeyError, TypeError, OSError) as error:
            raise Damaged(f"the arrays in {path} can't be read: {_first_line(error)}") from error

    def value(self, name: str) -> int | float:
        """The value of an array of one element."""
        (chunk,) = self._chunks(name)
        return chunk.item()

    def read(self, name: str, box: Box) -> np.ndarray:
        """A box of an array, in its dtype."""
        metadata = self._metadata[name]
        try:
            if prod(_chunk_shape(metadata)) * _dtype(metadata).itemsize > PART_BYTES and _is_plain(metadata):
                return self._read_parts(name, box)
            return np.asarray(self._opened(name)[box].read().result())
        except (ValueError, OSError) as error:
            raise Damaged(f"{name} can't be read: {_first_line(error)}") from error

    def statistics(self, name: str) -> dict[str, float | None]:
        """count, nonfinite (NaN or infinite); min, max, mean and rms of the finite elements, None if there are none.

        In float64, read a chunk at a time.
        """
        count = nonfinite = 0
        low, high, total, squares = np.inf, -np.inf, 0.0, 0.0
        try:
            for chunk in self._chunks(name):
                for start in range(0, chunk.size, BLOCK):
                    block = chunk[start : start + BLOCK].astype(np.float64)
                    finite = block[np.isfinite(block)]
                    count, nonfinite = count + block.size, nonfinite + block.size - finite.size
                    if finite.size:
                        low, high = min(low, finite.min()), max(high, finite.max())
                        total, squares = total + finite.sum(), squares + np.square(finite).sum()
        except (ValueError, OSError) as error:
            raise Damaged(f"{name} can't be read: {_first_line(error)}") from error
        finite = count - nonfinite
        values = (low, high, total / finite, np.sqrt(squares / finite)) if finite else (None,) * 4
        counts: dict[str, float | None] = {"count": count, "nonfinite": nonfinite}
        return counts | {
            name: value if value is None else float(value)
            for name, value in zip(("min", "max", "mean", "rms"), values, strict=True)
        }

    def _chunks(self, name: str) -> Iterator[np.ndarray]:
        """The chunks of an array, flat."""
        array = self.arrays[name]
        if array.bytes == 0:
            return
        opened = self._opened(name)
        for box in chunks_of(box_of((), array.shape), _chunk_shape(self._metadata[name])):
            yield np.asarray(opened[box].read().result()).reshape(-1)

    def _read_parts(self, name: str, box: Box) -> np.ndarray:
        """A box of an array with large chunks; reads each from the box's first element to its last."""
        metadata = self._metadata[name]
        chunk, dtype = _chunk_shape(metadata), _dtype(metadata)
        strides = [prod(chunk[axis + 1 :]) * dtype.itemsize for axis in range(len(chunk))]
        result = np.empty(shape_of(box), dtype)
        for place in product(*(range(a.start // n, -(-a.stop // n)) for a, n in zip(box, chunk, strict=True))):
            chunk_box = tuple(slice(at * n, (at + 1) * n) for at, n in zip(place, chunk, strict=True))
            if (common := overlap(box, chunk_box)) is None:
                continue
            inside = relative(common, chunk_box)
            first = sum(side.start * stride for side, stride in zip(inside, strides, strict=True))
            last = sum((side.stop - 1) * stride for side, stride in zip(inside, strides, strict=True)) + dtype.itemsize
            response = self._store.read("/".join((name, "c", *map(str, place))), byte_range=slice(first, last)).result()
            if response.state != "value" or len(response.value) != last - first:
                raise Damaged(f"{name} has no chunk {place}, or it is truncated")
            result[relative(common, box)] = np.ndarray(shape_of(inside), dtype, response.value, strides=strides)
        return result

    def _opened(self, name: str) -> Any:
        if name not in self._open:
            spec = {"driver": "zarr3", "kvstore": self._spec | {"path": f"{name}/"}}
            self._open[name] = ts.open(spec, open=True, read=True, context=self._context).result()
        return self._open[name]


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
    (codec, *other_codecs), plain = metadata["codecs"], [{"name": "bytes", "configuration": {"endian": "little"}}]
    settings = codec["configuration"]
    if codec["name"] == "sharding_indexed":
        one_chunk = settings["chunk_shape"] == [*_chunk_shape(metadata)] and settings.get("index_location") != "start"
        return one_chunk and not other_codecs and settings["codecs"] == plain
    return [codec, *other_codecs] == plain


def _chunk_shape(metadata: dict[str, Any]) -> tuple[int, ...]:
    return tuple(metadata["chunk_grid"]["configuration"]["chunk_shape"])


def _first_line(error: BaseException) -> str:
    """The message without the source locations that TensorStore adds."""
    return re.split(r" \[\w+=", (str(error).splitlines() or [type(error).__name__])[0])[0]
