"""safetensors files: the format of the safetensors library. Read as views of memory-mapped files, of every dtype.

A file is the length of its header (uint64, little endian), the header (JSON: name -> dtype, shape, first and last byte
behind the header), and the bytes. A folder has one file, or an index that says which tensor is in which file.
"""

import json
import mmap
from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from megajax.checkpoint.foreign import Entry
from megajax.config.errors import UserError

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
"""Bytes; the reference implementation refuses longer ones too."""
INDEX = "model.safetensors.index.json"


class SafetensorsFile:
    """One file. Raises UserError where it is damaged."""

    def __init__(self, path: Path):
        self.path = path
        with open(path, "rb") as file:
            size = path.stat().st_size
            length = int.from_bytes(file.read(8), "little") if size >= 8 else LONGEST_HEADER + 1
            if length > min(LONGEST_HEADER, size - 8):
                raise UserError(f"{path} is no safetensors file, or it was cut off: its {size} bytes hold no header")
            try:
                header = json.loads(file.read(length))
                header.pop("__metadata__", None)
                self.start = 8 + length
                self.entries = {name: self._entry(name, each, size - self.start) for name, each in header.items()}
                self._offsets = {name: each["data_offsets"][0] for name, each in header.items()}
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                raise UserError(f"{path} is no safetensors file: its header can't be read ({error})") from error
            self._bytes = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)

    def read(self, name: str) -> np.ndarray:
        """A view of the file."""
        shape, dtype = self.entries[name]
        offset = self.start + self._offsets[name]
        return np.frombuffer(self._bytes, dtype, prod(shape), offset).reshape(shape)

    def _entry(self, name: str, given: Mapping[str, Any], size: int) -> Entry:
        if given["dtype"] not in DTYPES:
            raise UserError(f"{self.path}: {name} has the dtype {given['dtype']}, which is unknown")
        dtype, shape = DTYPES[given["dtype"]], tuple(given["shape"])
        first, last = given["data_offsets"]
        if not 0 <= first <= last <= size:
            raise UserError(f"{self.path} was cut off: {name} ends at byte {last} of {size}")
        if any(n < 0 for n in shape) or prod(shape) * dtype.itemsize != last - first:
            raise UserError(f"{self.path}: {name} is {given['dtype']}{list(shape)}, but has {last - first} bytes")
        return Entry(shape, dtype)


class SafetensorsFolder:
    """The tensors of a folder, or of one file: `megajax.checkpoint.foreign.Tensors`."""

    def __init__(self, folder: Path):
        """Raises UserError for a folder without files, and for an index that does not fit them."""
        self.where = str(folder)
        index = folder / INDEX
        paths = self._indexed(index) if index.is_file() else dict.fromkeys(sorted(folder.glob("*.safetensors")))
        if not paths:
            raise UserError(f"{folder} holds no .safetensors files")
        self._files: dict[str, SafetensorsFile] = {}
        for path, names in paths.items():
            file = SafetensorsFile(path)
            for name in names if names is not None else file.entries:
                if name not in file.entries:
                    raise UserError(f"{index} says that {name} is in {path.name}, but it is not")
                self._files[name] = file

    def entries(self) -> Mapping[str, Entry]:
        return {name: file.entries[name] for name, file in self._files.items()}

    def read(self, name: str) -> np.ndarray:
        return self._files[name].read(name)

    @staticmethod
    def _indexed(index: Path) -> dict[Path, list[str]]:
        """File -> names of its tensors. Files are in the folder itself, whatever the index says."""
        try:
            names = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
            files = sorted(set(names.values()))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise UserError(f"{index} can't be read ({error})") from error
        if outside := [file for file in files if Path(file).name != file or file in (".", "..")]:
            raise UserError(f"{index} names files outside of its folder: {', '.join(map(str, outside))}")
        if absent := [file for file in files if not (index.parent / file).is_file()]:
            raise UserError(f"{index} names files that are not there: {', '.join(absent)}")
        return {index.parent / file: [name for name, where in names.items() if where == file] for file in files}
