"""Blocks of the cache: their owners and their tokens, so that equal prefixes of prompts are computed once.

A full block is identified by a hash of all tokens up to its end. Only full blocks are shared. A shared block is never
written, so copy-on-write is not needed.
"""

import os
from array import array
from collections import OrderedDict, deque
from collections.abc import Sequence
from hashlib import blake2b

DIGEST = 16
"""Bytes of a hash."""


class Pool:
    """The blocks of a replica, with reference counts.

    A block without owners but with known tokens is idle: it can be shared again. When no empty block is left, idle
    blocks are overwritten, the least recently used first.
    """

    def __init__(self, blocks: int, size: int):
        """size: tokens of a block."""
        self.blocks, self.size = blocks, size
        self.owners = [0] * blocks
        self._empty = deque(range(blocks))
        self._idle: OrderedDict[int, None] = OrderedDict()
        self._block_of: dict[bytes, int] = {}
        self._digest_of: dict[int, bytes] = {}
        # A secret key: clients cannot construct a prompt with the hashes of another prompt's blocks.
        self._key = os.urandom(32)

    @property
    def available(self) -> int:
        """Number of blocks that can be allocated."""
        return len(self._empty) + len(self._idle)

    @property
    def used(self) -> int:
        """Number of blocks with owners."""
        return self.blocks - self.available

    def digest(self, before: bytes, tokens: Sequence[int]) -> bytes:
        """The hash of a full block, from the hash of the previous block (empty for the first) and its tokens."""
        return blake2b(before + array("q", tokens).tobytes(), digest_size=DIGEST, key=self._key).digest()

    def allocate(self) -> int:
        """Allocate a block with one owner, to be written. Raises IndexError if none is available."""
        if self._empty:
            block = self._empty.popleft()
        elif self._idle:
            block = self._idle.popitem(last=False)[0]
            del self._block_of[self._digest_of.pop(block)]
        else:
            raise IndexError("no block is available: check `available` first")
        self.owners[block] = 1
        return block

    def share(self, digest: bytes) -> int | None:
        """Add an owner to the block with these tokens -> the block, or None if there is none."""
        block = self._block_of.get(digest)
        if block is not None:
            self._idle.pop(block, None)
            self.owners[block] += 1
        return block

    def publish(self, block: int, digest: bytes) -> None:
        """Allow sharing of a block. The step that fills it must run before any step that reads it."""
        if digest not in self._block_of:
            self._block_of[digest], self._digest_of[block] = block, digest

    def release(self, block: int) -> None:
        """Remove an owner."""
        if self.owners[block] < 1:
            raise ValueError(f"block {block} has no owner")
        self.owners[block] -= 1
        if not self.owners[block] and block in self._digest_of:
            self._idle[block] = None
        elif not self.owners[block]:
            self._empty.append(block)

    def check(self, owners: Sequence[int]) -> None:
        """Raises AssertionError unless every block is in exactly one state. owners: counts according to the rows."""
        assert list(owners) == self.owners, "a block was lost, or has an owner too many"
        free = [*self._empty, *self._idle]
        assert len(set(free)) == len(free), "a block is free twice"
        assert {block for block, count in enumerate(owners) if not count} == set(free), (
            "a block is neither free nor owned"
        )
        assert {block: digest for digest, block in self._block_of.items()} == self._digest_of
        assert set(self._idle) == {block for block in self._digest_of if not owners[block]}
