"""Saves in the background, their reports, and why one failed: in one line, with the bytes needed and free on disk."""

import errno
import os
import re
from collections.abc import Callable
from concurrent import futures
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Self

from megajax.config.errors import UserError
from megajax.display.text import byte_size
from megajax.storage import disk
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
    while (inner := error.__cause__ or error.__context__) is not None:
        error = inner
    text = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
    number, file = error_number(error, text), _file_of_error(error, text)
    if number is None:
        return f"{text[:MAX_REASON_LENGTH]} ({path.parent})"
    if number in FULL and (free := disk.free_bytes(path.parent)) is not None:
        available = byte_size(free + _disk_usage(path))
        line = f"{path.parent} needs {byte_size(needed)}, {available} are free ({os.strerror(number)})"
        return line if number == errno.ENOSPC else f"{line}; {remedy(number)}"
    advice = f"; {remedy(number)}" if remedy(number) else ""
    return f"{file or path.parent}: {os.strerror(number)}{advice}"


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
    blocking_seconds: float
    """How long `save` took, including waiting for an earlier save."""
    total_seconds: float
    """Time from the call to the commit, including hashing."""
    bytes: int
    """Size of all files of the step (0 on processes other than 0); of a local save, of this process's set."""
    failure: str | None = None
    """Why a local save was not committed. A failed save to the shared folder raises CheckpointError instead."""


type Background = Callable[[int], AbstractContextManager[Any]]
"""Step -> context manager that is entered while the step is written in the background, for watchdogs."""


@dataclass
class PendingSave:
    """The last save, until its result is read."""

    step: int | None = None
    result: futures.Future[SaveReport] | None = None


class BackgroundSaves:
    """One save at a time, in a background thread; the base of both managers, which are context managers."""

    def __init__(self, thread: str, initializer: Callable[[], None] | None = None):
        """thread: its name. initializer: called in the thread before the first save."""
        self._background = futures.ThreadPoolExecutor(1, thread, initializer=initializer)
        self._pending = PendingSave()
        self._reports: list[SaveReport] = []
        self._saves = 0
        """Saves that were begun."""

    def _submit[**P](self, step: int, work: Callable[P, SaveReport], *args: P.args, **kwargs: P.kwargs) -> None:
        self._pending.step, self._pending.result = step, self._background.submit(work, *args, **kwargs)

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

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        if error is None:
            self.close()
            return
        try:
            self.close()
        except CheckpointError as failed:  # the first error is the one to raise; this one goes into its notes
            error.add_note(str(failed))
