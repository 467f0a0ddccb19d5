"""Folders that are complete or not there: written under a temporary name, flushed, renamed."""

import errno
import os
import secrets
import shutil
import time
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from megajax.checkpoint.failures import FULL
from megajax.checkpoint.integrity import files_below, flush_to_disk
from megajax.config.errors import UserError

_FULL = (*FULL, errno.EFBIG)


@contextmanager
def new_folder(target: Path, needed: int = 0) -> Generator[Path]:
    """A folder beside `target` that gets its name if the block ends without an error, and is deleted otherwise.

    A process that is killed leaves NAME.TOKEN.converting. needed: bytes that will be written. Raises UserError if
    `target` exists, if there is no space for it, or if it can't be written.
    """
    target = target.absolute()
    if target.exists() or target.is_symlink():
        raise UserError(f"{target} exists already: name another folder, or move it away")
    folder = target.with_name(f"{target.name}.{secrets.token_hex(4)}.converting")
    try:
        folder.mkdir(parents=True)
        if (free := shutil.disk_usage(folder).free) < needed:
            raise OSError(errno.ENOSPC, f"{needed / 1e9:.3g} GB are needed, and {free / 1e9:.3g} GB are free")
        yield folder
        flush_folder(folder)
        if target.exists():
            raise UserError(f"{target} was made by somebody else meanwhile")
        folder.rename(target)
        flush_to_disk(target.parent)
    except OSError as error:
        full = error.errno in _FULL or "no space" in str(error).lower() or "too large" in str(error).lower()
        advice = "free space or name a folder on another disk" if full else "check the folder and its permissions"
        raise UserError(f"{target} can't be written: {error.strerror or error}; {advice}. Nothing is left.") from error
    finally:
        delete_folder(folder)


def delete_folder(folder: Path, tries: int = 20) -> None:
    """Tries more than once: a library may still write a file in the background."""
    for _ in range(tries):
        shutil.rmtree(folder, ignore_errors=True)
        if not folder.exists():
            return
        time.sleep(0.1)


def flush_folder(folder: Path) -> None:
    """fsync of all files and folders below."""
    for name in files_below(folder):
        flush_to_disk(folder / name)
    for root, _, _ in os.walk(folder):
        flush_to_disk(Path(root))
