"""Local checkpoints: each process saves its shards to a folder of its machine, and keeps those of others as replicas.

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
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NamedTuple

from megajax.checkpoint import arrays, background_saves
from megajax.checkpoint.background_saves import Background, BackgroundSaves, CheckpointError, SaveReport
from megajax.checkpoint.config import LocalConfig
from megajax.checkpoint.folder import step_name
from megajax.checkpoint.local.exchange import Members
from megajax.checkpoint.local.folder import LocalFolder, RunHistory
from megajax.checkpoint.local.sets import (
    OWN_FILE,
    REPLICAS_FILE,
    HostCopy,
    LocalSet,
    SetInfo,
    SetWriter,
    Shards,
    as_bytes,
    byte_count,
    complete_parts,
    copy_to_host,
    set_id,
    shards_of_processes,
)
from megajax.checkpoint.reader import Meta, Tree, say
from megajax.mesh.processes.peers import PartFailed, Peers
from megajax.storage import disk

NICE = 10
"""Added to the niceness of the writing thread, so that it yields to training."""


class _Save(NamedTuple):
    step: int
    name: str
    meta: Meta
    peers: Peers
    copies: list[HostCopy]
    started: float


class LocalCheckpoints(BackgroundSaves):
    """The writer of a run's local checkpoints; `megajax.checkpoint.local.restore` finds and restores them.

    All processes call the methods in the same order. `close` it, or use it as a context manager.
    """

    def __init__(
        self,
        cfg: LocalConfig,
        shared: Path | str,
        *,
        during: Background = lambda step: nullcontext(),
    ):
        """shared: the run's checkpoints folder. during: context manager in which the background thread saves a step.

        Raises UserError if the folder can't be written or others could change it, if local.json can't be used, or if
        there are too few processes for the replicas.
        """
        super().__init__("megajax local checkpoint", _yield_to_training)
        self.cfg, self.shared, self._during = cfg, Path(shared).absolute(), during
        self.peers = Peers()
        self.attempt = self.peers.token
        self.history = self._stored_history()
        self.folder = LocalFolder(cfg.folder, self.history, self.shared, self.peers.process)
        self.peers.check(self.folder.prepare)
        self._serving = threading.Lock()
        self.served: dict[str, LocalSet] = {}
        """The sets that this process owns, by their ids."""
        self.members = Members(self.peers, self.folder.machine, self._offered)
        self.peers.check(lambda: self.members.demand_replicas(cfg.replicas, cfg.jump))
        for local_set in self.folder.adopt(self.members.has_other_owner()):
            self.serve(local_set)
        self.failures = 0
        """Failed saves in a row."""
        self._shards: dict[int, Shards] = {}
        self.need = 0
        """Bytes of a set of this process, replicas included; known after `begin`."""

    def _stored_history(self) -> RunHistory:
        """The history that process 0 reads. Raises UserError on all processes if it can't be read."""
        stored = [RunHistory("")]

        def read() -> None:
            stored[0] = RunHistory.read(self.shared)

        self.peers.check(read if self.peers.first else lambda: None)
        run, attempts = self.peers.broadcast(stored[0])
        return RunHistory(run, tuple((name, first) for name, first in attempts))

    def _offered(self, set_id: str) -> LocalSet | None:
        with self._serving:
            return self.served.get(set_id)

    def serve(self, local_set: LocalSet) -> None:
        """Lets other processes read a set."""
        with self._serving:
            self.served[local_set.index.info.id] = local_set

    def drop(self, local_set: LocalSet) -> None:
        """Deletes a set."""
        with self._serving:
            self.served.pop(local_set.index.info.id, None)
        self.folder.delete(local_set.path)

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
            if not self.history.includes(local_set.index.info.attempt, local_set.index.info.step):
                self.drop(local_set)
        leaves = arrays.flatten(state)
        self._shards = shards_of_processes(leaves)
        own_shards = self._shards[self.members.process]
        missing = frozenset().union(*(self._shards[source] for source in self._sources())) - own_shards
        self.need = byte_count(own_shards | missing, leaves)
        needs = self.peers.gather((self.members.process, self.need))
        machine_need = sum(size for process, size in needs if process in self.members.on_this_machine())
        self.peers.check(lambda: self.folder.demand_space((self.cfg.keep + 1) * machine_need, self.cfg.keep + 1))

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
        self._saves += 1
        save = _Save(
            step,
            f"{self.attempt}-{self._saves}",
            dict(meta or {}),
            self.peers.namespace(f"local{self._saves}"),
            copy_to_host(arrays.flatten(state)),
            started,
        )
        self._submit(step, self._finish, save, time.monotonic() - started)

    def _finish(self, save: _Save, blocking: float) -> SaveReport:
        """The background part of a save."""
        path = self.folder.process_folder / f"{step_name(save.step)}.{self.attempt}{self._saves:04x}.saving"
        failure, size = None, 0
        with self._during(save.step):
            try:
                size = self._write(save, path)
            except PartFailed as error:
                failure = str(error)
                with self._serving:
                    self.served.pop(set_id(save.name, self.members.process), None)
                shutil.rmtree(path, ignore_errors=True)
        return SaveReport(save.step, blocking, time.monotonic() - save.started, size, failure)

    def _write(self, save: _Save, path: Path) -> int:
        def on_all[T](work: Callable[[], T]) -> T:
            return save.peers.on_all(work, lambda error: background_saves.reason(error, path, self.need))

        writer = on_all(lambda: self._write_own(save, path))
        on_all(lambda: self._write_replicas(save, writer))
        finished_set = on_all(lambda: writer.finish(self._info(save, writer)))
        self.serve(on_all(lambda: writer.rename(finished_set, self.folder.process_folder / step_name(save.step))))
        for local_set in self._superseded():
            self.drop(local_set)
        return writer.bytes

    def _write_own(self, save: _Save, path: Path) -> SetWriter:
        disk.demand_space(self.folder.process_folder, self.need)
        writer = SetWriter(path)
        while save.copies:
            writer.append(OWN_FILE, save.copies.pop(0))  # and release it
        self.serve(writer.snapshot(self._info(save, writer)))
        return writer

    def _write_replicas(self, save: _Save, writer: SetWriter) -> None:
        """Reads the replicas that this process keeps from other processes, except for shards that it has itself."""
        for source in self._sources():
            missing = self._shards[source] - writer.pieces.keys()
            if not missing:
                continue
            with self.members.read_from(source, set_id(save.name, source)) as remote:
                for shard in sorted(missing):
                    name, shape, dtype, box, *_ = piece = remote.index.pieces[shard]
                    writer.append(REPLICAS_FILE, HostCopy(name, shape, dtype, box, as_bytes(remote.read(piece))))

    def _info(self, save: _Save, writer: SetWriter) -> SetInfo:
        return SetInfo(
            step=save.step,
            save=save.name,
            process=self.members.process,
            attempt=self.attempt,
            processes=self.peers.count,
            parts=complete_parts(frozenset(writer.pieces), self._shards),
            meta=save.meta,
        )

    def _superseded(self) -> list[LocalSet]:
        """The sets of all but the newest `keep` steps."""
        steps = sorted({local_set.index.info.step for local_set in self.served.values()})[-self.cfg.keep :]
        return [local_set for local_set in list(self.served.values()) if local_set.index.info.step not in steps]

    def wait(self) -> None:
        """Waits for the save in progress; `poll` returns its report."""
        ended = len(self._reports)
        super().wait()
        for report in self._reports[ended:]:
            self.failures = 0 if report.failure is None else self.failures + 1

    def save_alone(self, step: int, state: Tree, meta: Mapping[str, Any]) -> tuple[int, ...]:
        """Saves the shards of this process after others were lost -> the processes whose shards it has.

        The next start of the run restores the step if the survivors have all shards. Raises CheckpointError.
        """
        leaves = arrays.flatten(state)
        shards = shards_of_processes(leaves)
        copies = copy_to_host(leaves)
        info = SetInfo(
            step=step,
            save=f"{self.attempt}-alone-{step}",
            process=self.members.process,
            attempt=self.attempt,
            processes=self.peers.count,
            parts=complete_parts(frozenset((copy.name, copy.box) for copy in copies), shards),
            meta=dict(meta),
        )
        path = self.folder.process_folder / f"{step_name(step)}.{self.attempt}.saving"
        try:
            writer = SetWriter(path)
            for copy in copies:
                writer.append(OWN_FILE, copy)
            writer.rename(writer.finish(info), self.folder.process_folder / step_name(step))
        except OSError as error:
            raise CheckpointError(step, background_saves.reason(error, path, self.need)) from error
        return info.parts

    def clear(self) -> None:
        """Deletes all sets of this run, when the shared folder has the same step or a later one."""
        self.wait()
        for local_set in list(self.served.values()):
            self.drop(local_set)
        self.folder.remove()

    def _release(self) -> None:
        self._background.shutdown()
        self.members.close()


def _yield_to_training() -> None:
    """Lowers the priority of this thread, where the system allows it."""
    try:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICE)
    except (OSError, AttributeError):
        say("local checkpoints are written at the priority of training: this system can't lower it")
