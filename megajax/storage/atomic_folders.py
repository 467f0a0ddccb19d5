"""Atomic creation of folders: written under a temporary name, flushed, renamed."""

import contextlib
import fcntl
import glob
import os
import secrets
import shutil
import sys
import time
from collections.abc import Generator, Iterable
from contextlib import contextmanager
from pathlib import Path

from megajax.config.errors import UserError
from megajax.storage.disk import demand_space, flush_folder, flush_to_disk
from megajax.storage.write_errors import write_fault

LOCK = ".lock"
"""The file in such a folder that its writer holds a lock on."""


def hold(folder: Path) -> int:
    """Locks a new folder -> a descriptor. Closing it, or the end of the process, releases the lock. Raises OSError."""
    new = folder / f"{LOCK}.new"
    descriptor = os.open(new, os.O_RDWR | os.O_CREAT, 0o644)
    with contextlib.suppress(OSError):  # a file system without locks
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    new.rename(folder / LOCK)  # only now, so that nobody finds it without its lock
    return descriptor


def delete_abandoned(folders: Iterable[Path]) -> list[Path]:
    """Deletes the folders whose writers are dead -> those whose writers are alive. Prints a line for each of the rest.

    A folder is deleted only if its lock can be acquired, so never on file systems without locks.
    """
    alive = []
    for folder in sorted(folders):
        if folder.is_symlink() or not folder.is_dir():
            continue
        try:
            descriptor = os.open(folder / LOCK, os.O_RDWR)
        except OSError:
            _print(f"left {folder} alone: it has no lock, so its process may be alive; if it is not, delete the folder")
            continue
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            delete_folder(folder)
            _print(f"deleted {folder}, left by a killed process")
        except BlockingIOError:
            alive.append(folder)
        except OSError as error:
            _print(f"left {folder} alone ({error.strerror}): if no process writes it, delete it")
        finally:
            os.close(descriptor)
    return alive


def delete_folder(folder: Path, tries: int = 20) -> None:
    """Deletes a folder. Tries more than once, because a library may still write a file in the background."""
    for _ in range(tries):
        shutil.rmtree(folder, ignore_errors=True)
        if not folder.exists():
            return
        time.sleep(0.1)


def _print(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


SUFFIX = ".converting"
"""End of the temporary name."""


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
    for other in delete_abandoned(target.parent.glob(f"{glob.escape(target.name)}.*{SUFFIX}")):
        raise UserError(f"another process is writing {target} as {other.name}: wait for it, or name another folder")
    folder, lock = target.with_name(f"{target.name}.{secrets.token_hex(4)}{SUFFIX}"), -1
    try:
        folder.mkdir(parents=True)
        lock = hold(folder)
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
        raise UserError(f"{target} can't be written: {write_fault(error)}. Nothing is left.") from error
    finally:
        delete_folder(folder)
        if lock >= 0:
            os.close(lock)
