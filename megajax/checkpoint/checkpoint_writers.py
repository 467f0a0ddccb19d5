"""How a save is written: into a folder that all machines share, or into an object store.

A folder: all processes write shards into STEP.TOKEN.saving/arrays (Orbax); each hashes its own files; process 0 writes
meta.json and manifest.json, and renames the folder to STEP, which commits. Everything is flushed (fsync) before.
A store: each process sends its shards in packs into STEP.TOKEN, hashed on their way; process 0 writes meta.json and
manifest.json, and creates committed/STEP, which commits.
"""

import json
import time
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Protocol

import jax

from megajax.checkpoint import array_serialization, manifest, pack_writer, step_folders
from megajax.checkpoint.background_saves import BackgroundSave
from megajax.checkpoint.committed_steps import FolderSteps, Place
from megajax.checkpoint.manifest import MANIFEST
from megajax.checkpoint.object_store_steps import CHECKPOINTS, StoredSteps, WriterLease
from megajax.checkpoint.step_folders import ARRAYS, COMMITTED_AT, META, StoreRecord, recorded_store, step_name, steps_in
from megajax.config.errors import UserError
from megajax.display.text import say
from megajax.processes.peers import PartFailed, Peers
from megajax.storage import disk
from megajax.storage.atomic_folders import delete_folder
from megajax.storage.stores import Store, StoreError, in_parallel, open_store

SHARED_FOLDER_TIMEOUT_SECONDS = 60.0
MIRRORED_BYTES = 2**26
"""Largest file of the run folder that is copied to the store."""
MIRRORED_FOLDERS = ("tokenizer",)


class StepWriter(Protocol):
    """Writes the steps of a run. Processes call the methods together, unless said otherwise."""

    place: Place

    def open(self, peers: Peers) -> None:
        """Acquires the place and removes what dead attempts left unfinished. Raises UserError on all processes."""
        ...

    def committed(self) -> Collection[int]:
        """The committed steps; called between steps of the training: without a request to a store."""
        ...

    def finish(self, save: BackgroundSave) -> None:
        """Called by all processes after the commit."""
        ...

    def begin(self, save: BackgroundSave) -> None:
        """Called by process 0."""
        ...

    def start_writing(self, save: BackgroundSave, leaves: Mapping[str, jax.Array]) -> object:
        """Copies arrays to host memory -> `content` of the save. They may be donated when it returns."""
        ...

    def write_arrays(self, save: BackgroundSave) -> None:
        """Returns when this process's shards are durable."""
        ...

    def write_part(self, save: BackgroundSave) -> None:
        """What else this process contributes."""
        ...

    def commit(self, save: BackgroundSave) -> int:
        """Called by process 0 -> bytes of the step."""
        ...

    def discard(self, save: BackgroundSave) -> None:
        """Deletes the files of a failed save. Called by process 0."""
        ...

    def free_bytes(self) -> int | None:
        """Bytes that can still be written; None: unknown, or without limit."""
        ...

    def release(self) -> None:
        """Gives the place back; may be called again, and before `open`."""
        ...


def open_writer(store: Path | None, folder: Path) -> StepWriter:
    """The writer of a run. store: checkpoint.store. folder: its checkpoints folder. Raises UserError."""
    record = recorded_store(folder)
    if store is None:
        if record is not None:
            raise UserError(
                f"the checkpoints of this run are in {record.url}, but checkpoint.store is none.\n"
                f"Set it to {record.url.rpartition('/')[0]}, or name another run_dir."
            )
        return FolderWriter(folder)
    place = open_store(store).below(CHECKPOINTS)
    if record is not None and record.url != place.url:
        raise UserError(
            f"the checkpoints of this run are in {record.url}, but checkpoint.store is {open_store(store)}.\n"
            "Set it as before, or name another run_dir."
        )
    if record is None and (steps := steps_in(folder)):
        raise UserError(
            f"{folder} has checkpoints (step {steps[-1]}), but checkpoint.store is {open_store(store)}, where this run "
            "would begin anew.\nName another run_dir, and load this one with checkpoint.load."
        )
    return StoreWriter(place, folder)


class FolderWriter:
    """Writes steps into a folder."""

    def __init__(self, folder: Path):
        self.place: Place = FolderSteps(folder)
        self._folder = folder
        self._marker: Path | None = None
        self._lock: step_folders.WriterLock | None = None

    def open(self, peers: Peers) -> None:
        self._marker = self._folder / f"lock.{peers.token}"
        for check in (self._acquire, self._check_shared_folder, self._check_writable):
            peers.check(lambda check=check: check(peers))

    def _acquire(self, peers: Peers) -> None:
        if not peers.first:
            return
        self._lock = step_folders.WriterLock(self._folder)
        for name in step_folders.remove_unfinished(self._folder):
            say(f"removed {self._folder / name}, left unfinished by an earlier attempt")
        if peers.count > 1 and self._marker is not None:
            disk.write_durably(self._marker, "")

    def _check_shared_folder(self, peers: Peers) -> None:
        """Every process must see the marker of process 0; with separate folders no step would ever be complete."""
        # Network file systems may show a new file late.
        deadline = time.monotonic() + SHARED_FOLDER_TIMEOUT_SECONDS
        while peers.count > 1 and self._marker is not None and not self._marker.exists():
            if time.monotonic() > deadline:
                raise UserError(
                    f"{self._folder} is not shared by all processes: this one does not see the files of process 0.\n"
                    "Use a run_dir on a file system that all machines share, or an object store (checkpoint.store)."
                )
            time.sleep(0.5)

    def _check_writable(self, peers: Peers) -> None:
        """Each process writes its own shards. The lock has tested this for process 0."""
        if not peers.first:
            step_folders.probe(self._folder, peers.index)
        elif self._marker is not None:
            self._marker.unlink(missing_ok=True)

    def committed(self) -> Collection[int]:
        return self.place.steps()

    def finish(self, save: BackgroundSave) -> None:
        """The folder says that the step is committed."""

    def begin(self, save: BackgroundSave) -> None:
        # Don't begin a save that can't fit: other programs may need the free space.
        disk.demand_space(self._folder, save.bytes)
        save.path.mkdir()

    def start_writing(self, save: BackgroundSave, leaves: Mapping[str, jax.Array]) -> object:
        return array_serialization.start_writing(save.path / ARRAYS, leaves)

    def write_arrays(self, save: BackgroundSave) -> None:
        """Waits for Orbax, and polls for failures of other processes, which its barrier notices after minutes only."""
        while True:
            began = time.monotonic()
            try:
                return save.content.result(timeout=1.0)
            except TimeoutError:
                if time.monotonic() - began < 0.5:  # not the timeout of this call, but one that ended the writing
                    raise
            if (failure := save.peers.failure()) is not None:
                raise PartFailed(failure)

    def write_part(self, save: BackgroundSave) -> None:
        """Process 0 writes the metadata. The others hash their own files, so that process 0 need not hash them all."""
        if save.peers.first:
            disk.write_durably(save.path / META, save.meta)
            return
        process_folder = f"{ARRAYS}/state/ocdbt.process_{save.peers.index}"
        names = [f"{process_folder}/{name}" for name in disk.files_below(save.path / process_folder)]
        entries = manifest.hash_files(save.path, names)
        disk.write_durably(save.path / f"manifest.{save.peers.index}.json", json.dumps(entries))

    def commit(self, save: BackgroundSave) -> int:
        """Merges the others' entries, hashes the rest, writes the manifest and renames."""
        entries: manifest.Entries = {}
        for index in range(1, save.peers.count):
            part = save.path / f"manifest.{index}.json"
            entries |= json.loads(part.read_text(encoding="utf-8"))
            part.unlink()
        size = manifest.complete_step(save.path, entries)
        save.path.rename(self._folder / step_name(save.step))
        disk.flush_to_disk(self._folder)
        return size

    def discard(self, save: BackgroundSave) -> None:
        delete_folder(save.path)

    def free_bytes(self) -> int | None:
        return disk.free_bytes(self._folder)

    def release(self) -> None:
        if self._lock is not None and self._marker is not None:
            self._marker.unlink(missing_ok=True)
            self._lock.release()
            self._lock = None


class StoreWriter:
    """Writes steps into an object store, and copies of the run folder's files."""

    def __init__(self, store: Store, folder: Path):
        """store: of the checkpoints. folder: the local checkpoints folder."""
        self._steps = StoredSteps(store)
        self.place: Place = self._steps
        self._store, self._folder = store, folder
        self._lease: WriterLease | None = None
        self._entries: manifest.Entries = {}
        self._copied: dict[str, tuple[int, int]] = {}
        """Name of a file of the run folder -> date and size of its copy."""

    def open(self, peers: Peers) -> None:
        peers.check(lambda: self._acquire() if peers.first else None)
        peers.check(lambda: self._probe(f"probe/{peers.token}.{peers.index}"))

    def _acquire(self) -> None:
        self._lease = WriterLease(self._store)
        for name in self._steps.remove_unfinished():
            say(f"removed {self._store}/{name}, left unfinished by an earlier attempt")
        self._record(self._steps.steps())

    def _probe(self, name: str) -> None:
        """Each process writes its own shards."""
        self._store.write(name, "a trial write")
        self._store.delete(name)
        self._steps.steps()

    def _record(self, steps: Iterable[int]) -> None:
        StoreRecord(self._store.url, tuple(sorted(steps))).write(self._folder)

    def _files(self, save: BackgroundSave) -> Store:
        return self._store.below(save.path.stem)

    def committed(self) -> Collection[int]:
        return self._steps.known

    def finish(self, save: BackgroundSave) -> None:
        self._steps.known.add(save.step)

    def begin(self, save: BackgroundSave) -> None:
        """Nothing has to be created before objects."""

    def start_writing(self, save: BackgroundSave, leaves: Mapping[str, jax.Array]) -> object:
        return pack_writer.copy_to_host(leaves, once=True)

    def write_arrays(self, save: BackgroundSave) -> None:
        descriptions, shards = save.content
        save.content = None
        write = self._files(save).write

        def write_unless_failed(name: str, content: bytes) -> None:
            if (failure := save.peers.failure()) is not None:
                raise PartFailed(failure)
            write(name, content)

        self._entries = pack_writer.write_packs(
            save.peers.index, descriptions, shards.items(), write_unless_failed, in_parallel
        )

    def write_part(self, save: BackgroundSave) -> None:
        files = self._files(save)
        if save.peers.first:
            files.write(META, save.meta)
            self._copy_run_folder()
        else:
            files.write(f"manifest.{save.peers.index}.json", json.dumps(self._entries))

    def _copy_run_folder(self) -> None:
        run, target = self._folder.parent, self._store.parent()
        paths = [path for path in run.iterdir() if not path.name.startswith(".")]
        paths += [path for name in MIRRORED_FOLDERS for path in (run / name).rglob("*")]
        for path in paths:
            name, facts = path.relative_to(run).as_posix(), path.stat()
            version = facts.st_mtime_ns, facts.st_size
            if path.is_file() and facts.st_size <= MIRRORED_BYTES and self._copied.get(name) != version:
                target.write(name, path.read_bytes())
                self._copied[name] = version

    def commit(self, save: BackgroundSave) -> int:
        files = self._files(save)
        entries = self._entries | {META: manifest.entry_of(save.meta.encode())}
        parts = [f"manifest.{index}.json" for index in range(1, save.peers.count)]
        for text in in_parallel(files.read, parts):
            entries |= json.loads(text)
        times = json.dumps({"commit_timestamp_nsecs": time.time_ns()})
        files.write(COMMITTED_AT, times)
        entries[COMMITTED_AT] = manifest.entry_of(times.encode())
        files.write(MANIFEST, manifest.manifest_text(entries))
        if self._lease is not None:
            self._lease.demand()
        self._steps.commit(save.step, files.name)
        in_parallel(files.delete, parts)
        self._record(self._steps.known)
        return sum(entry["bytes"] for entry in entries.values())

    def discard(self, save: BackgroundSave) -> None:
        try:
            self._store.delete(f"{save.path.stem}/")
        except StoreError as error:
            say(f"{error} It is deleted at the next start.")

    def free_bytes(self) -> int | None:
        return None

    def release(self) -> None:
        if self._lease is not None:
            try:
                self._copy_run_folder()
            except (OSError, StoreError) as error:
                say(f"the run folder's files were not copied: {error}")
            self._lease.release()
            self._lease = None
