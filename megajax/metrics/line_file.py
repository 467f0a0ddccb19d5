"""Files of lines that survive a full disk: lines that cannot be written are kept and retried with the next line."""

import contextlib
import errno
import os
import threading
from collections import deque
from collections.abc import Callable, Generator
from pathlib import Path

from megajax.config.errors import UserError
from megajax.display.text import say
from megajax.storage.disk import open_regular
from megajax.storage.write_errors import write_fault

MOST_WAITING = 1_000_000
"""Maximum number of lines kept in memory: hundreds of MB."""


class LinesLost(UserError):
    """Lines that still could not be written when the file was closed."""

    code = 1


class FileDeleted(LinesLost):
    """The file was deleted, moved or replaced while it was open: nobody will find its lines."""


@contextlib.contextmanager
def report_lost_lines(code: Callable[[], int]) -> Generator[None]:
    """Around a job: lines lost on a full disk are an error if the job ends with code 0, and else a message.

    code: the exit code of the job, by which a launcher decides about a restart.
    """
    try:
        yield
    except LinesLost as lost:
        if code() == 0:
            raise
        say(str(lost))


class LineFile:
    """Appends whole lines to a file, from any thread.

    A line that the system writes only in part is removed again. If another process has appended to the file since, the
    whole line is repeated after a newline, and readers skip the partial one.
    """

    def __init__(self, path: Path, say: Callable[[str], None] = say):
        self._path, self._say = path, say
        self._descriptor = open_regular(path, append=True)
        self._waiting: deque[bytes] = deque(maxlen=MOST_WAITING)
        self._lock = threading.Lock()
        self._torn = bool(line_break(self._descriptor))
        self._failure: OSError | None = None
        self._reported = False

    def write(self, line: str) -> None:
        """Write the waiting lines and this one, which ends with a newline; if that fails, this line waits too."""
        with self._lock:
            self._waiting.append(line.encode())
            self._write_waiting()

    def demand_path(self) -> None:
        """Raises FileDeleted, once, if the path no longer leads to this file."""
        try:
            deleted = not os.path.samestat(os.fstat(self._descriptor), self._path.stat())
        except OSError as error:  # any other error may pass
            deleted = error.errno in (errno.ENOENT, errno.ENOTDIR, errno.ESTALE)
        if deleted and not self._reported:
            self._reported = True
            raise FileDeleted(
                f"{self._path} was deleted, moved or replaced while the run wrote to it, perhaps with its folder. The "
                "run ends here, and its last lines are lost; the same command starts it from the checkpoints that "
                f"{self._path.parent} still has"
            )

    def close(self) -> None:
        """Raises LinesLost if the waiting lines can't be written, or the file was deleted."""
        with self._lock, contextlib.ExitStack() as stack:
            stack.callback(os.close, self._descriptor)
            if self._waiting:
                self._write_waiting()
            self.demand_path()
            if self._waiting and self._failure is not None:
                raise LinesLost(
                    f"{self._path}: the last {len(self._waiting):,} lines could not be written: "
                    f"{write_fault(self._failure)}"
                )

    def _write_waiting(self) -> None:
        try:
            while self._waiting:
                data = b"\n" * self._torn + self._waiting[0]
                byte_count = os.write(self._descriptor, data)
                if byte_count == len(data):
                    self._waiting.popleft()
                    self._torn = False
                else:
                    self._torn = True
                    self._torn = not self._take_back(data[:byte_count])
                    # An immediate retry would write a part of it again: the last block may have some room.
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as error:
            if self._failure is None:
                self._say(f"{self._path} can't be written ({write_fault(error)}); its lines wait in memory")
            self._failure = error
        else:
            if self._failure is not None:
                self._say(f"{self._path} is written again; no line was lost")
            self._failure = None

    def _take_back(self, data: bytes) -> bool:
        """Remove `data` from the end of the file -> whether it was the end of the file."""
        start = os.fstat(self._descriptor).st_size - len(data)
        at_end = bool(data) and start >= 0 and os.pread(self._descriptor, len(data), start) == data
        if at_end:
            os.ftruncate(self._descriptor, start)
        return at_end


def line_break(descriptor: int) -> str:
    """A newline if the last line of the file is incomplete: its writer was killed, or the disk was full."""
    size = os.fstat(descriptor).st_size
    return "\n" if size and os.pread(descriptor, 1, size - 1) != b"\n" else ""
