"""Reads ranges of a step's files, and compares each block with the manifest as it is read."""

import hashlib
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from megajax.checkpoint.integrity import (
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


type Block = tuple[str, int]
"""Path in the step's folder, and number of the block."""


class BlockReader:
    """Reads a step. What it returns is what was hashed: each block is read once per call, and hashed in memory.

    A large file of format 1 has one hash. It must be verified before, and is read here without a hash.
    """

    def __init__(self, folder: Folder, entries: Entries):
        self._folder, self._entries = folder, dict(entries)
        for name, entry in entries.items():
            if "block" not in entry and entry["bytes"] > BLOCK_BYTES:
                self._entries[name] = entry | {"block": BLOCK_BYTES, "sha256": ""}

    def read(self, spans: Iterable[ByteRange]) -> None:
        """Fills the targets. Raises Damaged for a block that differs from the manifest or can't be read."""
        by_block: dict[Block, list[ByteRange]] = {}
        for span in spans:
            if span.name not in self._entries or span.stop > self._entries[span.name]["bytes"]:
                raise Damaged(f"{span.name}: bytes {span.start} to {span.stop} are not in the manifest")
            for block in self._blocks(span.name, span.start, span.stop):
                by_block.setdefault((span.name, block), []).append(span)
        in_threads(lambda item: self._read_block(*item[0], item[1]), by_block.items())

    def verify_except(self, used: Iterable[tuple[str, int, int]], share: slice) -> None:
        """Verifies the blocks without a byte of the ranges (name, start, stop), so that a whole step is verified.

        share: which of them. Raises Damaged.
        """
        read = {(name, block) for name, start, stop in used for block in self._blocks(name, start, stop)}
        blocks = [(name, block) for name in sorted(self._entries) for block in range(block_count(self._entries[name]))]
        rest = [(name, block) for name, block in blocks if (name, block) not in read]
        in_threads(lambda block: self._read_block(*block, []), rest[share])

    def _blocks(self, name: str, start: int, stop: int) -> range:
        size = block_range(self._entries[name], 0)[1]
        return range(start // size, -(-stop // size)) if stop > start else range(0)

    def _read_block(self, name: str, block: int, spans: list[ByteRange]) -> None:
        first, last = block_range(self._entries[name], block)
        whole = next((span for span in spans if span.start <= first and last <= span.stop), None)
        # The memory that is hashed is the memory that is used: the file may change after it was read.
        content = (
            np.empty(last - first, np.uint8) if whole is None else whole.target[first - whole.start :][: last - first]
        )
        try:
            count = read_into(self._folder, name, content, first)
        except OSError as error:
            raise Damaged(f"{name}: {error.strerror}") from None
        if count < content.size:
            raise Damaged(
                f"{name}: it ends after {first + count} bytes, the manifest says {self._entries[name]['bytes']}"
            )
        hashed = self._entries[name]["sha256"]
        if hashed and (fault := block_fault(self._entries[name], block, hashlib.sha256(content).hexdigest())):
            raise Damaged(f"{name}: {fault}")
        for span in spans:
            if span is not whole:
                start, stop = max(first, span.start), min(last, span.stop)
                span.target[start - span.start : stop - span.start] = content[start - first : stop - first]
