"""Durable writes, deletion, and the space of a disk."""

import errno
import os
import shutil
import stat
import threading
from pathlib import Path

from megajax.display.text import byte_size


def free_bytes(folder: Path) -> int | None:
    """Bytes that this process can still write to the file system of `folder`; None: unknown."""
    try:
        stat = os.statvfs(folder)
    except OSError:
        return None
    if stat.f_blocks == 0:  # a file system without a size
        return None
    return stat.f_frsize * (stat.f_bfree if os.geteuid() == 0 else stat.f_bavail)


def demand_space(folder: Path, needed: int) -> None:
    """Raises OSError if fewer bytes than `needed` are free; does nothing if the free space is unknown."""
    free = free_bytes(folder)
    if free is not None and free < needed:
        sizes = f"{byte_size(needed)} are needed, {byte_size(free)} are free"
        raise OSError(errno.ENOSPC, f"{os.strerror(errno.ENOSPC)}: {sizes}", str(folder))


def probe(folder: Path) -> None:
    """Writes a file into a new folder and deletes both. Raises OSError if that fails."""
    try:
        folder.mkdir(exist_ok=True)
        with open(folder / "written", "wb") as file:
            file.write(bytes(4096))
            file.flush()
            os.fsync(file.fileno())
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def open_regular(path: Path, *, append: bool = False) -> int:
    """The descriptor of a file to read, or to read and append to, which is created if it is missing.

    Raises OSError, also for a pipe or a device, which could be waited for.
    """
    flags = os.O_RDWR | os.O_APPEND | os.O_CREAT if append else os.O_RDONLY
    descriptor = os.open(path, flags | os.O_CLOEXEC | os.O_NONBLOCK, 0o644)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    return descriptor


def remove(path: Path) -> None:
    """Removes a folder and all in it, a file, or a link, but nothing that a link leads to. Raises OSError."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()


def flush_to_disk(path: Path) -> None:
    """fsync of a file, or of a folder, which makes the entries of the folder durable."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def flush_folder(folder: Path) -> None:
    """fsync of all files and folders below."""
    for root, _, names in os.walk(folder):
        for path in (*(Path(root) / name for name in names), Path(root)):
            flush_to_disk(path)


def files_below(folder: Path) -> list[str]:
    """Sorted paths of all files below a folder, relative to it."""
    return sorted(
        (Path(root) / name).relative_to(folder).as_posix() for root, _, names in os.walk(folder) for name in names
    )


def write_whole(path: Path, content: bytes) -> None:
    """Writes a file that others may write and read at the same time: they see the whole of one of them."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{threading.get_ident()}")
    temporary.write_bytes(content)
    temporary.replace(path)


def write_durably(path: Path, content: bytes | str) -> None:
    """Writes a file atomically: after a crash it is complete or does not exist."""
    temporary = path.with_name(path.name + ".writing")
    with open(temporary, "wb") as file:
        file.write(content.encode() if isinstance(content, str) else content)
        file.flush()
        os.fsync(file.fileno())
    temporary.rename(path)
    flush_to_disk(path.parent)
