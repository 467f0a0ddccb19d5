"""Why a save failed, in one line: the path, and the bytes that are needed and free where a disk is full."""

import errno
import os
import re
from pathlib import Path

from megajax.config.errors import UserError

FULL = (errno.ENOSPC, errno.EDQUOT)
_KNOWN = (*FULL, errno.EFBIG, errno.EACCES, errno.EPERM, errno.EROFS, errno.ESTALE, errno.EIO)
"""Errors of files that are recognised in the messages of libraries, which raise no OSError."""
LONGEST = 500


class CheckpointError(UserError):
    """A checkpoint was not saved; older ones are unchanged. A retry may succeed."""

    code = 1

    def __init__(self, step: int, reason: str):
        super().__init__(f"checkpoint step {step} not saved: {reason}")
        self.step, self.reason = step, reason


class PartFailed(Exception):
    """A part of a save failed in some process; the message is the reason, on one line."""


def byte_size(number: float) -> str:
    """Bytes as "512 B", "1.5 KiB", "12.0 MiB"."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if number < 1023.95:
            return f"{number:.0f} B" if unit == "B" else f"{number:.1f} {unit}"
        number /= 1024
    return f"{number:,.1f} TiB"


def free_bytes(folder: Path) -> int | None:
    """Bytes that this process can still write to the file system of `folder`; None: unknown."""
    try:
        stat = os.statvfs(folder)
    except OSError:
        return None
    if stat.f_blocks == 0:  # a file system without a size
        return None
    return stat.f_frsize * (stat.f_bfree if os.geteuid() == 0 else stat.f_bavail)


def demand_space(folder: Path, needed: int) -> None:
    """Raises OSError if that many bytes certainly do not fit."""
    free = free_bytes(folder)
    if free is not None and free < needed:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(folder))


def reason(error: BaseException, path: Path, needed: int) -> str:
    """The innermost cause on one line, without the long messages of Orbax and TensorStore.

    path: the unfinished folder of the step. needed: bytes of the whole step.
    """
    while (inner := error.__cause__ or error.__context__) is not None:
        error = inner
    text = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
    number, named = _number(error, text), _named(error, text)
    if number is None:
        return f"{text[:LONGEST]} ({path.parent})"
    if number in FULL and (free := free_bytes(path.parent)) is not None:
        available = byte_size(free + _written(path))
        return f"{path.parent} needs {byte_size(needed)}, {available} are free ({os.strerror(number)})"
    return f"{named or path.parent}: {os.strerror(number)}"


def _number(error: BaseException, text: str) -> int | None:
    if isinstance(error, OSError) and error.errno is not None:
        return error.errno
    if match := re.search(r"OS error (\d+)", text):
        return int(match[1])
    return next((number for number in _KNOWN if os.strerror(number).lower() in text.lower()), None)


def _named(error: BaseException, text: str) -> str | None:
    """The file that an error is about."""
    if isinstance(error, OSError) and error.filename:
        return str(error.filename)
    match = re.search(r"""["'](/[^"']+)["']""", text)
    return match[1] if match else None


def _written(path: Path) -> int:
    """Bytes of the unfinished step, which are free again when it is removed."""
    total = 0
    for root, _, names in os.walk(path):
        for name in names:
            try:
                total += os.lstat(os.path.join(root, name)).st_blocks * 512
            except OSError:
                continue
    return total
