"""Checksums of data files: of a cheap sample at every start, and of the full content on request.

Several processes can share the work: a sample is divided by files, the full content into parts, whose hashes are added
up.
"""

import hashlib
import os
from collections.abc import Callable, Generator, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

from megajax.config.errors import UserError
from megajax.config.paths_and_store_urls import store_url
from megajax.storage.retried_reads import with_retries
from megajax.storage.stores import open_object

BLOCK = 1 << 16
"""Bytes of a block of a sample."""
BLOCKS = 64
"""Blocks of the sample of a file, spread evenly from its first to its last byte."""
BLOCKS_OF_ALL = 4096
"""Blocks of the samples of all files together; with many files, a file has fewer than 64, but at least 4."""
LEAST_BLOCKS = 4
SAMPLED_FILES = 1024
"""Maximum number of files to sample. Of more files, such as images in folders, it samples an evenly spread subset."""
PART = 1 << 24
"""Bytes that are hashed at a time for a checksum of the full content."""
THREADS = 16
MODULUS = 1 << 256


@dataclass(frozen=True)
class FileSum:
    """Checksum of a file, or of many files together."""

    path: str
    """The file; for many, their common folder."""
    names: str
    """Name of the file; for many, a hash of their paths in the folder."""
    files: int
    bytes: int
    """Size; for many, of the sampled files."""
    sample: str
    """SHA-256 of the sampled blocks."""
    whole: str | None = None
    """Sum of the SHA-256 of all parts; None: not computed."""

    def difference(self, stored: "FileSum") -> str | None:
        """The first difference in content, as `old -> new`; None for equal content."""
        before = "" if stored.path == self.path else f"in place of {stored.path}, "
        if self.files != stored.files:
            return f"{before}files: {stored.files:,} -> {self.files:,}"
        if self.files > 1 and self.names != stored.names:
            return f"{before}names of its {self.files:,} files: {stored.names[:12]} -> {self.names[:12]}"
        if self.bytes != stored.bytes:
            return f"{before}bytes: {stored.bytes:,} -> {self.bytes:,}"
        if self.sample != stored.sample:
            return f"{before}checksum of a sample of its content: {stored.sample[:12]} -> {self.sample[:12]}"
        if self.whole is not None and stored.whole is not None and self.whole != stored.whole:
            return f"{before}checksum of its whole content: {stored.whole[:12]} -> {self.whole[:12]}"
        return None

    def plain(self) -> dict[str, Any]:
        """The fields as JSON values."""
        return asdict(self)


@dataclass(frozen=True)
class SummedFiles:
    """Files with a common checksum: a single file, or many below a folder."""

    path: str
    files: tuple[str, ...]
    blocks: int
    """Blocks of the sample of a file; a function of the total number of files."""
    block: int = BLOCK
    """Bytes of a block."""
    sampled: int = SAMPLED_FILES
    """Maximum number of files to sample."""

    def names(self) -> str:
        """Name of the file, or a hash of all paths in the folder."""
        if len(self.files) == 1:
            return os.path.basename(self.path)
        inside = (file[len(self.path) :] for file in self.files)
        return hashlib.sha256(os.fsencode("\0".join(inside))).hexdigest()

    def sampled_files(self) -> Sequence[str]:
        """The files to sample: all, or an evenly spread subset."""
        return self.files[:: max(1, -(-len(self.files) // self.sampled))]


def group_files(files: Sequence[str]) -> list[SummedFiles]:
    """A group for each file, or a single group if there are more than `SAMPLED_FILES`."""
    blocks = max(LEAST_BLOCKS, min(BLOCKS, BLOCKS_OF_ALL // max(1, len(files))))
    if len(files) <= SAMPLED_FILES:
        return [SummedFiles(file, (file,), blocks) for file in files]
    try:
        folder = os.path.commonpath(files)
    except ValueError:  # some are in stores
        folder = ""
    return [SummedFiles(folder, tuple(files), blocks, sampled=SAMPLED_FILES)]


def sample_checksums(groups: Sequence[SummedFiles], numbers: Iterable[int] | None = None) -> dict[int, FileSum]:
    """Number of a group -> its checksum, without `whole`. numbers: the groups to read; None: all.

    Raises:
        UserError: a file is missing or cannot be read.
    """
    numbers = list(range(len(groups)) if numbers is None else numbers)
    files = [(number, file) for number in numbers for file in groups[number].sampled_files()]
    digests, sizes = {number: hashlib.sha256() for number in numbers}, dict.fromkeys(numbers, 0)
    with ThreadPoolExecutor(THREADS) as pool:
        samples = pool.map(lambda file: _sample(file[1], groups[file[0]]), files)
        for (number, _), (size, content) in zip(files, samples, strict=True):
            digests[number].update(content)
            sizes[number] += size

    def checksum(number: int) -> FileSum:
        group = groups[number]
        return FileSum(group.path, group.names(), len(group.files), sizes[number], digests[number].hexdigest())

    return {number: checksum(number) for number in numbers}


def _sample(path: str, group: SummedFiles) -> tuple[int, bytes]:
    """(size, SHA-256 of size and blocks) of a file of a group."""
    blocks, length = group.blocks, group.block

    def read() -> tuple[int, bytes]:
        with _opened(path) as (size, part):
            digest = hashlib.sha256(size.to_bytes(8, "little"))
            last = max(0, size - length)
            if size <= blocks * length:
                offsets = range(0, size, length)
            else:
                offsets = [last * block // (blocks - 1) for block in range(blocks)]
            for offset in offsets:
                digest.update(part(offset, length))
            return size, digest.digest()

    return with_retries(read, path)


@contextmanager
def _opened(path: str, known: int | None = None) -> Generator[tuple[int, Callable[[int, int], bytes]]]:
    """The size of a file or an object of a store, and how to read bytes of it: first byte, number of bytes.

    known: the size of an object, which takes requests to find.

    Raises OSError, UserError for an object that gets shorter, StoreError.
    """
    if (url := store_url(path)) is None:
        with open(path, "rb", buffering=0) as file:
            yield os.fstat(file.fileno()).st_size, lambda start, count: os.pread(file.fileno(), count, start)
        return
    store, name = open_object(url)
    size = store.size(name) if known is None else known

    def part(start: int, count: int) -> bytes:
        try:
            return store.read(name, start, min(start + count, size)) if start < size else b""
        except ValueError as error:
            raise UserError(f"{url} was replaced while it was read. The same command goes on") from error

    yield size, part


def full_checksums(
    groups: Sequence[SummedFiles],
    *,
    process: int = 0,
    processes: int = 1,
    report: Callable[[int, int], None] | None = None,
) -> list[int]:
    """For each group, the sum of the hashes of this process's parts, modulo 2^256.

    A process reads every `processes`-th part, from part `process` on. The sums of all processes add up to those of a
    single process.

    Args:
        process: number of this process.
        processes: number of processes.
        report: called with the bytes read so far and the bytes to read.

    Raises:
        UserError: a file is missing or cannot be read.
    """
    parts = [
        (number, place, file, start, size)
        for number, group in enumerate(groups)
        for place, file in enumerate(group.files)
        for size in [with_retries(lambda file=file: _size(file), file)]
        for start in range(0, max(1, size), PART)
    ][process::processes]
    sums, read_bytes = [0] * len(groups), 0
    with ThreadPoolExecutor(min(THREADS, os.cpu_count() or 1)) as pool:
        for (number, *_), (size, value) in zip(parts, pool.map(lambda part: _part(*part[1:]), parts), strict=True):
            sums[number] = (sums[number] + value) % MODULUS
            read_bytes += size
            if report is not None:
                report(read_bytes, max(read_bytes, len(parts) * PART))
    return sums


def _part(place: int, path: str, start: int, file_size: int) -> tuple[int, int]:
    """(bytes, SHA-256 as a number) of a part of a file. place: number of the file in its group."""

    def read() -> tuple[int, int]:
        digest = hashlib.sha256(place.to_bytes(8, "little") + start.to_bytes(8, "little"))
        size = 0
        with _opened(path, file_size) as (_, part):
            while size < PART and (data := part(start + size, PART - size)):
                digest.update(data)
                size += len(data)
        return size, int.from_bytes(digest.digest(), "little")

    return with_retries(read, path)


def _size(path: str) -> int:
    with _opened(path) as (size, _):
        return size
