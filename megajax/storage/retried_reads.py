"""Reads of data files that may fail: truncated files are reported, transient errors are retried.

Data read during training is not memory-mapped: an access to a page of a truncated file, or to one that the disk cannot
read, kills the process with SIGBUS, without a message. Reads by position cost about as much.
"""

import errno
import os
import resource
import sys
import time
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from megajax.config.errors import UserError

RETRIES = 6
"""Retries of a failed read that has no setting."""
FIRST_WAIT = 0.25
"""Seconds before the first retry; doubled before each further one."""
LONGEST_WAIT = 30.0
TRANSIENT_NAMES = (
    "EIO ESTALE ETIMEDOUT EAGAIN EBUSY EREMOTEIO ENOTCONN ECONNRESET ECONNABORTED ECONNREFUSED EHOSTDOWN EHOSTUNREACH "
    "ENETDOWN ENETRESET ENETUNREACH ESHUTDOWN"
)
TRANSIENT_ERRORS = frozenset(getattr(errno, name) for name in TRANSIENT_NAMES.split() if hasattr(errno, name))
"""Errors of disks and file servers that a retry may not meet; not all systems have all of them."""
PERMANENT_ERRORS = (FileNotFoundError, PermissionError, IsADirectoryError, NotADirectoryError)
"""Errors that only the user can fix."""


class ReadError(UserError):
    """Data that cannot be read now; a later try, or another machine, may succeed."""

    code = 1


class ChangedFile(UserError):
    """A data file whose size has changed since it was opened."""


def is_transient(error: OSError) -> bool:
    """Whether a retry may succeed."""
    return error.errno in TRANSIENT_ERRORS


def describe_error(error: OSError) -> str:
    """File and cause of an error, for messages."""
    code = errno.errorcode.get(error.errno or 0, "")
    text = f"{error.strerror or error} ({code})" if code else str(error)
    return f"{error.filename}: {text}" if error.filename else text


def wait_for(seconds: float) -> None:
    """Wait before a retry."""
    time.sleep(seconds)


def with_retries[T](
    read: Callable[[], T], name: str, retries: int = RETRIES, wait: Callable[[float], None] = wait_for
) -> T:
    """The result of `read`, retried after transient errors, each reported by a line on standard error.

    Args:
        read: called again if it raises a transient OSError.
        name: of the file or row, for messages.
        retries: maximum number of retries.
        wait: waits for a number of seconds before a retry; may raise an error to give up.

    Raises:
        ReadError: the last retry failed, or the error is not transient.
        UserError: no such file, or no permission to read it.
    """
    seconds, tries = FIRST_WAIT, 1
    while True:
        try:
            return read()
        except OSError as error:
            if not is_transient(error):
                kind = UserError if isinstance(error, PERMANENT_ERRORS) else ReadError
                raise kind(f"{name} cannot be read: {describe_error(error)}") from error
            if tries > retries:
                tried = f"in {tries} tries" if retries else "and data.loader.retries=0 allows no retry"
                raise ReadError(
                    f"{name} cannot be read {tried}: {describe_error(error)}. Check the disk or file server; the same "
                    "command goes on from the last checkpoint. data.loader.retries sets the number of tries."
                ) from error
            line = f"{name} cannot be read: {describe_error(error)}; try {tries + 1} of {retries + 1} in {seconds:g} s"
            print(line, file=sys.stderr, flush=True)
        wait(seconds)
        seconds, tries = min(2 * seconds, LONGEST_WAIT), tries + 1


class _Descriptor:
    """A file descriptor that is closed once nothing refers to it, including reads in other threads."""

    def __init__(self, path: Path):
        self.number = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        weakref.finalize(self, os.close, self.number).atexit = False
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        if self.number > soft // 2 and soft < hard:
            # A blend may have thousands of files, and the limit of a shell is often 1024.
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


class ReadFile:
    """A file open for reads by position, from any thread.

    Attributes:
        path: the file.
        size: bytes when it was opened.
    """

    def __init__(self, path: Path):
        self.path = path
        self._open: _Descriptor | None = _Descriptor(path)
        self.size = self.size_now()

    def size_now(self) -> int:
        """Current size of the file in bytes."""
        return os.lseek(self._descriptor().number, 0, os.SEEK_END)  # a third of the time of fstat

    def read(self, parts: Sequence[tuple[int, int]], dtype: np.dtype, name: Callable[[int], str]) -> np.ndarray:
        """Parts of the file, one after another, as values [n] of `dtype`, read-only.

        Args:
            parts: first byte and number of bytes of each.
            dtype: of the values.
            name: number of a part -> its name in messages.

        Raises:
            ChangedFile: the file ends before the end of a part.
            OSError: the disk or file server fails.
        """
        descriptor, pieces = self._descriptor(), []
        try:
            for offset, size in parts:
                piece = os.pread(descriptor.number, size, offset)
                while len(piece) < size:  # the file ends, or the system gives less than 2 GiB at a time
                    more = os.pread(descriptor.number, size - len(piece), offset + len(piece))
                    if not more:
                        raise self.changed(f"{name(len(pieces))} lacks its bytes from {offset + len(piece):,} on")
                    piece += more
                pieces.append(piece)
        except OSError as error:
            if error.errno == errno.ESTALE:
                self._open = None  # the file handle is stale: reopen the file for the next try
            raise OSError(error.errno, f"{name(len(pieces))}: {error.strerror}", str(self.path)) from error
        return np.frombuffer(pieces[0] if len(pieces) == 1 else b"".join(pieces), dtype)

    def changed(self, missing: str) -> ChangedFile:
        """The error for a file whose size has changed."""
        return ChangedFile(
            f"{self.path}: {self.size:,} bytes when the run opened it, {self.size_now():,} now: {missing}. Another "
            "program has truncated or replaced it during the run. Restore the file; the same command goes on from the "
            "last checkpoint."
        )

    def _descriptor(self) -> _Descriptor:
        descriptor = self._open
        if descriptor is None:
            self._open = descriptor = _Descriptor(self.path)
        return descriptor
