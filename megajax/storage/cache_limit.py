"""A limit for index files in the user's cache folder: beyond it, those that no run has opened for longest are deleted.

Only there: a folder that a setting names belongs to the user. A process holds a shared lock on each file that it maps,
for as long as it does, so no other process deletes what a run reads. Where the file system has no locks, nothing is
deleted.
"""

import fcntl
import math
import os
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

from megajax.config.errors import UserError

VARIABLE = "MEGAJAX_INDEX_CACHE_GIB"
"""Environment variable with the limit; `inf` for none."""
DEFAULT_GIB = 16.0
GIB = 2**30


def limit_bytes() -> float:
    """The limit. Raises UserError for a value of the variable that is no size."""
    text = os.environ.get(VARIABLE) or str(DEFAULT_GIB)
    try:
        limit = float(text)
    except ValueError:
        limit = math.nan
    if not limit >= 0:
        raise UserError(f"{VARIABLE} must be a number of GiB from 0 on, or inf, got {text!r}")
    return limit * GIB


def hold(file: BinaryIO) -> None:
    """Marks an open file as in use until this process has closed it and all maps of it."""
    with suppress(OSError):  # a file system without locks; nothing is deleted there
        fcntl.flock(file, fcntl.LOCK_SH)
        os.utime(file.fileno())


def delete_oldest(folder: Path, pattern: str, limit: float) -> None:
    """Deletes the files of a folder that were opened longest ago and that no process holds, down to the limit."""
    files = list[tuple[int, Path, int]]()
    for path in folder.glob(pattern):
        with suppress(OSError):  # deleted by another process
            facts = path.stat()
            files.append((facts.st_mtime_ns, path, facts.st_size))
    excess = sum(size for _, _, size in files) - limit
    for _, path, size in sorted(files):
        if excess <= 0:
            return
        with suppress(OSError), path.open("r+b") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # raises if a process holds it
            path.unlink()
            excess -= size
