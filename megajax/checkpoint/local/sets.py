"""A process's part of a local checkpoint on disk: shards with their places in the arrays, each with a SHA-256.

STEP/                 a committed set; the name is only ever created by a rename
  own.bin             the shards of this process, one after another
  replicas.bin        shards of other processes that this one has not
  set.json            which shard lies where, its SHA-256, and the metadata; sealed by a SHA-256 of its own
STEP.TOKEN.saving/    being written; removed at the next start
"""

import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from megajax.checkpoint.integrity import Damaged, flush_to_disk, write_durably

SET = "set.json"
OWN, REPLICAS = "own.bin", "replicas.bin"
FORMAT = 1

type Box = tuple[tuple[int, int], ...]
"""Start and stop in each dimension."""


class Piece(NamedTuple):
    """A box of an array in a file of a set."""

    name: str
    shape: tuple[int, ...]
    """Of the whole array."""
    dtype: str
    box: Box
    file: str
    offset: int
    bytes: int
    sha256: str

    @property
    def key(self) -> tuple[str, Box]:
        return self.name, self.box

    def array(self, content: bytes | bytearray) -> np.ndarray:
        """The box from its bytes. Raises Damaged if they are others."""
        if (actual := hashlib.sha256(content).hexdigest()) != self.sha256:
            raise Damaged(f"{self.file}: {self.name}: sha256 {actual}, {SET} says {self.sha256}")
        sides = [stop - start for start, stop in self.box]
        return np.frombuffer(content, jnp.dtype(self.dtype)).reshape(sides)


@dataclass(frozen=True, kw_only=True)
class SetInfo:
    """What a set says of itself."""

    step: int
    save: str
    """Name of the save; sets with the same name are parts of one checkpoint."""
    process: int
    """Which process wrote it."""
    attempt: str
    """Name of the start of the run that saved it."""
    processes: int
    """Of the run that saved it."""
    parts: tuple[int, ...]
    """Processes whose shards are all here."""
    meta: Mapping[str, Any] = field(repr=False)

    @property
    def id(self) -> str:
        """Name of the set among all of a run."""
        return set_id(self.save, self.process)


def set_id(save: str, process: int) -> str:
    """Name of the part of a save that a process wrote."""
    return f"{save}/{process}"


class SetIndex(NamedTuple):
    """Content of set.json."""

    info: SetInfo
    pieces: dict[tuple[str, Box], Piece]

    def to_json(self) -> str:
        document = {"format": FORMAT, "info": asdict(self.info), "pieces": [*self.pieces.values()]}
        return json.dumps(document | {"seal": _seal(document)}, allow_nan=False)

    @classmethod
    def from_json(cls, text: str) -> "SetIndex":
        """Raises Damaged if it is not what `to_json` gave."""
        try:
            document = json.loads(text)
            seal = document.pop("seal")
            if document["format"] != FORMAT:
                raise Damaged(f"{SET} has format {document['format']}, this version reads {FORMAT}")
            if seal != _seal(document):
                raise Damaged(f"{SET} was altered: its own sha256 does not match")
            info = SetInfo(**document["info"] | {"parts": tuple(document["info"]["parts"])})
            pieces = [
                Piece(name, tuple(shape), dtype, tuple((start, stop) for start, stop in box), *rest)
                for name, shape, dtype, box, *rest in document["pieces"]
            ]
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise Damaged(f"{SET} can't be read ({error})") from None
        return cls(info, {piece.key: piece for piece in pieces})


def _seal(document: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(document, sort_keys=True).encode()).hexdigest()


class LocalSet:
    """A set on a disk of this machine, for reading."""

    def __init__(self, path: Path, index: SetIndex):
        self.path, self.index = path, index

    @classmethod
    def open(cls, path: Path) -> "LocalSet":
        """Raises Damaged if set.json is missing or can't be read."""
        try:
            return cls(path, SetIndex.from_json((path / SET).read_text(encoding="utf-8")))
        except (OSError, UnicodeDecodeError) as error:
            raise Damaged(f"{SET}: {getattr(error, 'strerror', None) or error}") from None

    def content(self, piece: Piece) -> bytearray:
        """The bytes of a piece. Raises Damaged if the file is too short or can't be read."""
        content = bytearray(piece.bytes)
        try:
            with open(self.path / piece.file, "rb", buffering=0) as file:
                file.seek(piece.offset)
                view, done = memoryview(content), 0
                while done < piece.bytes and (count := file.readinto(view[done:])):
                    done += count
        except OSError as error:
            raise Damaged(f"{piece.file}: {error.strerror}") from None
        if done < piece.bytes:
            raise Damaged(f"{piece.file} ends within {piece.name}")
        return content

    def read(self, piece: Piece) -> np.ndarray:
        """The values of a piece, in memory of their own. Raises Damaged."""
        return piece.array(self.content(piece))

    def verify(self) -> None:
        """Raises Damaged unless every piece has its SHA-256."""
        with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
            for _ in pool.map(lambda piece: piece.array(self.content(piece)), self.index.pieces.values()):
                pass


class SetWriter:
    """Writes a set into a new folder. A set exists once `finish` has returned and the folder has been renamed."""

    def __init__(self, path: Path):
        path.mkdir(parents=True)
        self.path = path
        self.pieces: dict[tuple[str, Box], Piece] = {}
        self._sizes: dict[str, int] = {}

    def append(self, file: str, boxes: Iterable[tuple[str, tuple[int, ...], str, Box, Any]]) -> None:
        """Appends (name, shape of the array, dtype, box, content: a buffer of bytes), and flushes to disk."""
        with open(self.path / file, "ab", buffering=0) as target:
            for name, shape, dtype, box, content in boxes:
                view, done = memoryview(content), 0
                while done < view.nbytes:
                    done += target.write(view[done : done + 2**26])
                digest, offset = hashlib.sha256(content).hexdigest(), self._sizes.get(file, 0)
                self.pieces[name, box] = Piece(name, shape, dtype, box, file, offset, view.nbytes, digest)
                self._sizes[file] = offset + view.nbytes
            os.fsync(target.fileno())

    def so_far(self, info: SetInfo) -> LocalSet:
        """What is written, for other processes to read."""
        return LocalSet(self.path, SetIndex(info, dict(self.pieces)))

    def finish(self, info: SetInfo) -> LocalSet:
        """Writes set.json, the last file."""
        whole = self.so_far(info)
        write_durably(self.path / SET, whole.index.to_json())
        return whole

    def rename(self, whole: LocalSet, target: Path) -> LocalSet:
        """Commits the finished set under its name; a folder there is of the same step and is replaced."""
        if target.exists():
            aside = target.with_name(f"{target.name}.deleting")
            target.rename(aside)
        self.path.rename(target)
        flush_to_disk(target.parent)
        return LocalSet(target, whole.index)

    @property
    def bytes(self) -> int:
        return sum(self._sizes.values())
