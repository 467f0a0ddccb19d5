"""Local checkpoints: each process saves its shards to a folder of its machine, and keeps those of others as replicas.

A restore reads the sets of this machine, and missing shards from other processes.

The stages of a save, in a background thread of every process:
    own shards into process_K/STEP.TOKEN.saving; fsync             all agree
    shards of the peers whose replicas it keeps, read over TCP     all agree: the step is complete
    rename to STEP                                                 all agree
    older steps are deleted
Threads use no collectives of devices, whose order relative to those of the training step would differ between
processes.
"""

import os
import shutil
import threading
import time
from collections.abc import Mapping
from contextlib import nullcontext
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

from megajax.checkpoint import array_serialization, background_saves
from megajax.checkpoint.background_saves import Background, BackgroundSave, BackgroundSaves, CheckpointError, SaveReport
from megajax.checkpoint.config import LocalConfig
from megajax.checkpoint.local.machine_folder import LocalFolder, RunHistory
from megajax.checkpoint.local.remote_shards import Members
from megajax.checkpoint.local.shard_set import (
    LocalSet,
    SetInfo,
    SetWriter,
    byte_count,
    complete_parts,
    read_shards,
    set_id,
    shards_of_processes,
)
from megajax.checkpoint.local.shard_set_reader import Holder, SetReader
from megajax.checkpoint.manifest import Damaged
from megajax.checkpoint.pack_writer import Shard, copy_to_host, drained
from megajax.checkpoint.reader import DamagedStep, Meta, Tree
from megajax.checkpoint.step_folders import step_name
from megajax.display.text import say
from megajax.processes.peers import PartFailed, Peers
from megajax.storage import disk

NICE = 10
"""Added to the niceness of the writing thread, so that it yields to training."""


class SkippedStep(NamedTuple):
    """A local checkpoint that is damaged or incomplete."""

    step: int
    reason: str


class LocalCheckpoints(BackgroundSaves):
    """The local checkpoints of a run, saved and restored by methods of the same names as a `CheckpointManager` has.

    All processes call the methods in the same order. `close` it, or use it as a context manager.
    """

    expected_errors = PartFailed

    def __init__(self, cfg: LocalConfig, shared: Path | str, *, background: Background = lambda step: nullcontext()):
        """shared: the run's checkpoints folder.

        Raises UserError if the folder can't be written or others could change it, if local.json can't be used, or if
        there are too few processes for the replicas.
        """
        super().__init__("megajax local checkpoint", Peers(), background, _yield_to_training)
        self.peers = self._peers
        self.cfg, self.shared = cfg, Path(shared).absolute()
        self.attempt = self.peers.token
        self.history = self._stored_history()
        self.store = LocalFolder(cfg.folder, self.history, self.shared, self.peers.process)
        self.peers.check(self.store.prepare)
        self.folder = self.store.process_folder
        self.run = str(self.folder.parent)
        self._serving = threading.Lock()
        self.served: dict[str, LocalSet] = {}
        """The sets that this process owns, by their ids."""
        self.members = Members(self.peers, self.store.machine, self._offered)
        self.peers.check(lambda: self.members.demand_replicas(cfg.replicas, cfg.jump))
        for local_set in self.store.adopt(self.members.has_other_owner()):
            self.serve(local_set)
        self.failures = 0
        """Failed saves in a row."""
        self._shards: dict[int, frozenset[Shard]] = {}
        self.need = 0
        """Bytes of a set of this process, replicas included; known after `begin`."""
        self.skipped: list[SkippedStep] = []
        """The steps that the last call of `newest_intact` skipped, and those that restores found damaged before it."""
        self._damaged: list[SkippedStep] = []
        """The steps that restores found damaged since then."""
        self._refused: set[str] = set()
        """Names of the saves of skipped steps."""
        self._step: int | None = None
        self._save = ""
        self._holders: list[Holder] = []
        self._meta: Meta = {}

    def _stored_history(self) -> RunHistory:
        """The history that process 0 reads. Raises UserError on all processes if it can't be read."""
        run, attempts = self.peers.of_first(lambda: RunHistory.read(self.shared))
        return RunHistory(run, tuple((name, first) for name, first in attempts))

    def _offered(self, set_id: str) -> LocalSet | None:
        with self._serving:
            return self.served.get(set_id)

    def serve(self, local_set: LocalSet) -> None:
        """Lets other processes read a set."""
        with self._serving:
            self.served[local_set.info.id] = local_set

    def drop(self, local_set: LocalSet) -> None:
        """Deletes a set."""
        with self._serving:
            self.served.pop(local_set.info.id, None)
        self.store.delete(local_set.path)

    @property
    def stopped(self) -> bool:
        """Whether too many saves have failed in a row."""
        return self.failures >= self.cfg.failures

    def begin(self, first: int, state: Tree) -> None:
        """Begins an attempt that trains from step `first`: drops the sets that are no longer part of the run.

        Raises UserError on all processes if the run's history can't be written, or if there is too little space.
        """
        self.history = self.history.begin(self.attempt, first)
        self.peers.check(lambda: self.history.write(self.shared) if self.peers.first else None)
        for local_set in list(self.served.values()):
            if not self.history.includes(local_set.info.attempt, local_set.info.step):
                self.drop(local_set)
        leaves = array_serialization.flatten(state)
        self._shards = shards_of_processes(leaves)
        own_shards = self._shards[self.members.process]
        missing = frozenset().union(*(self._shards[source] for source in self._sources())) - own_shards
        self.need = byte_count(own_shards | missing, leaves)
        needs = self.peers.gather((self.members.process, self.need))
        machine_need = sum(size for process, size in needs if process in self.members.on_this_machine())
        self.peers.check(lambda: self.store.demand_space((self.cfg.keep + 1) * machine_need, self.cfg.keep + 1))

    def _sources(self) -> list[int]:
        """The processes whose replicas this one keeps."""
        return self.members.sources(self.cfg.replicas, self.cfg.jump)

    def due(self, step: int) -> bool:
        # Not `stopped`, which each process learns at its own time: it is the same on all of them after `wait`.
        return step > 0 and step % self.cfg.every == 0

    def save(self, step: int, state: Tree, meta: Mapping[str, Any] | None = None) -> None:
        """Saves jax.Arrays and metadata (JSON-serialisable) in the background; waits for an earlier save first.

        Returns when the arrays are copied to host memory, after which they may be donated. Failures are reported by
        `poll`. Called by all processes.
        """
        started = time.monotonic()
        self.wait()
        if self.stopped:
            return
        save = self._new_save(step, self.folder, dict(meta or {}), self.need, started)
        save.content = copy_to_host(array_serialization.flatten(state), once=False)
        self._submit(save)

    def _write(self, save: BackgroundSave) -> int:
        writer = self._on_all(save, lambda: self._write_own(save))
        self._on_all(save, lambda: self._write_replicas(save, writer))
        self._on_all(save, lambda: writer.finish(self._info(save, writer, self._shards)))
        self.serve(self._on_all(save, lambda: writer.rename(self.folder / step_name(save.step))))
        newest = sorted({local_set.info.step for local_set in self.served.values()})[-self.cfg.keep :]
        for local_set in list(self.served.values()):
            if local_set.info.step not in newest:
                self.drop(local_set)
        return writer.bytes

    def _discard(self, save: BackgroundSave) -> None:
        with self._serving:
            self.served.pop(set_id(save.name, self.members.process), None)
        shutil.rmtree(save.path, ignore_errors=True)

    def _write_own(self, save: BackgroundSave) -> SetWriter:
        disk.demand_space(self.folder, self.need)
        writer = SetWriter(save.path)
        (descriptions, shards), save.content = save.content, None
        writer.append(self.members.process, descriptions, drained(shards))
        self.serve(writer.snapshot(self._info(save, writer, self._shards)))
        return writer

    def _write_replicas(self, save: BackgroundSave, writer: SetWriter) -> None:
        """Reads the replicas that this process keeps from other processes, except for shards that it has itself."""
        for source in self._sources():
            missing = self._shards[source] - writer.shards
            if not missing:
                continue
            with self.members.read_from(source, set_id(save.name, source)) as remote:
                descriptions = {name: remote.arrays.description(name) for name, _ in missing}
                writer.append(source, descriptions, read_shards(remote.arrays, sorted(missing)))

    def _info(self, save: BackgroundSave, writer: SetWriter, shards: Mapping[int, frozenset[Shard]]) -> SetInfo:
        return SetInfo(
            step=save.step,
            save=save.name,
            process=self.members.process,
            attempt=self.attempt,
            processes=self.peers.count,
            parts=complete_parts(writer.shards, shards),
            meta=save.meta,
        )

    def wait(self) -> None:
        """Waits for the save in progress; `poll` returns its report, also if it failed."""
        step = None if self._pending.result is None else self.saving
        try:
            super().wait()
        except CheckpointError as error:
            self.failures += 1
            self._reports.append(SaveReport(error.step, failure=error.reason))
        else:
            self.failures = self.failures if step is None else 0

    def save_alone(self, step: int, state: Tree, meta: Mapping[str, Any]) -> tuple[int, ...]:
        """Saves the shards of this process after others were lost -> the processes whose shards it has.

        The next start of the run restores the step if the survivors have all shards. Raises CheckpointError.
        """
        leaves = array_serialization.flatten(state)
        descriptions, copies = copy_to_host(leaves, once=False)
        path = self.folder / f"{step_name(step)}.{self.attempt}.saving"
        save = BackgroundSave(step, f"{self.attempt}-alone-{step}", path, dict(meta), self.need, None, self.peers, 0.0)
        try:
            writer = SetWriter(path)
            writer.append(self.members.process, descriptions, drained(copies))
            info = self._info(save, writer, shards_of_processes(leaves))
            writer.finish(info)
            writer.rename(self.folder / step_name(step))
        except OSError as error:
            raise CheckpointError(step, background_saves.reason(error, path, self.need)) from error
        return info.parts

    def clear(self) -> None:
        """Deletes all sets of this run, when the shared folder has the same step or a later one."""
        self.wait()
        for local_set in list(self.served.values()):
            self.drop(local_set)
        self.store.remove()

    def newest_intact(self) -> int | None:
        """The newest step with all shards on the processes; None if there is none.

        Shards are verified when they are read: if `restore` of the step raises DamagedStep, call this again.
        """
        self.skipped, self._damaged = self._damaged, []
        infos = [local_set.info for local_set in self.served.values()]
        summaries = [
            (info.step, info.save, info.processes, self.members.process, info.id, info.parts) for info in infos
        ]
        saves: dict[tuple[int, str, int], list[Holder]] = {}
        for step, save, processes, process, name, parts in chain.from_iterable(self.peers.gather(summaries)):
            saves.setdefault((step, save, processes), []).append(Holder(process, name, parts))
        for (step, save, processes), holders in sorted(saves.items(), reverse=True):
            if save in self._refused:
                continue
            self._step, self._save, self._holders = step, save, holders
            missing = set(range(processes)).difference(*(holder.parts for holder in holders))
            lost_processes = ", ".join(f"process {process}" for process in sorted(missing))
            reason = f"the shards of {lost_processes} are lost" if missing else self.peers.agree(self._read_meta())
            if reason is None:
                return step
            self._refused.add(save)
            self.skipped.append(SkippedStep(step, reason))
        return None

    def _read_meta(self) -> str | None:
        """Reads the metadata of the chosen step -> why it can't be read, or None."""
        try:
            with self._opened() as sources:
                self._meta = dict(sources.info().meta)
        except Damaged as error:
            return str(error)
        return None

    def meta(self, step: int) -> Meta:
        """The metadata given to `save`."""
        self._demand(step)
        return self._meta

    def restore(self, step: int, like: Tree) -> tuple[Tree, Meta]:
        """The arrays of the step with the layout of `like`, bit for bit, and its metadata.

        like: tree of jax.ShapeDtypeStruct with shardings. Every byte of this process's sets is read once, and again
        for each process that lacks it; what is returned is what was hashed. Another copy replaces a damaged shard.
        Raises UserError if names, shapes or dtypes differ; DamagedStep if a process finds no intact copy of a shard.
        """
        self._demand(step)
        tree, reason = list[Tree](), None
        with self._opened() as sources:
            try:
                tree.append(array_serialization.read(sources, like))
                sources.verify_rest()
            except Damaged as error:
                reason = f"process {self.members.process}: {error}"
        answers = self.peers.gather((reason, sources.faults))
        faults = {set_id: fault for _, process_faults in answers for set_id, fault in process_faults.items()}
        self._remove_damaged(faults)
        self._holders = [holder for holder in self._holders if holder.set_id not in faults]
        if reasons := [reason for reason, _ in answers if reason is not None]:
            self._refused.add(self._save)
            self._damaged.append(SkippedStep(step, "; ".join(reasons[:3])))
            raise DamagedStep(f"local checkpoint step {step} can't be read: {self._damaged[-1].reason}")
        return tree[0], self._meta

    def _remove_damaged(self, faults: Mapping[str, str]) -> None:
        """Deletes the damaged sets of this process, which are verified again: a transfer may have damaged a copy.

        faults: id of a set -> its fault as some process read it.
        """
        for local_set in list(self.served.values()):
            if (fault := faults.get(local_set.info.id)) is None:
                continue
            try:
                local_set.verify()
                say(f"the local checkpoint {local_set.path} is intact, but was damaged when it was read: {fault}")
            except Damaged as error:
                say(f"removed the local checkpoint {local_set.path}, which is damaged: {error}")
                self.drop(local_set)

    def _opened(self) -> SetReader:
        return SetReader(f"local checkpoint of step {self._step}", self.served, self.members, self._holders)

    def _demand(self, step: int) -> None:
        if step != self._step:
            raise ValueError(f"newest_intact returned step {self._step}, not {step}")

    def _release(self) -> None:
        self._background.shutdown()
        self.members.close()


def _yield_to_training() -> None:
    """Lowers the priority of this thread, where the system allows it."""
    try:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICE)
    except (OSError, AttributeError):
        say("local checkpoints are written at the priority of training: this system can't lower it")
