"""A process's part of a local checkpoint on disk: shards with their places in the arrays, each with a SHA-256.

STEP/                 a committed set; its folder gets this name by a rename only
  own.bin             the shards of this process, one after another
  replicas.bin        shards of other processes that this one does not have
  set.json            place and SHA-256 of each shard, and the metadata; sealed by a SHA-256 of its own
STEP.TOKEN.saving/    being written; removed at the next start
"""

import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from functools import cache
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from megajax.checkpoint.boxes import Box, box_of, shape_of
from megajax.checkpoint.integrity import Damaged, in_threads, seal
from megajax.checkpoint.weights.foreign import contiguous
from megajax.config.read_limits import DOCUMENT, parse_json, read_file
from megajax.storage.disk import flush_to_disk, write_durably

SET = "set.json"
OWN_FILE, REPLICAS_FILE = "own.bin", "replicas.bin"
FORMAT = 1

type Shard = tuple[str, Box]
"""Name of an array, and a box of it that is on a device."""


class HostCopy(NamedTuple):
    """A shard in host memory."""

    name: str
    shape: tuple[int, ...]
    """Shape of the whole array."""
    dtype: str
    box: Box
    content: np.ndarray
    """Bytes of the shard."""


class StoredShard(NamedTuple):
    """A shard in a file of a set."""

    name: str
    shape: tuple[int, ...]
    """Shape of the whole array."""
    dtype: str
    box: Box
    file: str
    offset: int
    bytes: int
    sha256: str

    @property
    def shard(self) -> Shard:
        return self.name, self.box

    def array(self, content: np.ndarray | bytearray) -> np.ndarray:
        """The values from their bytes. Raises Damaged if the SHA-256 differs."""
        if (actual := hashlib.sha256(content).hexdigest()) != self.sha256:
            raise Damaged(f"{self.file}: {self.name}: sha256 {actual}, {SET} says {self.sha256}")
        return np.frombuffer(content, jnp.dtype(self.dtype)).reshape(shape_of(self.box))


@dataclass(frozen=True, kw_only=True)
class SetInfo:
    """Metadata of a set."""

    step: int
    save: str
    """Name of the save; sets with the same name are parts of one checkpoint."""
    process: int
    """The process that wrote it."""
    attempt: str
    """Name of the start of the run that saved it."""
    processes: int
    """Number of processes of the run that saved it."""
    parts: tuple[int, ...]
    """Processes whose shards are all in this set."""
    meta: Mapping[str, Any] = field(repr=False)

    @property
    def id(self) -> str:
        """Unique name of the set in its run."""
        return set_id(self.save, self.process)


def set_id(save: str, process: int) -> str:
    """Name of the set that a process wrote for a save."""
    return f"{save}/{process}"


class SetIndex(NamedTuple):
    """Content of set.json."""

    info: SetInfo
    pieces: dict[Shard, StoredShard]

    def to_json(self) -> str:
        pieces = [piece._asdict() | {"box": bounds_of(piece.box)} for piece in self.pieces.values()]
        document = {"format": FORMAT, "info": asdict(self.info), "pieces": [[*piece.values()] for piece in pieces]}
        return json.dumps(document | {"seal": seal(document)}, allow_nan=False)

    @classmethod
    def from_json(cls, text: str | bytes) -> "SetIndex":
        """The reverse of `to_json`. Raises Damaged if the text was altered."""
        try:
            document = parse_json(text)
            sealed = document.pop("seal")
            if document["format"] != FORMAT:
                raise Damaged(f"{SET} has format {document['format']}, this version reads {FORMAT}")
            if sealed != seal(document):
                raise Damaged(f"{SET} was altered: its own sha256 does not match")
            info = SetInfo(**document["info"] | {"parts": tuple(document["info"]["parts"])})
            pieces = [
                StoredShard(name, tuple(shape), dtype, box_from(bounds), *rest)
                for name, shape, dtype, bounds, *rest in document["pieces"]
            ]
            if others := {str(piece.file) for piece in pieces} - {OWN_FILE, REPLICAS_FILE}:
                raise Damaged(f"{SET} names other files than {OWN_FILE} and {REPLICAS_FILE}: {', '.join(others)}")
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise Damaged(f"{SET} can't be read ({error})") from None
        return cls(info, {piece.shard: piece for piece in pieces})


def bounds_of(box: Box) -> list[tuple[int, int]]:
    """Start and stop in each dimension, for JSON."""
    return [(side.start, side.stop) for side in box]


def box_from(bounds: Iterable[tuple[int, int]]) -> Box:
    """The reverse of `bounds_of`."""
    return tuple(slice(start, stop) for start, stop in bounds)


class LocalSet:
    """A set on a disk of this machine, for reading."""

    def __init__(self, path: Path, index: SetIndex):
        self.path, self.index = path, index

    @classmethod
    def open(cls, path: Path) -> "LocalSet":
        """Raises Damaged if set.json is missing or can't be read."""
        try:
            return cls(path, SetIndex.from_json(read_file(path / SET, DOCUMENT)))
        except (OSError, ValueError) as error:
            raise Damaged(f"{SET}: {getattr(error, 'strerror', None) or error}") from None

    def content(self, piece: StoredShard) -> np.ndarray:
        """The bytes of a piece. Raises Damaged if the file is too short or can't be read."""
        try:
            content = np.fromfile(self.path / piece.file, np.uint8, piece.bytes, offset=piece.offset)
        except OSError as error:
            raise Damaged(f"{piece.file}: {error.strerror}") from None
        if content.size < piece.bytes:
            raise Damaged(f"{piece.file} ends within {piece.name}")
        return content

    def read(self, piece: StoredShard) -> np.ndarray:
        """A copy of the values of a piece. Raises Damaged."""
        return piece.array(self.content(piece))

    def verify(self) -> None:
        """Raises Damaged unless every piece has its SHA-256."""
        in_threads(lambda piece: self.read(piece).nbytes, self.index.pieces.values())


class SetWriter:
    """Writes a set into a new folder. A set exists once `finish` has returned and the folder has been renamed."""

    def __init__(self, path: Path):
        path.mkdir()
        self.path = path
        self.pieces: dict[Shard, StoredShard] = {}
        self._sizes: dict[str, int] = {}

    def append(self, file: str, copy: HostCopy) -> None:
        """Appends a shard to a file, and flushes it to disk."""
        with open(self.path / file, "ab") as target:
            target.write(copy.content)
            target.flush()
            os.fsync(target.fileno())
        name, shape, dtype, box, content = copy
        digest, offset = hashlib.sha256(content).hexdigest(), self._sizes.get(file, 0)
        self.pieces[name, box] = StoredShard(name, shape, dtype, box, file, offset, content.nbytes, digest)
        self._sizes[file] = offset + content.nbytes

    def snapshot(self, info: SetInfo) -> LocalSet:
        """The pieces written until now, for other processes to read."""
        return LocalSet(self.path, SetIndex(info, dict(self.pieces)))

    def finish(self, info: SetInfo) -> LocalSet:
        """Writes set.json, the last file."""
        finished = self.snapshot(info)
        write_durably(self.path / SET, finished.index.to_json())
        return finished

    def rename(self, finished: LocalSet, target: Path) -> LocalSet:
        """Commits the finished set under its name, and replaces an older set of the same step."""
        if target.exists():
            aside = target.with_name(f"{target.name}.deleting")
            target.rename(aside)
        self.path.rename(target)
        flush_to_disk(target.parent)
        return LocalSet(target, finished.index)

    @property
    def bytes(self) -> int:
        return sum(self._sizes.values())


type Shards = frozenset[Shard]


def shards_of_processes(leaves: Mapping[str, Any]) -> dict[int, Shards]:
    """Process -> shards on its devices. leaves: name -> array, or jax.ShapeDtypeStruct with a sharding."""

    @cache
    def boxes(sharding: jax.sharding.Sharding, shape: tuple[int, ...]) -> dict[int, set[Box]]:
        by_process: dict[int, set[Box]] = {}
        for device, index in sharding.devices_indices_map(shape).items():
            by_process.setdefault(device.process_index, set()).add(box_of(index, shape))
        return by_process

    result: dict[int, set[Shard]] = {}
    for name, leaf in leaves.items():
        for process, leaf_boxes in boxes(leaf.sharding, tuple(leaf.shape)).items():
            result.setdefault(process, set()).update((name, box) for box in leaf_boxes)
    return {process: frozenset(shards) for process, shards in result.items()}


def complete_parts(present: Shards, shards: Mapping[int, Shards]) -> tuple[int, ...]:
    """The processes whose shards are all present."""
    return tuple(sorted(process for process, process_shards in shards.items() if process_shards <= present))


def copy_to_host(leaves: Mapping[str, jax.Array]) -> list[HostCopy]:
    """Each shard on devices of this process, once. The arrays may be donated when it returns.

    On CPUs nothing is copied: JAX does not reuse the memory of an array while numpy refers to it.
    """
    shards: dict[Shard, jax.Array] = {}
    for name, array in leaves.items():
        for shard in array.addressable_shards:
            key = name, box_of(shard.index, array.shape)
            if key not in shards:
                shard.data.copy_to_host_async()
                shards[key] = shard.data
    return [
        HostCopy(name, tuple(leaves[name].shape), np.dtype(data.dtype).name, box, as_bytes(np.asarray(data)))
        for (name, box), data in shards.items()
    ]


def as_bytes(array: np.ndarray) -> np.ndarray:
    """The bytes of an array in C order."""
    return contiguous(array).reshape(-1).view(np.uint8)


def byte_count(shards: Iterable[Shard], leaves: Mapping[str, Any]) -> int:
    """Size of shards."""
    return sum(prod(shape_of(box)) * np.dtype(leaves[name].dtype).itemsize for name, box in shards)
