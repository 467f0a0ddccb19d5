"""Reads of files by name from a folder of a file system or a store: the same functions for either."""

import os
import stat
from abc import ABC, abstractmethod
from functools import singledispatch
from pathlib import Path

import numpy as np

from megajax.config.read_limits import Budget, Limits, read_file
from megajax.storage.stores import Store


class ServedFolder(ABC):
    """A folder that another process serves."""

    name: str

    @abstractmethod
    def read(self, name: str, start: int = 0, stop: int | None = None) -> bytes:
        """A range of a file. Raises ConnectionError, ValueError for a shorter file."""


type Folder = Path | Store | ServedFolder


@singledispatch
def read_small(folder: Folder, name: str, limits: Limits) -> bytes:
    """A whole file. Raises OSError, OverBudget, and StoreError for a store that fails."""
    raise TypeError(type(folder).__name__)


@read_small.register
def _(folder: Path, name: str, limits: Limits) -> bytes:
    return read_file(folder / name, limits)


@read_small.register
def _(folder: Store | ServedFolder, name: str, limits: Limits) -> bytes:
    content = folder.read(name)
    Budget(f"{folder}/{name}", limits).spend(bytes=len(content))
    return content


@singledispatch
def read_into(folder: Folder, name: str, target: np.ndarray, start: int) -> int:
    """Reads bytes from `start` on until the target is full or the file ends -> their number. Raises as `read_small`."""
    raise TypeError(type(folder).__name__)


@read_into.register
def _(folder: Path, name: str, target: np.ndarray, start: int) -> int:
    view, count = memoryview(target), 0
    with open(folder / name, "rb", buffering=0) as file:
        while count < len(view) and (size := os.preadv(file.fileno(), [view[count:]], start + count)):
            count += size
    return count


@read_into.register
def _(folder: Store | ServedFolder, name: str, target: np.ndarray, start: int) -> int:
    if not target.size:
        return 0
    try:
        content = folder.read(name, start, start + target.size)
    except ValueError:  # the object is shorter
        return 0
    target[:] = np.frombuffer(content, np.uint8)
    return target.size


@singledispatch
def size_fault(folder: Folder, name: str, size: int) -> str | None:
    """Why a file is missing or has another size, or None. Raises StoreError for a store that fails."""
    raise TypeError(type(folder).__name__)


@size_fault.register
def _(folder: Path, name: str, size: int) -> str | None:
    try:
        status = (folder / name).stat()
    except OSError as error:
        return str(error.strerror)
    if not stat.S_ISREG(status.st_mode):  # a pipe would be waited for, a device read without end
        return "not a file"
    return None if status.st_size == size else f"{status.st_size} bytes, the manifest says {size}"


@size_fault.register
def _(folder: Store, name: str, size: int) -> str | None:
    return folder.wrong_size(name, size)
