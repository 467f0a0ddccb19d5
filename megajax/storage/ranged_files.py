"""Files of an object store, read by ranges. Blocks that were read are kept on the local disk.

A block is a file of its own, named after the object, its generation and the block's number: an object that was
replaced has other blocks. Its last four bytes are a checksum. Processes of a machine share the blocks; when they exceed
the limit, the ones not opened for longest are deleted, by whichever process notices. So are copies of whole objects,
other than indices of token files, which are mapped as long as a run lasts.
"""

import hashlib
import io
import os
import sys
import zlib
from collections.abc import Buffer, Callable, Sequence
from itertools import count
from pathlib import Path

import numpy as np

from megajax.config.errors import UserError
from megajax.display.text import byte_size
from megajax.storage.disk import write_whole
from megajax.storage.index_cache import user_cache
from megajax.storage.retried_reads import ChangedFile
from megajax.storage.stores import Store, in_parallel, open_object

BLOCK = 1 << 20
"""Bytes of a block: rows of a shuffled run need some 10 kB each, from anywhere, and a request takes some 30 ms."""
CHECKSUM = 4
MANY_BLOCKS = 4
"""Blocks of one read from which on they are requested side by side."""
INDEX = ".idx"
"""Suffix of the copies that stay."""
GIB = 1 << 30
SWEEP = 1 / 128
"""Share of the limit that each process may write before it looks at the sizes of all blocks again."""
SHARE_LEFT = 0.9
"""Share of the limit that is left after old blocks were deleted."""


class BlockCache:
    """Blocks of objects on the local disk.

    Attributes:
        folder: where they are; made on the first write.
        generations: URL -> generation, of objects that were looked at, here or in process 0: only they are read.
    """

    def __init__(self, folder: Path | None = None, gib: float = 64.0):
        """folder: None: in the user's cache folder. gib: size limit, GiB."""
        self.folder = user_cache() / "blocks" if folder is None else folder
        self.generations = dict[str, bytes]()
        self._limit, self._wanted = gib * GIB, 0
        self._since_sweep = self._limit  # the first write looks
        self._checked = set[Path]()
        self._works = True

    def place(self, url: str, generation: bytes) -> Path:
        """The folder of an object's blocks."""
        return self.folder / hashlib.sha256(url.encode() + b"\0" + generation).hexdigest()[:24]

    def demand_room(self, size: int) -> None:
        """Raises UserError if this many bytes, with those of all calls before, exceed the limit."""
        self._wanted += size
        if self._wanted > self._limit:
            raise UserError(
                f"data.prefetch=true: the token files of object stores have {self._wanted / GIB:.3g} GiB or more, and "
                f"data.cache_gib={self._limit / GIB:.3g} allows less: raise it, or leave data.prefetch out"
            )

    def demand_kept(self) -> None:
        """Raises UserError if the folder could not be written."""
        if not self._works:
            raise UserError(f"data.prefetch=true: {self.folder} can't keep what was read: change data.cache_dir")

    def read(self, path: Path, start: int, stop: int, fetch: Callable[[], bytes]) -> bytes:
        """Bytes of a block, which `fetch` gets where the disk has none or a damaged one."""
        try:
            if path in self._checked:
                return _part(path, start, stop)
            content = path.read_bytes()
            if len(content) >= CHECKSUM and _checksum(content[:-CHECKSUM]) == content[-CHECKSUM:]:
                os.utime(path)
                self._checked.add(path)
                return content[start:stop]
        except OSError:
            pass  # deleted by another process, never written, or a broken disk: the store has it
        content = fetch()
        self._keep(path, content)
        return content[start:stop]

    def _keep(self, path: Path, content: bytes) -> None:
        if not self._works:
            return
        try:
            write_whole(path, content + _checksum(content))
            self._checked.add(path)
            self.wrote(len(content))
        except OSError as error:
            self._works = False
            line = f"{self.folder}: {error.strerror}: blocks of objects are not kept here, and are read again"
            print(line, file=sys.stderr, flush=True)

    def demand_limit(self, url: str, size: int) -> None:
        """Raises UserError for a copy beyond the limit."""
        if size > self._limit:
            raise UserError(
                f"{url} has {byte_size(size)} and is kept whole on the local disk, but data.cache_gib="
                f"{self._limit / GIB:.3g} allows less: raise it, or copy the file to a disk and give its path"
            )

    def wrote(self, size: int) -> None:
        """Deletes old files if there are too many after so many more bytes. Raises OSError."""
        self._since_sweep += size
        if self._since_sweep >= self._limit * SWEEP:
            self._sweep()

    def _sweep(self) -> None:
        """Delete the oldest blocks beyond the limit."""
        self._since_sweep, files = 0.0, list[tuple[float, int, Path]]()
        for path in self.folder.glob("*/*"):
            if path.suffix == INDEX or path.name.startswith("."):
                continue  # the copy of an index, or a block that is being written
            try:
                facts = path.stat()
            except FileNotFoundError:
                continue  # deleted by another process
            files.append((facts.st_mtime, facts.st_size, path))
        total = sum(size for _, size, _ in files)
        if total <= self._limit:
            return
        for _, size, path in sorted(files):
            path.unlink(missing_ok=True)
            self._checked.discard(path)
            total -= size
            if total <= SHARE_LEFT * self._limit:
                break


def _checksum(content: bytes) -> bytes:
    return zlib.crc32(content).to_bytes(CHECKSUM, "little")


def _part(path: Path, start: int, stop: int) -> bytes:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        content = os.pread(descriptor, stop - start, start)
    finally:
        os.close(descriptor)
    if len(content) < stop - start:
        raise OSError(f"{path} was cut short")
    return content


class StoredFile:
    """An object of a store, open for reads by position from any thread: what `ReadFile` is for a file.

    Attributes:
        path: its URL.
        size: bytes when it was opened.
    """

    def __init__(self, store: Store, name: str, size: int, blocks: BlockCache):
        """size: bytes that it should have. Raises UserError for no such object or another size, StoreError."""
        self.path, self.size, self._name, self._store = f"{store.url}/{name}", size, name, store
        self._blocks = blocks
        if self.path not in blocks.generations:
            if (fault := store.wrong_size(name, size, "its index says")) is not None:
                raise UserError(f"{self.path}: {fault}")
            try:
                blocks.generations[self.path] = store.part(name, size - 1, size)[1] if size else b""
            except ValueError:  # not all servers say the size, which `wrong_size` compares
                raise UserError(f"{self.path}: is shorter than the {size} bytes that its index says") from None
        self._generation = blocks.generations[self.path]
        self._place = blocks.place(self.path, self._generation)

    def size_now(self) -> int:
        """Its size: an object is replaced whole, which every read of a block notices."""
        return self.size

    def read(self, parts: Sequence[tuple[int, int]], dtype: np.dtype, name: Callable[[int], str]) -> np.ndarray:
        """As `ReadFile.read`. Raises ChangedFile if the object was replaced or deleted, StoreError."""
        pieces = [piece for offset, size in parts for piece in self._pieces(offset, size)]
        return np.frombuffer(pieces[0] if len(pieces) == 1 else b"".join(pieces), dtype)

    def _pieces(self, offset: int, size: int) -> list[bytes]:
        stop = offset + size

        def piece(number: int) -> bytes:
            first = number * BLOCK
            inside = max(offset - first, 0), min(stop - first, BLOCK)
            return self._blocks.read(self._place / f"{number:08x}", *inside, lambda: self._fetched(first))

        numbers = range(offset // BLOCK, -(-stop // BLOCK))
        return in_parallel(piece, numbers) if len(numbers) >= MANY_BLOCKS else [piece(number) for number in numbers]

    def prefetch(self, show: Callable[[int, float], None]) -> None:
        """Read all blocks that are not on the disk. show: of the number of blocks there, and their share.

        Processes of a host start at places of their own. Raises UserError if the blocks exceed the cache's limit, and
        as `read`.
        """
        self._blocks.demand_room(self.size)
        numbers = range(-(-self.size // BLOCK))
        first, finished = os.getpid() % max(1, len(numbers)), count(1)

        def read(number: int) -> None:
            if not (self._place / f"{number:08x}").exists():
                self._pieces(number * BLOCK, min(BLOCK, self.size - number * BLOCK))
            number_read = next(finished)
            show(number_read, number_read / len(numbers))

        in_parallel(read, [*numbers[first:], *numbers[:first]])
        self._blocks.demand_kept()

    def _fetched(self, first: int) -> bytes:
        """A block of the object, from the store."""
        try:
            content, generation = self._store.part(self._name, first, min(first + BLOCK, self.size))
        except (FileNotFoundError, ValueError):
            raise self.changed("it is shorter now, or was deleted") from None
        if generation != self._generation:
            raise self.changed("it has another generation now")
        if len(content) < min(BLOCK, self.size - first):
            raise self.changed(f"its bytes from {first + len(content):,} on are missing")
        return content

    def changed(self, missing: str) -> ChangedFile:
        """The error for an object that was replaced."""
        return replaced(self.path, missing)


def replaced(url: str, missing: str) -> ChangedFile:
    """The error for an object that has changed since it was looked at. missing: what shows it."""
    return ChangedFile(
        f"{url}: {missing}. Another program has replaced it during the run. Restore the object; the same command goes "
        "on from the last checkpoint."
    )


BUFFER = 1 << 23
"""Bytes that `open_cached_object` requests at a time."""


def open_cached_object(url: str, generation: bytes) -> io.BufferedReader:
    """An object, open for reading in order; its blocks are kept in the user's cache folder.

    Raises ChangedFile on a read if it has another generation, StoreError.
    """
    (store, name), blocks = open_object(url), BlockCache()
    blocks.generations[url] = generation
    try:
        size = store.size(name)
    except FileNotFoundError:
        raise replaced(url, "it was deleted") from None
    return io.BufferedReader(StoredStream(StoredFile(store, name, size, blocks)), BUFFER)


class StoredStream(io.RawIOBase):
    """A stored file as a file of Python, open for reading."""

    def __init__(self, file: StoredFile):
        self._file, self._place = file, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._place

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self._place = max(0, offset + {os.SEEK_SET: 0, os.SEEK_CUR: self._place, os.SEEK_END: self._file.size}[whence])
        return self._place

    def readinto(self, buffer: Buffer) -> int:
        target = memoryview(buffer).cast("B")
        count = max(0, min(len(target), self._file.size - self._place))
        target[:count] = self._file.read([(self._place, count)], np.dtype(np.uint8), str).data
        self._place += count
        return count
