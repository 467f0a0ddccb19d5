"""Reads of data files that may fail: what was cut short is named, what may pass is tried again.

Memory maps are not used for what is read while a run trains: a page of a file that was cut, or that the disk cannot
give, ends the process with SIGBUS, which no program can turn into a message. Reads by position cost about as much.
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
"""Times that a failed read is tried again, for what has no setting."""
FIRST_WAIT = 0.25
"""Seconds before a failed read is tried again; twice as long before each further try."""
LONGEST_WAIT = 30.0
PASSING = frozenset(
    {
        errno.EIO,
        errno.ESTALE,
        errno.ETIMEDOUT,
        errno.EAGAIN,
        errno.EBUSY,
        errno.EREMOTEIO,
        errno.ENOTCONN,
        errno.ECONNRESET,
        errno.ECONNABORTED,
        errno.ECONNREFUSED,
        errno.EHOSTDOWN,
        errno.EHOSTUNREACH,
        errno.ENETDOWN,
        errno.ENETRESET,
        errno.ENETUNREACH,
        errno.ESHUTDOWN,
    }
)
"""Errors of disks and file servers that another try may not meet."""
LASTING = (FileNotFoundError, PermissionError, IsADirectoryError, NotADirectoryError)
"""Errors that are the user's to correct."""


class ReadError(UserError):
    """Data that cannot be read here and now; another try, or another machine, may."""

    code = 1


class ChangedFile(UserError):
    """A data file that has not the size any more that it had when it was opened."""


def passing(error: OSError) -> bool:
    """Whether another try may succeed."""
    return error.errno in PASSING


def named(error: OSError) -> str:
    """File and cause of an error in a few words."""
    code = errno.errorcode.get(error.errno or 0, "")
    text = f"{error.strerror or error} ({code})" if code else str(error)
    return f"{error.filename}: {text}" if error.filename else text


def wait_for(seconds: float) -> None:
    """Wait before the next try."""
    time.sleep(seconds)


def retried[T](read: Callable[[], T], what: str, retries: int = RETRIES, wait: Callable[[float], None] = wait_for) -> T:
    """What `read` returns, tried again after errors that may pass; a line on standard error for each.

    Args:
        read: may raise OSError, and then be called again.
        what: what is read, in messages.
        retries: how often it is tried again.
        wait: waits so many seconds before the next try; may raise an error to give up.

    Raises:
        ReadError: the last try failed as well, or the error is none that passes.
        UserError: no such file, or no permission to read it.
    """
    seconds, tries = FIRST_WAIT, 1
    while True:
        try:
            return read()
        except OSError as error:
            if not passing(error):
                kind = UserError if isinstance(error, LASTING) else ReadError
                raise kind(f"{what} cannot be read: {named(error)}") from error
            if tries > retries:
                tried = f"in {tries} tries" if retries else "and data.loader.retries=0 asks for no further try"
                raise ReadError(
                    f"{what} cannot be read {tried}: {named(error)}. Look after the disk or file server; the same "
                    "command goes on from the last checkpoint. data.loader.retries sets the number of tries."
                ) from error
            line = f"{what} cannot be read: {named(error)}; try {tries + 1} of {retries + 1} in {seconds:g} s"
            print(line, file=sys.stderr, flush=True)
        wait(seconds)
        seconds, tries = min(2 * seconds, LONGEST_WAIT), tries + 1


class _Descriptor:
    """A file descriptor that is closed when nothing refers to it, not even a read in another thread."""

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
        size: its bytes when it was opened.
    """

    def __init__(self, path: Path):
        self.path = path
        self._open: _Descriptor | None = _Descriptor(path)
        self.size = self.size_now()

    def size_now(self) -> int:
        """Its bytes at this moment."""
        return os.lseek(self._descriptor().number, 0, os.SEEK_END)  # a third of the time of fstat

    def read(self, parts: Sequence[tuple[int, int]], dtype: np.dtype, what: Callable[[int], str]) -> np.ndarray:
        """Parts of the file, one after another, as values [n] of `dtype`, read-only.

        Args:
            parts: first byte and number of bytes of each.
            dtype: of the values.
            what: number of a part -> its name in messages.

        Raises:
            ChangedFile: the file ends before the end of a part.
            OSError: the disk or file server fails.
        """
        descriptor, pieces, number = self._descriptor(), [], 0
        try:
            for number, (offset, size) in enumerate(parts):
                piece = os.pread(descriptor.number, size, offset)
                while len(piece) < size:  # the file ends, or the system gives less than 2 GiB at a time
                    more = os.pread(descriptor.number, size - len(piece), offset + len(piece))
                    if not more:
                        raise self.changed(f"{what(number)} is not whole (its bytes from {offset + len(piece):,} on)")
                    piece += more
                pieces.append(piece)
        except OSError as error:
            if error.errno == errno.ESTALE:
                self._open = None  # the server has the file under another handle now: the next try opens it again
            raise OSError(error.errno, f"{what(number)}: {error.strerror}", str(self.path)) from error
        return np.frombuffer(pieces[0] if len(pieces) == 1 else b"".join(pieces), dtype)

    def changed(self, missing: str) -> ChangedFile:
        """The error for a file of another size than before."""
        return ChangedFile(
            f"{self.path}: {self.size:,} bytes when the run opened it, {self.size_now():,} now: {missing}. Another "
            "program has cut or replaced it under the run. Restore the file; the same command goes on from the last "
            "checkpoint."
        )

    def _descriptor(self) -> _Descriptor:
        descriptor = self._open
        if descriptor is None:
            self._open = descriptor = _Descriptor(self.path)
        return descriptor
