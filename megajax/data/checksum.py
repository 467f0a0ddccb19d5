"""Checksums of data files: a sample that costs little at every start, and the whole content where that is asked for.

Both can be computed by several processes that share the files: the sample file by file, the whole in parts, whose
hashes are added up.
"""

import hashlib
import os
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import Any

from megajax.data.reading import retried

BLOCK = 1 << 16
"""Bytes of a block of a sample."""
BLOCKS = 64
"""Blocks of the sample of a file, spread evenly from its first to its last byte."""
BLOCKS_OF_ALL = 4096
"""Blocks of the samples of all files; where that is less than 64 for each, files have fewer, at least 4."""
LEAST_BLOCKS = 4
SAMPLED_FILES = 1024
"""Files that are sampled, spread evenly, where there are more, such as images in folders."""
PART = 1 << 24
"""Bytes that are hashed at a time where a file is hashed whole."""
THREADS = 16
MODULUS = 1 << 256


@dataclass(frozen=True)
class FileSum:
    """What is remembered of a file, or of many as one."""

    path: str
    """The file; of many, the folder that has them."""
    names: str
    """Name of the file; of many, a hash of their paths in the folder."""
    files: int
    bytes: int
    """Size; of many, of those that are sampled."""
    sample: str
    """SHA-256 of the sampled blocks."""
    whole: str | None = None
    """Sum of the SHA-256 of all parts; None: not asked for."""

    def difference(self, old: "FileSum") -> str | None:
        """What differs in content, as `old -> new`; None: nothing."""
        before = "" if old.path == self.path else f"in place of {old.path}, "
        if self.files != old.files:
            return f"{before}files: {old.files:,} -> {self.files:,}"
        if self.files > 1 and self.names != old.names:
            return f"{before}names of its {self.files:,} files: {old.names[:12]} -> {self.names[:12]}"
        if self.bytes != old.bytes:
            return f"{before}bytes: {old.bytes:,} -> {self.bytes:,}"
        if self.sample != old.sample:
            return f"{before}checksum of a sample of its content: {old.sample[:12]} -> {self.sample[:12]}"
        if self.whole is not None and old.whole is not None and self.whole != old.whole:
            return f"{before}checksum of its whole content: {old.whole[:12]} -> {self.whole[:12]}"
        return None

    def plain(self) -> dict[str, Any]:
        """As JSON values."""
        return asdict(self)


@dataclass(frozen=True)
class Group:
    """Files with one sum: a single one, or many below a folder."""

    path: str
    files: tuple[str, ...]
    blocks: int
    """Blocks of the sample of a file; a function of the number of files that are read together."""

    def names(self) -> str:
        """Name of the file, or a hash of all paths in the folder."""
        if len(self.files) == 1:
            return os.path.basename(self.path)
        inside = (file[len(self.path) :] for file in self.files)
        return hashlib.sha256(os.fsencode("\0".join(inside))).hexdigest()


def groups_of(files: Sequence[str]) -> list[Group]:
    """A group for each file, or one for all where there are too many to look into each."""
    blocks = max(LEAST_BLOCKS, min(BLOCKS, BLOCKS_OF_ALL // max(1, len(files))))
    if len(files) <= SAMPLED_FILES:
        return [Group(file, (file,), blocks) for file in files]
    return [Group(os.path.commonpath(files), tuple(files), blocks)]


def sampled(groups: Sequence[Group], mine: Iterable[int] | None = None) -> dict[int, FileSum]:
    """Number of a group -> its sum, without `whole`. mine: the groups to look into; None: all.

    Raises:
        UserError: a file is missing or cannot be read.
    """
    chosen = list(range(len(groups)) if mine is None else mine)
    files = [(number, file) for number in chosen for file in _spread(groups[number].files)]
    digests, sizes = {number: hashlib.sha256() for number in chosen}, dict.fromkeys(chosen, 0)
    with ThreadPoolExecutor(THREADS) as pool:
        looks = pool.map(lambda each: _sample(each[1], groups[each[0]].blocks), files)
        for (number, _), (size, content) in zip(files, looks, strict=True):
            digests[number].update(content)
            sizes[number] += size

    def made(number: int) -> FileSum:
        group = groups[number]
        return FileSum(group.path, group.names(), len(group.files), sizes[number], digests[number].hexdigest())

    return {number: made(number) for number in chosen}


def _spread(files: Sequence[str]) -> Sequence[str]:
    return files[:: -(-len(files) // SAMPLED_FILES)]


def _sample(path: str, blocks: int) -> tuple[int, bytes]:
    """(size, SHA-256 of size and blocks) of a file."""

    def look() -> tuple[int, bytes]:
        with open(path, "rb", buffering=0) as file:
            size = os.fstat(file.fileno()).st_size
            digest = hashlib.sha256(size.to_bytes(8, "little"))
            whole = size <= blocks * BLOCK
            last = max(0, size - BLOCK)
            places = range(0, size, BLOCK) if whole else [last * block // (blocks - 1) for block in range(blocks)]
            for place in places:
                digest.update(os.pread(file.fileno(), BLOCK, place))
            return size, digest.digest()

    return retried(look, path)


def whole(
    groups: Sequence[Group], *, mine: int = 0, processes: int = 1, done: Callable[[int, int], None] | None = None
) -> list[int]:
    """Of each group the sum of the hashes of its parts, modulo 2^256; of every `processes`-th part, from `mine` on.

    The sums of all processes add up to those of one process alone.

    Args:
        mine: this process's number.
        processes: number of processes.
        done: called with the bytes read and the bytes to read.

    Raises:
        UserError: a file is missing or cannot be read.
    """
    parts = [
        (number, place, file, start)
        for number, group in enumerate(groups)
        for place, file in enumerate(group.files)
        for start in range(0, max(1, retried(lambda file=file: os.stat(file).st_size, file)), PART)
    ][mine::processes]
    sums, read = [0] * len(groups), 0
    with ThreadPoolExecutor(min(THREADS, os.cpu_count() or 1)) as pool:
        for (number, *_), (size, value) in zip(parts, pool.map(lambda part: _part(*part[1:]), parts), strict=True):
            sums[number] = (sums[number] + value) % MODULUS
            read += size
            if done is not None:
                done(read, max(read, len(parts) * PART))
    return sums


def _part(place: int, path: str, start: int) -> tuple[int, int]:
    """(bytes, SHA-256 as a number) of a part of the file, with its place."""

    def look() -> tuple[int, int]:
        digest = hashlib.sha256(place.to_bytes(8, "little") + start.to_bytes(8, "little"))
        read = 0
        with open(path, "rb", buffering=0) as file:
            while read < PART and (data := os.pread(file.fileno(), PART - read, start + read)):
                digest.update(data)
                read += len(data)
        return read, int.from_bytes(digest.digest(), "little")

    return retried(look, path)
