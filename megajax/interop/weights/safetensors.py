"""safetensors files, the format of the safetensors library, read as views of memory-mapped files, in all dtypes.

A file has the length of its header (uint64, little endian), the header (JSON: name -> dtype, shape, and the range of
its bytes after the header), and the bytes. A folder has one file, or several with an index of the file of each tensor.
"""

import json
import mmap
import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from megajax.checkpoint.weight_source import Entry
from megajax.config.errors import UserError
from megajax.config.read_limits import DOCUMENT, Budget, Limits, parse_json, read_json
from megajax.storage.safe_paths import demand_inside, is_plain

DTYPES: Mapping[str, np.dtype] = {
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(jnp.bfloat16),
    "F8_E4M3": np.dtype(jnp.float8_e4m3fn),
    "F8_E5M2": np.dtype(jnp.float8_e5m2),
    "F8_E8M0": np.dtype(jnp.float8_e8m0fnu),
    "I64": np.dtype(np.int64),
    "I32": np.dtype(np.int32),
    "I16": np.dtype(np.int16),
    "I8": np.dtype(np.int8),
    "U8": np.dtype(np.uint8),
    "U16": np.dtype(np.uint16),
    "U32": np.dtype(np.uint32),
    "U64": np.dtype(np.uint64),
    "BOOL": np.dtype(np.bool_),
}
LONGEST_HEADER = 100_000_000
"""Bytes; the reference implementation has the same limit."""
HEADER = Limits(entries=1_000_000)
"""Tensors of a file."""
MAX_DIMENSIONS = 32
"""Largest number of dimensions of a tensor."""
PICKLES = ("*.bin", "*.pt", "*.pth", "*.pkl")
MAPPED_BYTES = 2**27
"""Bytes of tensors to read before the pages of the file are released."""
MODEL = "model.safetensors"
INDEX = "model.safetensors.index.json"


class SafetensorsFile:
    """One file. Raises UserError for files that the reference implementation refuses, and for duplicate names."""

    def __init__(self, path: Path):
        self.path = path
        with open(path, "rb") as file:
            size = path.stat().st_size
            length = int.from_bytes(file.read(8), "little") if size >= 8 else LONGEST_HEADER + 1
            if length > min(LONGEST_HEADER, size - 8):
                raise UserError(f"{path} is not a safetensors file, or it was cut off: its {size} bytes hold no header")
            try:
                header = _mapping(parse_json(file.read(length)), "the header")
                Budget(path, HEADER).spend(len(header))
                header.pop("__metadata__", None)
                self._places = {name: _place(name, entry) for name, entry in header.items()}
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                raise UserError(
                    f"{path} is not a safetensors file: its header can't be read ({_text(error)})"
                ) from error
            self.start = 8 + length
            self._demand_order(size - self.start)
            self.entries = {name: place.entry for name, place in self._places.items()}
            self._read_bytes = 0
            self._bytes = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)

    def read(self, name: str) -> np.ndarray:
        """A view of the file."""
        (shape, dtype), first, last = self._places[name]
        self._read_bytes += last - first
        if self._read_bytes > MAPPED_BYTES:
            self._read_bytes = last - first
            # Otherwise all pages that were read stay in memory. Views stay valid: their pages are read again.
            self._bytes.madvise(mmap.MADV_DONTNEED)
        return np.frombuffer(self._bytes, dtype, prod(shape), self.start + first).reshape(shape)

    def _demand_order(self, size: int) -> None:
        """Raises UserError unless the tensors follow one another, have the right sizes, and end with the file."""
        end = 0
        for name, (entry, first, last) in sorted(self._places.items(), key=lambda item: item[1][1:]):
            if last > size:
                raise UserError(f"{self.path} was cut off: {name} ends at byte {last} of {size}")
            if prod(entry.shape) * entry.dtype.itemsize != last - first:
                text = f"{entry.dtype.name}{list(entry.shape)}"
                raise UserError(f"{self.path}: {name} is {text}, but has {last - first} bytes")
            if first != end:
                problem = "overlaps another tensor" if first < end else "follows bytes of no tensor"
                raise UserError(f"{self.path}: {name} {problem}: it begins at byte {first}, expected {end}")
            end = last
        if end != size:
            raise UserError(f"{self.path} has {size - end} bytes after its last tensor")


class _Place(NamedTuple):
    """A tensor and its bytes, counted from the end of the header."""

    entry: Entry
    first: int
    last: int


def _place(name: str, entry: object) -> _Place:
    """The place of a tensor by its header entry. Raises ValueError or KeyError for an invalid entry."""
    entry = _mapping(entry, name)
    if entry["dtype"] not in DTYPES:
        raise ValueError(f"{name} has the dtype {entry['dtype']}, which is unknown")
    shape, offsets = entry["shape"], entry["data_offsets"]
    are_sizes = [type(number) is int and number >= 0 for numbers in (shape, offsets) for number in numbers]
    if not isinstance(shape, list) or not isinstance(offsets, list) or len(offsets) != 2 or not all(are_sizes):
        raise ValueError(f"{name} has the shape {shape} and the offsets {offsets}")
    if len(shape) > MAX_DIMENSIONS or offsets[0] > offsets[1]:
        raise ValueError(f"{name} has {len(shape)} dimensions and the offsets {offsets}")
    return _Place(Entry(tuple(shape), DTYPES[entry["dtype"]]), *offsets)


def _mapping(value: object, name: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError(f"{name} is a {type(value).__name__}")
    return value


def _text(error: BaseException) -> str:
    return str(error)[:300] or type(error).__name__


class SafetensorsFolder:
    """The tensors of a folder: `megajax.interop.weights.foreign.Tensors`."""

    def __init__(self, folder: Path):
        """Raises UserError for a folder without files, and for an index that does not match them."""
        self.where = str(folder)
        index = folder / INDEX
        paths = self._indexed(index) if index.is_file() else dict.fromkeys(_files_in(folder))
        if not paths:
            pickles = sorted(path.name for kind in PICKLES for path in folder.glob(kind))
            advice = (
                f"; {', '.join(pickles[:3])} can run any program when it is read. Save it again as safetensors with "
                "transformers: model.save_pretrained(DIR, safe_serialization=True)"
            )
            raise UserError(f"{folder} holds no .safetensors files" + advice * bool(pickles))
        self._files: dict[str, SafetensorsFile] = {}
        for path, names in paths.items():
            demand_inside(path)
            file = SafetensorsFile(path)
            for name in names if names is not None else file.entries:
                if name not in file.entries:
                    raise UserError(f"{index} says that {name} is in {path.name}, but it is not")
                if name in self._files:
                    raise UserError(f"{name} is both in {self._files[name].path} and in {path}")
                self._files[name] = file
        self.entries = {name: file.entries[name] for name, file in self._files.items()}

    def read(self, name: str) -> np.ndarray:
        return self._files[name].read(name)

    @staticmethod
    def _indexed(index: Path) -> dict[Path, list[str]]:
        """File -> names of its tensors. Raises UserError for files that are missing or outside of the folder."""
        try:
            text = read_json(index, DOCUMENT)
            names = _mapping(_mapping(text, "the index")["weight_map"], "weight_map")
            files = sorted(set(names.values()))
        except (ValueError, KeyError, TypeError, OSError) as error:
            raise UserError(f"{index} can't be read ({_text(error)})") from error
        if outside := [file for file in files if not is_plain(file)]:
            raise UserError(f"{index} names files outside of its folder: {', '.join(map(ascii, outside))}")
        if absent := [file for file in files if not (index.parent / file).is_file()]:
            raise UserError(f"{index} names missing files: {', '.join(absent)}")
        shards: dict[Path, list[str]] = {index.parent / file: [] for file in files}
        for name, file in names.items():
            shards[index.parent / file].append(name)
        return shards


def _files_in(folder: Path) -> list[Path]:
    """Regular files only: opening a pipe would wait for its writer."""
    files = sorted(path for path in folder.glob("*.safetensors") if path.is_file())
    # transformers reads only model.safetensors if there are others, such as consolidated.safetensors of Mistral.
    return [path for path in files if path.name == MODEL] or files


NAMES: Mapping[np.dtype, str] = {dtype: name for name, dtype in DTYPES.items()}
ALIGNMENT = 8
"""Bytes. The format requires a header, with its length, to be a multiple of it."""
ONE_FILE = "model.safetensors"


class ShardWriter:
    """Writes tensors, in the order of `entries`, into files of at most `shard_bytes`."""

    def __init__(self, folder: Path, entries: Mapping[str, Entry], shard_bytes: int):
        """A tensor larger than `shard_bytes` gets a file of its own."""
        self._folder, self._entries, shards, space = folder, entries, list[list[str]](), 0
        for name, entry in entries.items():
            size = entry_bytes(entry)
            if not shards or size > space:
                shards.append([])
                space = shard_bytes
            shards[-1].append(name)
            space -= size
        # Larger dtypes first, so that each tensor starts at a multiple of its item size.
        self._shards = [sorted(names, key=lambda name: -entries[name].dtype.itemsize) for names in shards]

    def __iter__(self) -> Iterator[tuple[str, "TensorFile"]]:
        """The name of each tensor, and the file to write its bytes to next."""
        count = len(self._shards)
        for number, names in enumerate(self._shards, 1):
            file = ONE_FILE if count == 1 else f"model-{number:05d}-of-{count:05d}.safetensors"
            with TensorFile(self._folder / file, {name: self._entries[name] for name in names}) as writer:
                yield from ((name, writer) for name in names)
            if count > 1:
                self._index(number, file, names)

    def _index(self, number: int, file: str, names: list[str]) -> None:
        path = self._folder / INDEX
        index = json.loads(path.read_text(encoding="utf-8")) if number > 1 else {"metadata": {}, "weight_map": {}}
        index["metadata"] = {"total_size": sum(map(entry_bytes, self._entries.values()))}
        index["weight_map"] |= dict.fromkeys(names, file)
        path.write_text(json.dumps(index, indent=2), encoding="utf-8")


class TensorFile:
    """A safetensors file that is written from beginning to end."""

    def __init__(self, path: Path, entries: Mapping[str, Entry]):
        self._file = open(path, "xb")  # noqa: SIM115  closed by __exit__
        self._remaining, start = dict(entries), 0
        header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        for name, entry in entries.items():
            stop = start + entry_bytes(entry)
            offsets = {"data_offsets": [start, stop]}
            header[name] = {"dtype": NAMES[entry.dtype], "shape": [*entry.shape], **offsets}
            start = stop
        text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
        text += b" " * (-len(text) % ALIGNMENT)
        self._file.write(len(text).to_bytes(8, "little") + text)

    def write(self, name: str, values: np.ndarray) -> None:
        """Writes the next tensor, contiguous. Raises ValueError if it is not the next one of the header."""
        expected = next(iter(self._remaining))
        if (name, *self._remaining.pop(expected)) != (expected, values.shape, values.dtype):
            raise ValueError(f"{name} {values.dtype}{values.shape} is not the next tensor, which is {expected}")
        self._file.write(memoryview(values.reshape(-1).view(np.uint8)))

    def __enter__(self) -> "TensorFile":
        return self

    def __exit__(self, kind: object, error: object, traceback: object) -> None:
        if error is None:
            self._file.flush()
            os.fsync(self._file.fileno())
        with suppress(OSError):  # after an error, writing the rest of the buffer may fail too
            self._file.close()


def entry_bytes(entry: Entry) -> int:
    """Size of a tensor."""
    return prod(entry.shape) * entry.dtype.itemsize
