"""Writes safetensors files a tensor at a time: first a header with all sizes, then the bytes in the same order."""

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from megajax.checkpoint.weights.foreign import Entry
from megajax.interop.huggingface.safetensors import DTYPES, INDEX

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
