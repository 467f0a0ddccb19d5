"""An on-disk cache of arrays, keyed by a description of all inputs.

After a cache miss, one process builds the arrays in a temporary file, which gets its name when it is complete. Other
processes that need the same arrays wait on a lock of the file system, which a process that dies releases. In a folder
without such locks, or with locks of each host, there is one builder per host. All processes map the finished file, so a
host holds it in memory once.

The file ends with a table of contents and its checksum, which are checked whenever the file is opened. The checksum of
the arrays is computed when they are built, and compared by `verify` only.
"""

import errno
import fcntl
import hashlib
import json
import mmap
import os
import re
import struct
import tempfile
import uuid
import warnings
import zlib
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager, suppress
from math import inf
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from megajax.config.errors import UserError
from megajax.storage.cache_limit import delete_oldest, hold, limit_bytes
from megajax.storage.retried_reads import with_retries
from megajax.storage.write_errors import write_fault

MAGIC = b"MEGAJAX ARRAYS 2\n"
SUFFIX = ".arrays"
ALIGNMENT = 64
TAIL = struct.Struct("<32sQ")
"""SHA-256 and first byte of the table of contents; the last bytes of a file."""
PART = 1 << 24
"""Bytes that are verified at a time."""
CONTENTS_BYTES = 1 << 28
"""Maximum size of a table of contents."""
NO_LOCKS = frozenset({errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP})
"""Errors of file systems without locks."""

type Arrays = dict[str, np.ndarray]
type NewArray = Callable[[tuple[int, ...] | int, Any], np.ndarray]
"""(shape, dtype) -> zeros to fill, in a file or in memory."""


class CachedArrays(dict[str, np.ndarray]):
    """Arrays by name.

    Attributes:
        files: the file that they are mapped from; () if they are in memory.
    """

    files: tuple[Path, ...] = ()


class _CannotStore(Exception):
    """The cache cannot be written."""


def user_cache() -> Path:
    """$XDG_CACHE_HOME/megajax, or ~/.cache/megajax."""
    base = os.environ.get("XDG_CACHE_HOME") or Path("~/.cache").expanduser()
    return Path(base) / "megajax"


def index_folder(cache_dir: str | None) -> Path:
    """The folder `data.cache_dir` for index files, or the user's."""
    return Path(cache_dir) if cache_dir else user_cache() / "indices"


def _is_limited(path: Path) -> bool:
    """Whether a file is in the user's cache folder, and not in one that a setting names."""
    try:
        return path.is_relative_to(user_cache())
    except RuntimeError:  # nobody knows this user's home
        return False


def content_key(description: Mapping[str, object]) -> str:
    """SHA-256 of a description as canonical JSON."""
    return hashlib.sha256(json.dumps(description, sort_keys=True).encode()).hexdigest()


def load_or_build(
    folder: Path, description: Mapping[str, object], build: Callable[[NewArray], Mapping[str, np.ndarray]]
) -> CachedArrays:
    """The arrays that `build` computes, from the cache if it has a file for this description. Read-only.

    A file that is incomplete, or has another description, is replaced. If the folder is not writable, the arrays are
    kept in memory, with a warning. After a new file, old ones beyond the limit of the user's cache are deleted
    (`storage.cache_limit`).

    Args:
        folder: folder of cache files; created if missing.
        description: all inputs of the arrays, as JSON values.
        build: computes the arrays. Large ones are filled where its argument has allocated them, in the file.
    """
    path = folder / f"{content_key({'format': MAGIC.decode(), 'arrays': description})[:40]}{SUFFIX}"
    limit = limit_bytes() if _is_limited(path) else inf
    if (cached := _read(path, description)) is not None:
        return cached
    try:
        with _sole_builder(path) as temporary:
            if (cached := _read(path, description)) is not None:
                return cached  # another process has built it
            if path.exists():
                fault = "damaged" if os.access(path, os.R_OK) else "not readable by this user"
                warnings.warn(f"{path}: {fault}: built again.", stacklevel=2)
            _write(temporary, description, build)
            with _storing():
                with suppress(FileNotFoundError):  # another host has built it, and deleted this one
                    temporary.replace(path)
                if (cached := _read(path, description)) is not None:
                    if limit < inf:
                        delete_oldest(folder, f"*{SUFFIX}", limit)
                    return cached
                raise OSError(errno.EIO, f"{path.name} is not what was written")
    except _CannotStore as error:
        warnings.warn(
            f"index cache {folder} cannot be written ({error}): indices are kept in memory and built again "
            "at the next start. Set data.cache_dir to a writable folder.",
            stacklevel=1,  # one warning for all arrays
        )
    return CachedArrays(build(np.zeros))


def content_digest(folder: Path, path: Path, check: Callable[[], None] | None = None) -> bytes:
    """SHA-256 of the content of a file, computed once and kept in the cache until the file changes.

    A change is noticed by inode, size and dates.

    Args:
        folder: folder of cache files.
        path: the file.
        check: called once with the checksum, to check the content.

    Raises:
        UserError: there is no such file, or no permission to read it. ReadError: the disk or file server fails.
    """
    facts = with_retries(lambda: os.stat(path), str(path))
    version = [facts.st_dev, facts.st_ino, facts.st_size, facts.st_mtime_ns, facts.st_ctime_ns]

    def digest() -> bytes:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").digest()

    def build(_: NewArray) -> Arrays:
        content = with_retries(digest, str(path))
        if check is not None:
            check()
        return {"sha256": np.frombuffer(content, np.uint8)}

    description = {"kind": "file", "path": str(path.resolve()), "version": version}
    return load_or_build(folder, description, build)["sha256"].tobytes()


@contextmanager
def _storing() -> Generator[None]:
    """Raises _CannotStore for an OSError in the block."""
    try:
        yield
    except OSError as error:
        raise _CannotStore(write_fault(error)) from error


@contextmanager
def _sole_builder(path: Path) -> Generator[Path]:
    """The name of a temporary file for `path`, once no other process builds it; removed unless it has been renamed.

    The lock is another file. A lock may hold on this host alone, as on NFS with `nolock` or Lustre with `localflock`,
    and two hosts that write one memory-mapped file would kill each other. What a killed process has left, the next one
    of its host deletes, and whoever completes the file.

    Raises:
        _CannotStore: the folder cannot be written.
    """
    host = re.sub(r"[^\w.-]", "_", os.uname().nodename)
    temporary = path.with_name(f"{path.name}.{host}-{uuid.uuid4().hex[:8]}.tmp")
    lock, descriptor = path.with_name(f"{path.name}.lock"), None
    try:
        with _storing():
            try:
                descriptor = _lock(lock)
            except OSError as error:
                if error.errno not in NO_LOCKS:
                    raise
                lock.unlink(missing_ok=True)
                host_folder = Path(tempfile.gettempdir()) / f"megajax-{os.getuid()}"
                host_folder.mkdir(mode=0o700, exist_ok=True)
                lock = host_folder / lock.name  # one builder per host
                descriptor = _lock(lock)
            _delete(path.parent.glob(f"{path.name}.{host}-*.tmp"))
        yield temporary
        _delete(path.parent.glob(f"{path.name}.*.tmp"))
    finally:
        _delete([temporary])
        if descriptor is not None:
            if _is_open_as(lock, descriptor):
                _delete([lock])
            fcntl.flock(descriptor, fcntl.LOCK_UN)
            os.close(descriptor)


def _delete(paths: Iterable[Path]) -> None:
    """Deletes files, if they exist and may be deleted."""
    for path in paths:
        with suppress(OSError):
            path.unlink()


def _lock(path: Path) -> int:
    """Waits for the lock of a file, which is created if missing -> its descriptor. Raises OSError."""
    while True:
        path.parent.mkdir(parents=True, exist_ok=True)  # may be deleted while this process waits
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            if _is_open_as(path, descriptor):
                return descriptor
        except OSError:
            os.close(descriptor)
            raise
        os.close(descriptor)  # removed while this process waited


def _is_open_as(path: Path, descriptor: int) -> bool:
    """Whether the file of a descriptor has this name."""
    try:
        return os.path.samestat(os.stat(path), os.fstat(descriptor))
    except OSError:
        return False


class _Space:
    """Allocates arrays in a file, one after another."""

    def __init__(self, file: BinaryIO):
        self._file, self.end = file, len(MAGIC)
        self._arrays: dict[int, tuple[np.ndarray, int]] = {}

    def new(self, shape: tuple[int, ...] | int, dtype: np.dtype | type) -> np.ndarray:
        """Zeros in the file. Raises _CannotStore, for example if the disk is full."""
        dtype, shape = np.dtype(dtype), (shape,) if isinstance(shape, int) else shape
        count = int(np.prod(shape, dtype=np.int64))
        start = self.end + -self.end % ALIGNMENT
        self.end = start + count * dtype.itemsize
        if not count:
            values = np.zeros(shape, dtype)
        else:
            page = start - start % mmap.ALLOCATIONGRANULARITY
            with _storing():
                # Without space on the disk, a write to the map would kill the process.
                os.posix_fallocate(self._file.fileno(), start, self.end - start)
                buffer = mmap.mmap(self._file.fileno(), self.end - page, offset=page)
            values = np.frombuffer(buffer, dtype, count, start - page).reshape(shape)
        self._arrays[id(values)] = values, start
        return values

    def start_of(self, values: np.ndarray) -> int:
        """First byte of an array in the file; an array from elsewhere is appended."""
        if id(values) not in self._arrays:
            stored = self.new(values.shape, values.dtype)
            stored[...] = values
            values = stored
        return self._arrays[id(values)][1]


def _write(
    path: Path, description: Mapping[str, object], build: Callable[[NewArray], Mapping[str, np.ndarray]]
) -> None:
    """Raises _CannotStore; errors of `build` pass through."""
    with _storing():
        file = path.open("w+b", buffering=0)
    with file:
        space = _Space(file)
        arrays = build(space.new)
        table = {name: [values.dtype.str, values.shape, space.start_of(values)] for name, values in arrays.items()}
        with _storing():
            _write_all(file, MAGIC)
            file.truncate(space.end)
            file.seek(0)
            digest = hashlib.file_digest(file, "sha256").hexdigest()
            facts = {"description": description, "arrays": table, "sha256": digest}
            contents = json.dumps(facts, sort_keys=True).encode()
            _write_all(file, contents + TAIL.pack(hashlib.sha256(contents).digest(), space.end))
            os.fsync(file.fileno())


def _write_all(file: BinaryIO, data: bytes) -> None:
    """Writes to an unbuffered file, whose writes stop at a full disk or at a limit without an error. Raises OSError."""
    while data:
        data = data[file.write(data) :]


@contextmanager
def atomic_write(path: Path) -> Generator[BinaryIO]:
    """A file that gets its name when the block ends without an error, so it never appears incomplete."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f"{path.name}.{os.getpid()}-{uuid.uuid4().hex[:8]}.tmp")
    try:
        with temporary.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def checked_line(values: Sequence[Any]) -> bytes:
    """JSON values as a line with a CRC-32 of them, without its end, for a file that processes append to."""
    text = json.dumps(values)
    return f"{text[:-1]}, {zlib.crc32(text.encode())}]".encode()


def checked_values(line: bytes) -> list[Any] | None:
    """The values of a `checked_line`; None for a line that was cut off or damaged."""
    try:
        *values, _ = json.loads(line)
    except (ValueError, TypeError, RecursionError):
        return None
    return values if checked_line(values) == line else None


def _map(path: Path) -> mmap.mmap | None:
    """A file, memory-mapped; None if there is none, or an empty one."""
    try:
        with path.open("rb") as file:
            if _is_limited(path):
                hold(file)
                if not _is_open_as(path, file.fileno()):
                    return None  # deleted by another process meanwhile
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except (OSError, ValueError):
        return None


def _contents(buffer: mmap.mmap) -> tuple[dict[str, Any], int] | None:
    """The table of contents and its first byte; None if it is damaged."""
    tail = len(buffer) - TAIL.size
    if tail < len(MAGIC) or buffer[: len(MAGIC)] != MAGIC:
        return None
    digest, start = TAIL.unpack_from(buffer, tail)
    if not tail - CONTENTS_BYTES <= start <= tail:
        return None
    text = buffer[start:tail]
    return (json.loads(text), start) if hashlib.sha256(text).digest() == digest else None


def _read(path: Path, description: Mapping[str, object]) -> CachedArrays | None:
    """The arrays of a complete and matching file, memory-mapped; None if there is none."""
    buffer = _map(path)
    parts = None if buffer is None else _contents(buffer)
    if buffer is None or parts is None or content_key(parts[0]["description"]) != content_key(description):
        return None
    arrays = CachedArrays()
    arrays.files = (path,)
    for name, (dtype, shape, start) in parts[0]["arrays"].items():
        count = int(np.prod(shape, dtype=np.int64))
        arrays[name] = np.frombuffer(buffer, dtype, count, start).reshape(shape)
    return arrays


def verify(path: Path) -> None:
    """Compares the arrays of a file with the checksum from when they were built. Raises UserError if they differ."""
    buffer, digest = _map(path), hashlib.sha256()
    parts = None if buffer is None else _contents(buffer)
    if parts is not None:
        with path.open("rb", buffering=0) as file:
            remaining = parts[1]
            while data := file.read(min(remaining, PART)):
                digest.update(data)
                remaining -= len(data)
    if parts is None or digest.hexdigest() != parts[0]["sha256"]:
        raise UserError(f"{path}: damaged since it was built. Delete it: the next start builds it again.")
