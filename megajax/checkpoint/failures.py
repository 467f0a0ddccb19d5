"""Why a save failed, in one line: the path, and the bytes that are needed and free where a disk is full."""

import errno
import os
import re
from pathlib import Path

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
