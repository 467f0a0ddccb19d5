"""A process's part of a local checkpoint: a set, in the format of a step in an object store.

STEP/                   a committed set; its folder gets this name by a rename only
  arrays/process_K/     packs of the shards of process K; those of other processes are replicas that K does not have
  meta.json             the metadata of the checkpoint and of the set
  manifest.json         SHA-256 of the files, written last
STEP.TOKEN.saving/      being written; removed at the next start
"""

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from functools import cache
from math import prod
from pathlib import Path
from typing import Any

import jax
import numpy as np

from megajax.checkpoint.boxes import Box, box_of, shape_of
from megajax.checkpoint.manifest import Damaged, Entries, complete_step, verify
from megajax.checkpoint.pack_writer import PACK_BYTES, Shard, write_packs
from megajax.checkpoint.step_folders import META
from megajax.checkpoint.zarr_reader import StoredArrays
from megajax.config.errors import UserError
from megajax.config.read_limits import parse_json
from megajax.storage.disk import flush_to_disk, write_durably

FORMER = "set.json"
"""A file of the sets that earlier versions wrote."""


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

    @classmethod
    def read(cls, stored: StoredArrays) -> "SetInfo":
        """The metadata of a finished set. Raises Damaged, ConnectionError."""
        content = stored.files.content(META)
        try:
            document = parse_json(content)
            return cls(**document | {"parts": tuple(document["parts"])})
        except (ValueError, KeyError, TypeError) as error:
            raise Damaged(f"{META} can't be read ({error!r})") from None


def set_id(save: str, process: int) -> str:
    """Name of the set that a process wrote for a save."""
    return f"{save}/{process}"


class LocalSet:
    """A set on a disk of this machine, for reading."""

    def __init__(self, path: Path, arrays: StoredArrays, info: SetInfo):
        self.path, self.arrays, self.info = path, arrays, info

    @classmethod
    def open(cls, path: Path) -> "LocalSet":
        """Raises Damaged if its manifest, metadata or index can't be read; UserError for one of an earlier version."""
        if (path / FORMER).exists():
            raise UserError(
                f"{path} is a local checkpoint in the format of an earlier version, which this one does not read.\n"
                "Resume the run with that version until its next save to the shared folder, or delete the folder."
            )
        stored = StoredArrays(path)
        return cls(path, stored, SetInfo.read(stored))

    def verify(self) -> None:
        """Raises Damaged unless every file has its SHA-256."""
        verify(self.path, self.arrays.files.entries)


class SetWriter:
    """Writes a set into a new folder. A set exists once `finish` has returned and the folder has been renamed."""

    def __init__(self, path: Path):
        path.mkdir()
        self.path = path
        self.entries: Entries = {}
        self.shards: set[Shard] = set()
        """What was written."""

    def append(self, process: int, descriptions: Mapping[str, str], shards: Iterable[tuple[Shard, np.ndarray]]) -> None:
        """Writes shards of a process durably."""
        self.entries |= write_packs(process, descriptions, map(self._counted, shards), self._write)

    def _counted(self, item: tuple[Shard, np.ndarray]) -> tuple[Shard, np.ndarray]:
        self.shards.add(item[0])
        return item

    def _write(self, name: str, content: bytes | str) -> None:
        path = self.path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        write_durably(path, content)

    def snapshot(self, info: SetInfo) -> LocalSet:
        """What was written until now, for other processes to read."""
        return LocalSet(self.path, StoredArrays(self.path, dict(self.entries)), info)

    def finish(self, info: SetInfo) -> None:
        """Writes the metadata and, last, the manifest."""
        self._write(META, json.dumps(asdict(info), allow_nan=False))
        complete_step(self.path, self.entries)

    def rename(self, target: Path) -> LocalSet:
        """Commits the finished set under its name, and replaces an older set of the same step."""
        if target.exists():
            aside = target.with_name(f"{target.name}.deleting")
            target.rename(aside)
        self.path.rename(target)
        flush_to_disk(target.parent)
        return LocalSet.open(target)

    @property
    def bytes(self) -> int:
        return sum(entry["bytes"] for entry in self.entries.values())


def read_shards(stored: StoredArrays, shards: Iterable[Shard]) -> Iterator[tuple[Shard, np.ndarray]]:
    """The values of shards, read PACK_BYTES at a time. Raises Damaged, ConnectionError."""
    group, size = list[Shard](), 0
    for shard in shards:
        group.append(shard)
        size += byte_count([shard], stored.arrays)
        if size >= PACK_BYTES:
            yield from zip(group, stored.read_all(group), strict=True)
            group, size = [], 0
    yield from zip(group, stored.read_all(group), strict=True)


def shards_of_processes(leaves: Mapping[str, Any]) -> dict[int, frozenset[Shard]]:
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


def complete_parts(present: Iterable[Shard], shards: Mapping[int, frozenset[Shard]]) -> tuple[int, ...]:
    """The processes whose shards are all present."""
    return tuple(sorted(process for process, process_shards in shards.items() if process_shards.issubset(present)))


def byte_count(shards: Iterable[Shard], leaves: Mapping[str, Any]) -> int:
    """Size of shards."""
    return sum(prod(shape_of(box)) * np.dtype(leaves[name].dtype).itemsize for name, box in shards)
