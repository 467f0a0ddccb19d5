"""Saves in the background: their stages, their reports, and why one failed, in one line with the bytes needed and free.

The base of both managers, of the shared folder and of local sets. All processes do a stage before the next begins.
"""

import errno
import os
import re
import time
from collections.abc import Callable
from concurrent import futures
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Self

from megajax.checkpoint.step_folders import step_name
from megajax.config.errors import UserError
from megajax.display.text import byte_size
from megajax.processes.peers import PartFailed, Peers
from megajax.storage import disk
from megajax.storage.stores import StoreError
from megajax.storage.write_errors import FULL, error_number, remedy

MAX_REASON_LENGTH = 500


class CheckpointError(UserError):
    """A checkpoint was not saved; older ones are unchanged. A retry may succeed."""

    code = 1

    def __init__(self, step: int, reason: str):
        super().__init__(f"checkpoint step {step} not saved: {reason}")
        self.step, self.reason = step, reason


def reason(error: BaseException, path: Path, needed: int) -> str:
    """The innermost cause on one line, without the long messages of Orbax and TensorStore.

    path: the unfinished folder of the step. needed: bytes of the whole step.
    """
    while not isinstance(error, StoreError) and (inner := error.__cause__ or error.__context__) is not None:
        error = inner
    if isinstance(error, StoreError):
        return str(error)
    text = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
    number, file = error_number(error, text), _file_of_error(error, text)
    if number is None:
        text = text.replace(str(path), path.name)[:MAX_REASON_LENGTH]
        return text if str(path.parent) in text else f"{text} ({path.parent})"
    if number in FULL and (free := disk.free_bytes(path.parent)) is not None:
        available = byte_size(free + _disk_usage(path))
        line = f"{path.parent} needs {byte_size(needed)}, {available} are free ({os.strerror(number)})"
        return line if number == errno.ENOSPC else f"{line}; {remedy(number)}"
    advice = f"; {remedy(number)}" if remedy(number) else ""
    # The unfinished folder is deleted; the names of its files say nothing.
    place = path.parent if file is None or Path(file).is_relative_to(path) else file
    return f"{place}: {os.strerror(number)}{advice}"


def _file_of_error(error: BaseException, text: str) -> str | None:
    """The file that an error is about."""
    if isinstance(error, OSError) and error.filename:
        return str(error.filename)
    match = re.search(r"""["'](/[^"']+)["']""", text)
    return match[1] if match else None


def _disk_usage(path: Path) -> int:
    """Bytes that an unfinished step occupies, which removing it frees."""
    total = 0
    for root, _, names in os.walk(path):
        for name in names:
            try:
                total += os.lstat(os.path.join(root, name)).st_blocks * 512
            except OSError:
                continue
    return total


class SaveReport(NamedTuple):
    """A save that has ended."""

    step: int
    blocking_seconds: float = 0.0
    """How long `save` took, including waiting for an earlier save."""
    total_seconds: float = 0.0
    """Time from the call to the commit, including hashing."""
    bytes: int = 0
    """Size of all files of the step (0 on processes other than 0); of a local save, of this process's set."""
    failure: str | None = None
    """Why a local save was not committed. A failed save to the shared folder raises CheckpointError instead."""


type Background = Callable[[int], AbstractContextManager[Any]]
"""Step -> context manager that is entered while the step is written in the background, for watchdogs."""


@dataclass(slots=True)
class BackgroundSave:
    """A save in progress."""

    step: int
    name: str
    """Unique in the run."""
    path: Path
    """The folder that is renamed when all is written."""
    meta: Any
    bytes: int
    """Size of what is written, for messages."""
    content: Any
    """What the background thread writes."""
    peers: Peers
    """All processes, for this save alone."""
    started: float


@dataclass
class PendingSave:
    """The last save, until its result is read."""

    step: int | None = None
    result: futures.Future[SaveReport] | None = None


class BackgroundSaves:
    """One save at a time, in a background thread. Use it as a context manager, or call `close`."""

    expected_errors: type[Exception] = Exception
    """Errors of `_write` that make a save a failed one; others are raised as they are."""

    def __init__(self, thread: str, peers: Peers, watched: Background, initializer: Callable[[], None] | None = None):
        """thread: its name. watched: context manager of a save. initializer: called in the thread before the first."""
        self._peers, self._watched = peers, watched
        self._background = futures.ThreadPoolExecutor(1, thread, initializer=initializer)
        self._pending = PendingSave()
        self._reports: list[SaveReport] = []
        self._saves = 0
        """Saves that were begun."""

    def _new_save(self, step: int, folder: Path, meta: Any, size: int, started: float) -> BackgroundSave:
        self._saves += 1
        token, number, peers = self._peers.token, self._saves, self._peers.namespace(f"save{self._saves}")
        path = folder / f"{step_name(step)}.{token}{number:04x}.saving"
        return BackgroundSave(step, f"{token}-{number}", path, meta, size, None, peers, started)

    def _submit(self, save: BackgroundSave, *, asynchronous: bool = True) -> None:
        blocking = time.monotonic() - save.started if asynchronous else None
        self._pending.step = save.step
        self._pending.result = self._background.submit(self._finish, save, blocking)

    def _finish(self, save: BackgroundSave, blocking: float | None) -> SaveReport:
        """The background part of a save; runs in a thread of every process. blocking: None: all of it."""
        with self._watched(save.step):
            try:
                size = self._write(save)
            except self.expected_errors as error:
                raise self._failed(save, error) from error
        total = time.monotonic() - save.started
        return SaveReport(save.step, total if blocking is None else blocking, total, size)

    def _write(self, save: BackgroundSave) -> int:
        """Writes and commits a save, a stage at a time with `_on_all` -> bytes."""
        raise NotImplementedError

    def _discard(self, save: BackgroundSave) -> None:
        """Deletes the files of a failed save."""
        raise NotImplementedError

    def _on_all[T](self, save: BackgroundSave, work: Callable[[], T]) -> T:
        """A stage: calls `work` on all processes. Raises PartFailed on all of them if it failed on any."""
        return save.peers.on_all(work, lambda error: reason(error, save.path, save.bytes))

    def _failed(self, save: BackgroundSave, error: Exception) -> CheckpointError:
        self._discard(save)
        text = str(error) if isinstance(error, PartFailed) else reason(error, save.path, save.bytes)
        return CheckpointError(save.step, text)

    @property
    def saving(self) -> int | None:
        """The last step passed to `save`."""
        return self._pending.step

    def poll(self) -> list[SaveReport]:
        """The saves that ended since the last call, without waiting. Raises CheckpointError if one failed."""
        if self._pending.result is not None and self._pending.result.done():
            self.wait()
        reports, self._reports = self._reports, []
        return reports

    def wait(self) -> None:
        """Waits for the save in progress. Raises CheckpointError if it failed; `poll` returns its report."""
        finished, self._pending.result = self._pending.result, None
        if finished is not None:
            futures.wait([finished])
            self._reports.append(finished.result())

    def close(self) -> None:
        """Waits for the last save and releases what the manager holds. Raises CheckpointError if the save failed."""
        try:
            self.wait()
        finally:
            self._release()

    def _release(self) -> None:
        """Called by `close`, whether the last save succeeded or not."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if error is None:
            self.close()
            return
        try:
            self.close()
        except CheckpointError as failed:  # the first error is the one to raise; this one goes into its notes
            error.add_note(str(failed))
