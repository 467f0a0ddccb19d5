"""Checkpoints of a run: asynchronous saves, with a commit order that survives kill -9 and a power cut.

The stages of a save, each durable before the next begins (checkpoint_writers.py: what each does in a folder or store):
    all processes: their shards
    each process: meta.json (process 0), or what process 0 needs to know about the other's files
    process 0: manifest.json, then the commit
    process 0: old steps are deleted
A step without a valid manifest does not count. The manager calls `ocp.save_async` for each step and not
`ocp.training.Checkpointer`, which commits before a manifest exists, counts damaged steps as kept, and reports failed
background saves only on request.
"""

import json
import os
import sys
import threading
import time
import weakref
from collections.abc import Mapping
from concurrent import futures
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from megajax.checkpoint import array_serialization
from megajax.checkpoint.background_saves import (
    Background,
    BackgroundSave,
    BackgroundSaves,
    CheckpointError,
    PendingSave,
)
from megajax.checkpoint.checkpoint_writers import open_writer
from megajax.checkpoint.committed_steps import locate
from megajax.checkpoint.config import CheckpointConfig
from megajax.checkpoint.reader import CheckpointReader, EventLog, Tree, no_event, open_checkpoints
from megajax.config.errors import UserError
from megajax.display.text import byte_size, say
from megajax.processes.peers import PartFailed, Peers
from megajax.storage.stores import StoreError

LAST_SAVE_TIMEOUT_SECONDS = 5.0


class CheckpointManager(BackgroundSaves, CheckpointReader):
    """The writer of a run's checkpoints folder. Use it as a context manager, or call `close`.

    A program that ends without either waits for its last save and prints its error, if any.

    Damaged steps are renamed to NAME.damaged and kept. The error of a failed background save is raised by the next
    `save`, `poll`, `wait` or `close`; the manager stays usable, and the next save may succeed.
    """

    def __init__(
        self,
        cfg: CheckpointConfig,
        path: Path | str,
        *,
        event: EventLog = no_event,
        background: Background = lambda step: nullcontext(),
    ):
        """Acquires the folder's lock and removes the unfinished steps of dead attempts.

        event: called with checkpoint_damaged, checkpoint_fallback and checkpoint_abandoned, on process 0.
        Raises UserError if the folder can't be written, is being written by another run, or is not shared by all
        processes.
        """
        writer = self._writer = open_writer(cfg.store, Path(path).absolute())
        CheckpointReader.__init__(self, path, event=event, place=writer.place)
        super().__init__("megajax checkpoint", self._peers, background)
        self.cfg = cfg
        weakref.finalize(self, report_failure, self._pending)
        # Not by atexit, whose functions run after the threads that Orbax needs to finish a save have ended.
        threading.__dict__["_register_atexit"](finish_at_exit, weakref.ref(self))  # not in threading's public API
        self._source: tuple[CheckpointReader, int | None] | None = None
        """The reader of checkpoint.load, and the step that it names."""
        try:
            writer.open(self._peers)
        except UserError:
            self._release()
            raise

    def start(self) -> tuple[CheckpointReader, int] | None:
        """The start of this run: the checkpoints to read (this manager, or the reader of `load`) and the step.

        None if no checkpoint was requested and this folder never had one: the run starts from scratch. A run that
        resumes from a step of this manager calls `go_back` before it saves. Raises UserError if the requested
        checkpoint is missing or damaged.
        """
        has_checkpoints = self._peers.of_first(lambda: bool(self.steps() or self.place.damaged()))
        if (load := self.cfg.state_source()) is not None and not has_checkpoints:
            self._peers.check(lambda: locate(load))
            self._source = self._source or open_checkpoints(load)  # one reader, which knows the steps that it refused
            reader, step = self._source
            step = self.cfg.step if step is None else step
            if step is None and (step := reader.newest_intact()) is None:
                raise UserError(f"there are no checkpoints in checkpoint.load = {load}.")
            reader.demand(step)
            return reader, step
        if self.cfg.load is None and self.cfg.step is not None:
            self.demand(self.cfg.step)
            return self, self.cfg.step
        step = self.newest_intact()
        return None if step is None else (self, step)

    def go_back(self, step: int) -> None:
        """Sets aside the steps after `step`; otherwise a restart of this run would resume from one of them.

        Call it only when the run is certain to resume from `step`.
        """

        def set_aside() -> None:
            for number in self.steps() if self._peers.first else ():
                if number > step:
                    name = self.place.set_aside(number, "abandoned")
                    self._event("checkpoint_abandoned", step=number, back_to=step, kept_as=name)
                    say(f"going back to step {step}: renamed a later checkpoint to {name}")

        self._peers.check(set_aside)

    def newest(self) -> int | None:
        """The committed step with the highest number."""
        return max((step for step in self._writer.committed() if step not in self._refused), default=None)

    def due(self, step: int, total: int) -> bool:
        """Whether to save a checkpoint after `step` of `total` steps."""
        regular = self.cfg.every is not None and step > 0 and step % self.cfg.every == 0
        return regular or (self.cfg.at_end and step == total)

    def save(self, step: int, state: Tree, meta: Mapping[str, Any] | None = None) -> bool:
        """Saves jax.Arrays with any layout, and metadata (JSON-serialisable, no NaN).

        Waits for an earlier save first. Returns when the arrays are copied to host memory, after which they may be
        donated; with asynchronous=False, when the step is committed. Returns False if the step was committed before,
        and writes nothing. Called by all processes. Raises CheckpointError if this or an earlier save failed,
        TypeError or ValueError if the state or the metadata can't be saved.
        """
        started = time.monotonic()
        self.wait()
        if self._peers.broadcast(self._peers.first and step in self._writer.committed() and step not in self._refused):
            return False
        # Not sorted: the config.json of the weights' source keeps its order.
        text = json.dumps({"step": step, "meta": dict(meta or {})}, allow_nan=False, indent=1)
        leaves = array_serialization.flatten(state)
        size = sum(leaf.nbytes for leaf in leaves.values())
        save = self._new_save(step, self.folder, text, size, started)
        try:
            self._on_all(save, lambda: self._writer.begin(save) if self._peers.first else None)
        except PartFailed as error:
            raise self._failed(save, error) from error
        try:
            save.content = self._writer.start_writing(save, leaves)
        except Exception as error:
            # Other processes may have succeeded: the thread reports the error to them, and `wait` raises it here.
            save.content = error
        self._submit(save, asynchronous=self.cfg.asynchronous)
        if isinstance(save.content, Exception) or not self.cfg.asynchronous:
            self.wait()
        return True

    def _discard(self, save: BackgroundSave) -> None:
        if self._peers.first:
            self._writer.discard(save)

    def _write(self, save: BackgroundSave) -> int:
        self._on_all(save, lambda: self._write_arrays(save))
        self._on_all(save, lambda: self._writer.write_part(save))
        size = self._on_all(save, lambda: self._commit(save) if self._peers.first else 0)
        self._writer.finish(save)
        self._verified.add(save.step)
        self._refused.discard(save.step)  # that was set aside
        self._opened = None  # perhaps also of the step that was set aside
        return size

    def _write_arrays(self, save: BackgroundSave) -> None:
        if isinstance(save.content, Exception):
            raise save.content
        self._writer.write_arrays(save)

    def _commit(self, save: BackgroundSave) -> int:
        size = self._writer.commit(save)
        # Before the other processes continue, so that all see the same steps after the save.
        self._delete_old(save.step)
        return size

    def _delete_old(self, committed: int) -> None:
        """Deletes steps beyond keep_last; only after `committed` is, so that an intact step always remains."""
        if self.cfg.keep_last is None:
            return
        for step in self.steps()[: -self.cfg.keep_last]:
            if step != committed and not (self.cfg.keep_every and step % self.cfg.keep_every == 0):
                try:
                    self.place.delete(step)
                except (OSError, StoreError) as error:
                    cause = error.strerror if isinstance(error, OSError) else error
                    say(f"old checkpoint step {step} in {self.place} was not deleted: {cause}")

    def peers_for(self, name: str) -> Peers:
        """All processes of the run, for communication of another thread. The name is used once."""
        return self._peers.namespace(name)

    def space_warning(self, state: Tree) -> str | None:
        """A warning if the disk can't hold the checkpoints of such a state; None if it can, or its size is unknown."""
        size, free = sum(leaf.nbytes for leaf in array_serialization.flatten(state).values()), self._writer.free_bytes()
        if free is None:
            return None
        prefix = f"warning: {self.folder} has {byte_size(free)} free, but"
        if free < size:
            return f"{prefix} a checkpoint of this run needs {byte_size(size)}: saves will fail until space is freed"
        if self.cfg.keep_last is None or self.cfg.keep_every:
            return None
        # The oldest step is deleted after the newest is committed.
        more = max(self.cfg.keep_last + 1 - len(self.steps()), 1)
        if free < more * size:
            needs = f"{byte_size(more * size)} for {more} more checkpoints of {byte_size(size)}"
            return f"{prefix} checkpoint.keep_last={self.cfg.keep_last} needs {needs}"
        return None

    def _release(self) -> None:
        self._writer.release()

    def _set_aside(self, step: int) -> str | None:
        target = self._peers.of_first(lambda: self.place.set_aside(step, "damaged"))
        if self._peers.first:
            say(f"it was renamed to {target}")
        return target


def report_failure(pending: PendingSave) -> None:
    """At the end of the program, or when the manager is deleted: prints the error of a failed last save."""
    if pending.result is not None and pending.result.done() and (error := pending.result.exception()) is not None:
        say(str(error))


def finish_at_exit(reference: weakref.ref[CheckpointManager]) -> None:
    """At the end of a program that did not call `close`: waits for the last save. Exits with code 1 if it failed."""
    manager = reference()
    if manager is None or (result := manager._pending.result) is None or result.done():
        return
    say(f"the program ends without close() of its checkpoint manager: waiting for checkpoint step {manager.saving}")
    # Python 3.12.0 and 3.12.1 can't start threads at exit, so Orbax may wait for minutes for one that never runs.
    futures.wait([result], timeout=None if _threads_start() else LAST_SAVE_TIMEOUT_SECONDS)
    error = result.exception() if result.done() else None
    if error is not None or not result.done():
        advice = "Call close() on the manager, or use it in a with block"
        say(f"{error or CheckpointError(manager.saving or 0, 'the program ended first')}. {advice}")
        sys.stdout.flush()
        os._exit(1)


def _threads_start() -> bool:
    try:
        thread = threading.Thread(target=lambda: None)
        thread.start()
        thread.join()
    except RuntimeError:
        return False
    return True
