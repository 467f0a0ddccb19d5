"""Atomic creation of folders: written under a temporary name, flushed, renamed."""

import glob
import os
import secrets
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from megajax.config.errors import UserError
from megajax.storage.disk import demand_space, flush_folder, flush_to_disk
from megajax.storage.working_folder import LOCK, delete_abandoned, delete_folder, hold
from megajax.storage.write_errors import write_fault

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
