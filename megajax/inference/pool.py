"""Blocks of the cache: who owns them, and which tokens they have, so that equal prompts are computed once.

A full block is identified by a hash of all tokens up to its end. Only full blocks are shared, so a shared block is
never written, and there is no copy on write.
"""

import os
from array import array
from collections import OrderedDict, deque
from collections.abc import Sequence
from hashlib import blake2b

DIGEST = 16
"""Bytes of a hash."""


class Pool:
    """The blocks of a replica, with a count of owners each.

    A block without owners whose tokens are known is idle: it is shared again, or overwritten when no empty block is
    left, the least recently used first.
    """

    def __init__(self, blocks: int, size: int):
        """size: tokens of a block."""
        self.blocks, self.size = blocks, size
        self.owners = [0] * blocks
        self._empty = deque(range(blocks))
        self._idle: OrderedDict[int, None] = OrderedDict()
        self._block_of: dict[bytes, int] = {}
        self._digest_of: dict[int, bytes] = {}
        # A secret key: nobody can construct a prompt that takes the blocks of another.
        self._key = os.urandom(32)

    @property
    def available(self) -> int:
        """Blocks that `take` can give."""
        return len(self._empty) + len(self._idle)

    @property
    def used(self) -> int:
        """Blocks with owners."""
        return self.blocks - self.available

    def digest(self, before: bytes, tokens: Sequence[int]) -> bytes:
        """The hash of a full block, from that of the block before it (empty for the first) and its tokens."""
        return blake2b(before + array("q", tokens).tobytes(), digest_size=DIGEST, key=self._key).digest()

    def take(self) -> int:
        """A block to write to, with one owner. Raises IndexError if none is available."""
        if self._empty:
            block = self._empty.popleft()
        elif self._idle:
            block = self._idle.popitem(last=False)[0]
            del self._block_of[self._digest_of.pop(block)]
        else:
            raise IndexError("no block is available: ask `available` first")
        self.owners[block] = 1
        return block

    def share(self, digest: bytes) -> int | None:
        """The block with these tokens, with one more owner; None if there is none."""
        block = self._block_of.get(digest)
        if block is not None:
            self._idle.pop(block, None)
            self.owners[block] += 1
        return block

    def publish(self, block: int, digest: bytes) -> None:
        """From now on the block may be shared: the step that fills it comes before any step that reads it."""
        if digest not in self._block_of:
            self._block_of[digest], self._digest_of[block] = block, digest

    def release(self, block: int) -> None:
        """One owner less."""
        if self.owners[block] < 1:
            raise ValueError(f"block {block} has no owner")
        self.owners[block] -= 1
        if not self.owners[block] and block in self._digest_of:
            self._idle[block] = None
        elif not self.owners[block]:
            self._empty.append(block)

    def check(self, owners: Sequence[int]) -> None:
        """Raises AssertionError unless every block is in exactly one state. owners: the counts that rows have."""
        assert list(owners) == self.owners, "a block was lost, or has an owner too many"
        free = [*self._empty, *self._idle]
        assert len(set(free)) == len(free), "a block is free twice"
        assert {block for block, count in enumerate(owners) if not count} == set(free), (
            "a block is neither free nor owned"
        )
        assert {block: digest for digest, block in self._block_of.items()} == self._digest_of
        assert set(self._idle) == {block for block in self._digest_of if not owners[block]}
