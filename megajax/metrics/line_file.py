"""Files of lines that survive a full disk: lines that cannot be written wait for the next one."""

import errno
import os
import sys
import threading
from collections import deque
from collections.abc import Callable
from pathlib import Path

from megajax.config.errors import UserError

MOST_WAITING = 1_000_000
"""Lines that wait at most: hundreds of MB."""


class LinesLost(UserError):
    """Lines that still could not be written when the file was closed."""

    code = 1


class LineFile:
    """Appends whole lines to a file, from any thread.

    What the system takes of a line only in part is removed again; if another process has appended to it since, the
    line is repeated as a whole after a newline, and readers skip the torn one.
    """

    def __init__(self, path: Path, say: Callable[[str], None] | None = None):
        self._path, self._say = path, say or _to_stderr
        self._descriptor = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
        self._waiting: deque[bytes] = deque(maxlen=MOST_WAITING)
        self._lock = threading.Lock()
        self._torn = bool(line_break(self._descriptor))
        self._failure: OSError | None = None

    def write(self, line: str) -> None:
        """Write a line, after those that wait; if that fails, it waits too. line: ends with a newline."""
        with self._lock:
            self._waiting.append(line.encode())
            self._write_waiting()

    def close(self) -> None:
        """Raises LinesLost if lines are left that can't be written."""
        with self._lock:
            if self._waiting:
                self._write_waiting()
            os.close(self._descriptor)
            if self._waiting and self._failure is not None:
                raise LinesLost(
                    f"{self._path}: the last {len(self._waiting):,} lines could not be written: "
                    f"{self._failure.strerror}"
                )

    def _write_waiting(self) -> None:
        try:
            while self._waiting:
                data = b"\n" * self._torn + self._waiting[0]
                written = os.write(self._descriptor, data)
                if written == len(data):
                    self._waiting.popleft()
                    self._torn = False
                else:
                    self._torn = True
                    self._torn = not self._take_back(data[:written])
                    # Written again at once it would be torn again: the last block may have room for a part of it.
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as error:
            if self._failure is None:
                self._say(f"{self._path} can't be written: {error.strerror}; its lines wait in memory")
            self._failure = error
        else:
            if self._failure is not None:
                self._say(f"{self._path} is written again; no line was lost")
            self._failure = None

    def _take_back(self, data: bytes) -> bool:
        """Remove the end of the file, if that is `data`."""
        start = os.fstat(self._descriptor).st_size - len(data)
        ours = bool(data) and start >= 0 and os.pread(self._descriptor, len(data), start) == data
        if ours:
            os.ftruncate(self._descriptor, start)
        return ours


def line_break(descriptor: int) -> str:
    """A newline, if the file ends within a line: its writer was killed, or the disk was full."""
    size = os.fstat(descriptor).st_size
    return "\n" if size and os.pread(descriptor, 1, size - 1) != b"\n" else ""


def _to_stderr(message: str) -> None:
    print(f"megajax: {message}", file=sys.stderr, flush=True)
