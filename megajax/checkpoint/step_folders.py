"""The checkpoints folder: the names of committed and other steps, and the writer's lock.

00000100/                    a committed step; its folder gets this name by a rename only
00000200.5f0c9a1e.saving/    being written by the attempt 5f0c9a1e; removed when the next writer takes the lock
00000050.deleting/           being deleted: renamed first, then removed
00000150.damaged/            failed verification; kept for inspection, never loaded
00000400.abandoned/          later than the step that a run was told to go back to
lock                         locked by the writing run; the kernel releases it when process 0 dies
lock.probe.3/                trial write of process 3 at the start of a run
store.json                   with checkpoint.store, instead of the others: its URL, and the steps committed there
"""

import contextlib
import errno
import fcntl
import json
import os
import re
import socket
import time
from collections.abc import Container
from itertools import count
from pathlib import Path
from typing import NamedTuple

from megajax.config.errors import UserError
from megajax.config.paths_and_store_urls import store_url
from megajax.config.read_limits import read_json
from megajax.storage import disk
from megajax.storage.write_errors import write_fault

STEP = re.compile(r"\d{8,}")
ARRAYS = "arrays"
"""Name of the folder of a step that Orbax writes and reads."""
COMMITTED_AT = f"{ARRAYS}/_CHECKPOINT_METADATA"
"""The file with the commit time, as Orbax writes it, which copying preserves, unlike a file's date."""
META = "meta.json"
"""Name of the file of a step that holds everything but the arrays."""
STORE = "store.json"
LOCK_TIMEOUT_SECONDS = 10.0
_LOCKS_UNSUPPORTED = (errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS)


def step_name(step: int) -> str:
    """Folder name of a step: its number with at least eight digits."""
    return f"{step:08d}"


class StoreRecord(NamedTuple):
    """Content of store.json."""

    url: str
    """Of the checkpoints in the store."""
    steps: tuple[int, ...] = ()
    """Steps that were committed when it was written, for programs that only report."""

    def write(self, folder: Path) -> None:
        """Creates the folder, and writes the file."""
        folder.mkdir(parents=True, exist_ok=True)
        disk.write_whole(folder / STORE, json.dumps(self._asdict()).encode())


def recorded_store(folder: Path) -> StoreRecord | None:
    """The object store that has the steps of this folder, or None. Raises UserError for a damaged file."""
    try:
        document = read_json(folder / STORE)
        record = StoreRecord(document["url"], tuple(map(int, document["steps"])))
        if store_url(record.url) is None:
            raise ValueError(f"{record.url!r:.80} is no URL of a store")
    except (FileNotFoundError, NotADirectoryError, PermissionError):
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{folder / STORE}, which says where the checkpoints are, can't be read: {error}") from error
    return record


def steps_in(folder: Path) -> list[int]:
    """Numbers of the committed steps, ascending. File dates are not used."""
    if (record := recorded_store(folder)) is not None:
        return sorted(record.steps)
    try:
        return sorted(int(entry.name) for entry in os.scandir(folder) if STEP.fullmatch(entry.name) and entry.is_dir())
    except FileNotFoundError:
        return []


def name_aside(step: int, suffix: str, names: Container[str]) -> str:
    """The name of a committed step that is set aside: NAME.suffix, or NAME.suffix2, ... if `names` has it."""
    name = f"{step_name(step)}.{suffix}"
    return next(free for number in count(1) if (free := f"{name}{number if number > 1 else ''}") not in names)


def remove_unfinished(folder: Path) -> list[str]:
    """Removes the unfinished folders of dead attempts. The caller holds the lock, so nobody is writing them."""
    pattern = re.compile(r"\d{8,}\.([0-9a-f]+\.saving|deleting\d*)")
    unfinished = [path for path in folder.iterdir() if pattern.fullmatch(path.name)]
    for path in unfinished:
        with contextlib.suppress(OSError):  # the next start tries again
            disk.remove(path)
    return sorted(path.name for path in unfinished)


def probe(folder: Path, process: int) -> None:
    """Raises UserError if a process can't write here, so that a run fails at its start and not at its first save."""
    try:
        disk.probe(folder / f"lock.probe.{process}")
    except OSError as error:
        raise _unwritable(folder, error) from error


def _unwritable(folder: Path, error: OSError) -> UserError:
    return UserError(f"checkpoints can't be written to {folder}: {write_fault(error)}.\nThe folder is below run_dir.")


class WriterLock:
    """Exclusive write access to a checkpoints folder.

    A POSIX record lock: it works over NFS, is released when the process dies, and is not inherited by children. The
    same process may acquire it twice (a notebook that sets up a run again). File systems without locks are not
    protected.
    """

    def __init__(self, folder: Path):
        """Creates the folder, acquires the lock and calls `probe`. Raises UserError if one of them fails."""
        self._descriptor: int | None = None
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._descriptor = os.open(folder / "lock", os.O_RDWR | os.O_CREAT, 0o644)
            self._acquire(folder, self._descriptor)
            os.ftruncate(self._descriptor, 0)
            os.pwrite(self._descriptor, f"{socket.gethostname()} pid {os.getpid()}\n".encode(), 0)
        except OSError as error:
            self.release()
            raise _unwritable(folder, error) from error
        try:
            probe(folder, 0)
        except UserError:
            self.release()
            raise

    def _acquire(self, folder: Path, descriptor: int) -> None:
        deadline = time.monotonic() + LOCK_TIMEOUT_SECONDS
        while True:
            try:
                fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except OSError as error:
                if error.errno in _LOCKS_UNSUPPORTED:
                    return
                if error.errno not in (errno.EACCES, errno.EAGAIN):
                    raise
            if time.monotonic() > deadline:
                holder = os.pread(descriptor, 4096, 0).decode(errors="replace").strip() or "another process"
                self.release()
                raise UserError(
                    f"{folder} is being written by {holder}.\n"
                    "Wait for that run to end, or give this one a run_dir of its own."
                )
            time.sleep(0.2)

    def release(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None
