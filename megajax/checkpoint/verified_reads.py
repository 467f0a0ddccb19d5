"""Reads ranges of a step's files, and compares each block with the manifest as it is read."""

import hashlib
from collections.abc import Iterable, Sequence, Set
from typing import NamedTuple

import numpy as np

from megajax.checkpoint.manifest import (
    BLOCK_BYTES,
    Damaged,
    Entries,
    block_count,
    block_fault,
    block_range,
    in_threads,
)
from megajax.storage.folders import Folder, read_into


class ByteRange(NamedTuple):
    """A range of a file, and where to put it."""

    name: str
    """Path in the step's folder."""
    start: int
    target: np.ndarray
    """Bytes; its size is that of the range."""

    @property
    def stop(self) -> int:
        return self.start + self.target.size


type FileBlock = tuple[str, int]
"""Path in the step's folder, and number of the block."""


class VerifiedReads:
    """Reads a step. What it returns is what was hashed: each block is read once per call, and hashed in memory.

    A large file of format 1 has one hash. It must be verified before, and is read here without a hash.
    """

    def __init__(self, folder: Folder, entries: Entries):
        self._folder, self.entries, self._entries = folder, entries, dict(entries)
        for name, entry in entries.items():
            if "block" not in entry and entry["bytes"] > BLOCK_BYTES:
                self._entries[name] = entry | {"block": BLOCK_BYTES, "sha256": ""}
        self.checked: set[FileBlock] = set()
        """The blocks that were read."""

    def read(self, spans: Sequence[ByteRange]) -> dict[int, str]:
        """Fills the targets -> number of a range -> why a block of it differs from the manifest or can't be read.

        Raises ConnectionError for a process that does not answer.
        """
        by_block, faults = dict[FileBlock, list[int]](), dict[int, str]()
        for number, span in enumerate(spans):
            if span.name not in self._entries or span.stop > self._entries[span.name]["bytes"]:
                faults[number] = f"{span.name}: bytes {span.start} to {span.stop} are not in the manifest"
                continue
            for block in self._blocks(span.name, span.start, span.stop):
                by_block.setdefault((span.name, block), []).append(number)

        def read(item: tuple[FileBlock, list[int]]) -> None:
            block, numbers = item
            if (fault := self._fault(*block, [spans[number] for number in numbers])) is not None:
                faults.update(dict.fromkeys(numbers, fault))

        in_threads(read, by_block.items())
        return faults

    def content(self, name: str, start: int = 0, stop: int | None = None) -> bytes:
        """A range of a file. Raises Damaged."""
        if name not in self._entries:
            raise Damaged(f"{name} is not in the manifest")
        target = np.empty((self._entries[name]["bytes"] if stop is None else stop) - start, np.uint8)
        if faults := self.read([ByteRange(name, start, target)]):
            raise Damaged(faults[0])
        return target.tobytes()

    def used_blocks(self, used: Iterable[tuple[str, int, int]]) -> set[FileBlock]:
        """The blocks with a byte of the ranges (name, start, stop)."""
        return {(name, block) for name, start, stop in used for block in self._blocks(name, start, stop)}

    def verify_except(self, read: Set[FileBlock], share: slice = slice(None)) -> None:
        """Verifies the blocks that are not in `read`, so that a whole step is verified. Raises Damaged.

        share: which of them.
        """
        blocks = [(name, block) for name in sorted(self._entries) for block in range(block_count(self._entries[name]))]
        rest = [block for block in blocks if block not in read][share]
        if faults := [fault for fault in in_threads(lambda block: self._fault(*block, []), rest) if fault]:
            raise Damaged(faults[0])

    def _blocks(self, name: str, start: int, stop: int) -> range:
        size = block_range(self._entries[name], 0)[1]
        return range(start // size, -(-stop // size)) if stop > start else range(0)

    def _fault(self, name: str, block: int, spans: Sequence[ByteRange]) -> str | None:
        """Fills the parts of the targets that are in a block -> its fault, or None."""
        first, last = block_range(self._entries[name], block)
        whole = next((span for span in spans if span.start <= first and last <= span.stop), None)
        # The memory that is hashed is the memory that is used: the file may change after it was read.
        content = (
            np.empty(last - first, np.uint8) if whole is None else whole.target[first - whole.start :][: last - first]
        )
        self.checked.add((name, block))
        try:
            count = read_into(self._folder, name, content, first)
        except ConnectionError:
            raise
        except OSError as error:
            return f"{name}: {error.strerror}"
        if count < content.size:
            return f"{name}: it ends after {first + count} bytes, the manifest says {self._entries[name]['bytes']}"
        hashed = self._entries[name]["sha256"]
        if hashed and (fault := block_fault(self._entries[name], block, hashlib.sha256(content).hexdigest())):
            return f"{name}: {fault}"
        for span in spans:
            if span is not whole:
                start, stop = max(first, span.start), min(last, span.stop)
                span.target[start - span.start : stop - span.start] = content[start - first : stop - first]
        return None
