"""Output streams that never fail: text that cannot be written is dropped, and the run continues.

`python -m megajax.train ... | head`, a terminal that is closed under `nohup`, a full disk behind `> log`, or a program
started without standard streams should not stop training, because its results are in files.
"""

import errno
import io
import os
import sys
import threading
from contextlib import suppress
from typing import Any

CLOSED_STREAM_ERRORS = (errno.EPIPE, errno.EIO, errno.EBADF)
"""Errors of a stream without a reader; others, such as a full disk, may be temporary."""
NAMES = ("standard input", "standard output", "standard error")


class LastingOutput(io.RawIOBase):
    """Writes to a descriptor. Bytes that cannot be written are dropped, with one line about the reason.

    Args:
        descriptor: file descriptor; stays open. Once its reader is gone, it is replaced by /dev/null.
        fallback: descriptor of the stream that gets one line about the first error.
    """

    def __init__(self, descriptor: int, fallback: int):
        super().__init__()
        self._descriptor, self._fallback, self._reported = descriptor, fallback, False

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._descriptor

    def isatty(self) -> bool:
        return os.isatty(self._descriptor)

    def write(self, data: Any, /) -> int:
        try:
            return os.write(self._descriptor, data)
        except OSError as error:
            self._report(error)
            if error.errno in CLOSED_STREAM_ERRORS:
                discard_output(self._descriptor)
            return len(data)

    def _report(self, error: OSError) -> None:
        if self._reported:
            return
        self._reported = True
        name = NAMES[self._descriptor] if self._descriptor < len(NAMES) else f"descriptor {self._descriptor}"
        line = f"megajax: {name}: {error.strerror}; output that cannot be written is dropped, and the run goes on\n"
        try:
            os.write(self._fallback, line.encode())
        except OSError:
            return


def to_stderr(text: str) -> None:
    """Write to the descriptor of the standard error, if it is open. Raises OSError."""
    # Not through sys.stderr: a thread that hangs may hold its lock.
    if (descriptor := stderr_descriptor()) is not None:
        os.write(descriptor, text.encode())


def stderr_descriptor() -> int | None:
    """Descriptor of the standard error; None if it is closed."""
    try:
        return 2 if sys.__stderr__ is None else sys.__stderr__.fileno()
    except (OSError, ValueError):
        return None


def discard_output(descriptor: int) -> None:
    """Replaces a descriptor by /dev/null."""
    null = os.open(os.devnull, os.O_WRONLY)
    if null != descriptor:
        os.dup2(null, descriptor)
        os.close(null)


def keep_writing() -> None:
    """Makes `sys.stdout` and `sys.stderr` ignore errors of writing.

    Streams that were closed when the program started are opened on /dev/null, because otherwise files would get their
    descriptors.
    """
    for descriptor in range(len(NAMES)):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # gets the lowest free number
    for name, descriptor, fallback in (("stdout", 1, 2), ("stderr", 2, 1)):
        setattr(sys, name, _lasting(getattr(sys, name), LastingOutput(descriptor, fallback)))


def _lasting(before: Any, output: LastingOutput) -> io.TextIOWrapper:
    """A stream to the output with the properties of an earlier one, or of the standard ones."""
    if before is not None:
        before.flush()
    return io.TextIOWrapper(
        io.BufferedWriter(output),
        encoding=getattr(before, "encoding", "utf-8"),
        errors=getattr(before, "errors", "backslashreplace"),
        line_buffering=getattr(before, "line_buffering", True),
        write_through=getattr(before, "write_through", False),
    )


def drop_lines(beginning: bytes) -> None:
    """From now on, drops lines that compiled code writes to the standard output and that begin so.

    `sys.stdout` writes to a copy of the descriptor. Lines of others pass through a pipe: at a crash they may be lost.
    """
    output, (read, write) = os.dup(1), os.pipe()
    sys.stdout = _lasting(sys.stdout, LastingOutput(output, 2))
    os.dup2(write, 1)
    os.close(write)

    def forward() -> None:
        with open(read, "rb") as lines, suppress(OSError):
            for line in lines:
                if not line.startswith(beginning):
                    os.write(output, line)

    threading.Thread(target=forward, name="lines of compiled code", daemon=True).start()
