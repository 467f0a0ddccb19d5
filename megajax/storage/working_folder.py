"""Folders with temporary names: a lock tells those that a killed process left from those of a living one."""

import contextlib
import fcntl
import os
import shutil
import sys
import time
from collections.abc import Iterable
from pathlib import Path

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
