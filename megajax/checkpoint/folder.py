"""What lies in a checkpoints folder: names that tell committed steps from the rest, and the lock of its one writer.

00000100/                    a committed step; only a rename brings this name into being
00000200.5f0c9a1e.saving/    being written by the attempt 5f0c9a1e; removed when the next writer takes the lock
00000050.deleting/           on its way out: first it loses its name, then its files
00000150.damaged/            failed verification; kept for the curious, never counted
00000400.abandoned/          later than the step a run was told to go back to
lock                         held by the writing run, released by the kernel when its process 0 dies
"""

import errno
import fcntl
import os
import re
import shutil
import socket
import time
from pathlib import Path

from megajax.checkpoint.integrity import flush_to_disk
from megajax.config.errors import UserError

STEP = re.compile(r"\d{8,}")
ARRAYS = "arrays"
"""Name of the folder of a step that Orbax writes and reads."""
META = "meta.json"
"""Name of the file of a step with everything that is not an array."""
LOCK_PATIENCE_SECONDS = 10.0
_NO_LOCKS_HERE = (errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS)


def step_name(step: int) -> str:
    """The folder of a step: its number in eight digits or more."""
    return f"{step:08d}"


def steps_in(folder: Path) -> list[int]:
    """Numbers of the committed steps, ascending. Order is by number; clocks have no say."""
    try:
        found = [entry.name for entry in os.scandir(folder) if STEP.fullmatch(entry.name) and entry.is_dir()]
    except FileNotFoundError:
        return []
    return sorted(int(name) for name in found)


def locate(path: Path | str) -> tuple[Path, int | None]:
    """The checkpoints folder that a run folder, a checkpoints folder or one step in it stands for, and that step.

    Raises UserError if nothing is there.
    """
    path = Path(path).absolute()
    if STEP.fullmatch(path.name) and (path.is_dir() or path.parent.is_dir()):
        return path.parent, int(path.name)
    if not path.is_dir():
        why = "it is a file, not a folder" if path.exists() else "it does not exist"
        raise UserError(f"there are no checkpoints in {path}: {why}.")
    inner = path / "checkpoints"
    return inner if inner.is_dir() else path, None


def damaged_in(folder: Path) -> list[str]:
    """Names of the steps that were set aside as damaged."""
    return sorted(path.name for path in folder.glob("*.damaged*")) if folder.is_dir() else []


def set_aside(folder: Path, step: int, word: str) -> Path:
    """Renames a committed step to NAME.word (or NAME.word2, ... where that is taken)."""
    source = folder / step_name(step)
    target, number = source.with_name(f"{source.name}.{word}"), 1
    while target.exists():
        number += 1
        target = source.with_name(f"{source.name}.{word}{number}")
    source.rename(target)
    flush_to_disk(folder)
    return target


def delete_step(folder: Path, step: int) -> None:
    """Takes the step's name away first, then its files: a death in between leaves nothing that looks committed."""
    shutil.rmtree(set_aside(folder, step, "deleting"))


def remove_remains(folder: Path) -> list[str]:
    """Removes what dead attempts left unfinished; the caller holds the lock, so that nobody is still at it."""
    remains = [path for path in folder.iterdir() if re.fullmatch(r"\d{8,}\.([0-9a-f]+\.saving|deleting\d*)", path.name)]
    for path in remains:
        shutil.rmtree(path, ignore_errors=True)
    return sorted(path.name for path in remains)


class WriterLock:
    """The right to change a checkpoints folder: one run at a time.

    A POSIX record lock: it works over NFS, a killed process loses it at once, children don't inherit it, and
    the same process may take it twice (a notebook that sets a run up again). On file systems without locks there
    is none, and two runs in one folder are the user's affair.
    """

    def __init__(self, folder: Path):
        """Makes the folder, takes the lock and tries a write. Raises UserError if any of these can't be done."""
        self._descriptor: int | None = None
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._descriptor = os.open(folder / "lock", os.O_RDWR | os.O_CREAT, 0o644)
            self._take(folder, self._descriptor)
            # Also a probe: a full or read-only disk shows before the first step and not at the first save.
            os.ftruncate(self._descriptor, 0)
            os.pwrite(self._descriptor, f"{socket.gethostname()} pid {os.getpid()}\n".encode().ljust(4096), 0)
            os.fsync(self._descriptor)
            probe = folder / "lock.probe"
            probe.mkdir(exist_ok=True)
            probe.rmdir()
        except OSError as error:
            self.release()
            raise UserError(
                f"checkpoints can't be written to {folder}: {error.strerror}.\n"
                "Make the folder writable, free space, or choose another run_dir."
            ) from error

    def _take(self, folder: Path, descriptor: int) -> None:
        deadline = time.monotonic() + LOCK_PATIENCE_SECONDS
        while True:
            try:
                fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except OSError as error:
                if error.errno in _NO_LOCKS_HERE:
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
