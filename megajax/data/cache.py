"""An on-disk cache of arrays, keyed by a description of all inputs.

After a cache miss, a process builds the arrays, writes them with a checksum under a temporary name, and renames the
file. Several hosts may build the same file at once: the contents are equal, so the order of the renames does not
matter. No barrier and no shared file system is needed.
"""

import hashlib
import json
import mmap
import os
import uuid
import warnings
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

import numpy as np

from megajax.write_errors import write_fault

MAGIC = b"MEGAJAX ARRAYS 1\n"
ALIGNMENT = 64
DIGEST_BYTES = 32

type Arrays = dict[str, np.ndarray]


def user_cache() -> Path:
    """$XDG_CACHE_HOME/megajax, or ~/.cache/megajax."""
    base = os.environ.get("XDG_CACHE_HOME") or Path("~/.cache").expanduser()
    return Path(base) / "megajax"


def index_folder(cache_dir: str | None) -> Path:
    """The folder `data.cache_dir` for index files, or the user's."""
    return Path(cache_dir) if cache_dir else user_cache() / "indices"


def content_key(description: Mapping[str, object]) -> str:
    """SHA-256 of a description as canonical JSON."""
    return hashlib.sha256(json.dumps(description, sort_keys=True).encode()).hexdigest()


def load_or_build(folder: Path, description: Mapping[str, object], build: Callable[[], Arrays]) -> Arrays:
    """The arrays that `build` computes, from the cache if it has an intact file for this description.

    A damaged file, or one with another description, is replaced. If the folder is not writable, the arrays are kept in
    memory, with a warning.

    Args:
        folder: folder of cache files; created if missing.
        description: all inputs of the arrays, as JSON values.
        build: computes the arrays.
    """
    path = folder / f"{content_key(description)[:40]}.arrays"
    cached = _read(path, description)
    if cached is not None:
        return cached
    if path.exists():
        warnings.warn(f"{path}: damaged, or not of this version: built again.", stacklevel=2)
    arrays = build()
    try:
        _write(path, description, arrays)
    except OSError as error:
        warnings.warn(
            f"index cache {folder} cannot be written ({write_fault(error)}): indices are kept in memory "
            "and built again at the next start. Set data.cache_dir to a writable folder.",
            stacklevel=2,
        )
    return arrays


def _write(path: Path, description: Mapping[str, object], arrays: Arrays) -> None:
    head = {"description": description, "arrays": {k: [a.dtype.str, a.shape] for k, a in arrays.items()}}
    digest = hashlib.sha256()
    with atomic_write(path) as file:

        def write(data: bytes | memoryview) -> None:
            digest.update(data)
            file.write(data)

        write(MAGIC + json.dumps(head, sort_keys=True).encode() + b"\n")
        for _, values in sorted(arrays.items()):  # in the order of the keys of `head`
            write(bytes(-file.tell() % ALIGNMENT))
            write(np.ascontiguousarray(values).reshape(values.size).view(np.uint8).data)
        file.write(digest.digest())


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


def _read(path: Path, description: Mapping[str, object]) -> Arrays | None:
    """Arrays of an intact and matching file, memory-mapped; None if there is none."""
    try:
        with path.open("rb") as file:
            buffer = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except (OSError, ValueError):
        return None
    end = len(buffer) - DIGEST_BYTES
    if end < len(MAGIC) or buffer[: len(MAGIC)] != MAGIC:
        return None
    view = memoryview(buffer)
    if hashlib.sha256(view[:end]).digest() != view[end:]:
        return None
    position = buffer.find(b"\n", len(MAGIC)) + 1
    head = json.loads(buffer[len(MAGIC) : position])
    if content_key(head["description"]) != content_key(description):
        return None
    arrays: Arrays = {}
    for name, (dtype, shape) in head["arrays"].items():
        position += -position % ALIGNMENT
        count = int(np.prod(shape, dtype=np.int64))
        arrays[name] = np.frombuffer(buffer, dtype, count, position).reshape(shape)
        position += count * np.dtype(dtype).itemsize
    return arrays
