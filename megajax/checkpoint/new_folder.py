"""Atomic creation of folders: written under a temporary name, flushed, renamed."""

import errno
import fcntl
import glob
import os
import secrets
import sys
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from megajax.checkpoint.disk import FULL, delete_folder, demand_space, flush_folder, flush_to_disk
from megajax.config.errors import UserError

SUFFIX, LOCK = ".converting", ".lock"
"""End of the temporary name; the file in the folder that its writer holds a lock on."""
_FULL = (*FULL, errno.EFBIG)


@contextmanager
def new_folder(target: Path, needed: int = 0) -> Generator[Path]:
    """A folder beside `target` that gets its name if the block ends without an error, and is deleted otherwise.

    A killed process leaves NAME.TOKEN.converting, which the next process with the same target deletes. needed: bytes
    that will be written. Raises UserError if `target` exists or another process is writing it, if there is not enough
    space, or if it can't be written.
    """
    target = target.absolute()
    if target.exists() or target.is_symlink():
        raise UserError(f"{target} exists already: name another folder, or move it away")
    _delete_abandoned(target)
    folder, lock = target.with_name(f"{target.name}.{secrets.token_hex(4)}{SUFFIX}"), -1
    try:
        folder.mkdir(parents=True)
        lock = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT, 0o644)
        _try_lock(lock)
        demand_space(folder, needed)
        yield folder
        flush_folder(folder)
        if target.exists():
            raise UserError(f"{target} was created by another process in the meantime")
        (folder / LOCK).unlink()
        flush_to_disk(folder)
        folder.rename(target)
        flush_to_disk(target.parent)
    except OSError as error:
        full = error.errno in _FULL or "no space" in str(error).lower() or "too large" in str(error).lower()
        advice = "free space or name a folder on another disk" if full else "check the folder and its permissions"
        raise UserError(f"{target} can't be written: {error.strerror or error}; {advice}. Nothing is left.") from error
    finally:
        delete_folder(folder)
        if lock >= 0:
            os.close(lock)


def _delete_abandoned(target: Path) -> None:
    """Deletes folders for `target` whose writer is dead. Raises UserError if a writer is alive.

    A folder is deleted only if its lock can be acquired, so never on file systems without locks.
    """
    for folder in sorted(target.parent.glob(f"{glob.escape(target.name)}.*{SUFFIX}")):
        if folder.is_symlink():
            continue
        try:
            lock = os.open(folder / LOCK, os.O_RDWR)
        except OSError:
            continue  # no lock file: something else created the folder; or no permission
        try:
            if _try_lock(lock):
                delete_folder(folder)
                print(f"deleted {folder}, left by a killed process", file=sys.stderr)
        except BlockingIOError:
            raise UserError(
                f"another process is writing {target} as {folder.name}: wait for it, or name another folder"
            ) from None
        finally:
            os.close(lock)


def _try_lock(descriptor: int) -> bool:
    """Whether the lock was acquired; it ends with the process. Raises BlockingIOError if another process holds it."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise
    except OSError:
        return False
    return True
