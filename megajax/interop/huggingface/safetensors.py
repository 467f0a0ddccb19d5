"""safetensors files, the format of the safetensors library, read as views of memory-mapped files, in all dtypes.

A file has the length of its header (uint64, little endian), the header (JSON: name -> dtype, shape, and the range of
its bytes after the header), and the bytes. A folder has one file, or several with an index of the file of each tensor.
"""

import mmap
from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from megajax.checkpoint.weights.foreign import Entry
from megajax.config.budget import DOCUMENT, Budget, Limits, parse_json, read_json
from megajax.config.errors import UserError
from megajax.storage.named_files import demand_inside, is_plain

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


def _place(name: str, entry: Any) -> _Place:
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


def _mapping(value: Any, name: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError(f"{name} is a {type(value).__name__}")
    return value


def _text(error: BaseException) -> str:
    return str(error)[:300] or type(error).__name__


class SafetensorsFolder:
    """The tensors of a folder: `megajax.checkpoint.weights.foreign.Tensors`."""

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

    def entries(self) -> Mapping[str, Entry]:
        return {name: file.entries[name] for name, file in self._files.items()}

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
