"""The layers of each stage, and the order in which they are stored.

A stack of R repeats is divided into P·V chunks of consecutive repeats; stage s has chunks s, P+s, 2P+s, ...
Every chunk is stored with as many rows as the largest one. The extra rows are zeros, which the executor skips. All
stages run each tick together, so a chunk with fewer layers waits for the largest one anyway.
"""

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True)
class Partition:
    """The number of repeats in each chunk, in the order of the layers."""

    stages: int
    chunks: int
    """V, chunks per stage."""
    repeats: tuple[int, ...]
    """Repeats in each of the P·V chunks; their sum is that of the stack."""

    @classmethod
    def even(cls, repeats: int, stages: int, chunks: int) -> "Partition":
        """Chunks as even as possible; if the repeats don't divide, the first chunks have one more."""
        each, remainder = divmod(repeats, stages * chunks)
        return cls(stages, chunks, tuple(each + (chunk < remainder) for chunk in range(stages * chunks)))

    @property
    def rows(self) -> int:
        """Stored rows per chunk."""
        return max(self.repeats)

    def numbers(self) -> np.ndarray:
        """Repeat in each row of each stage, int32 [P, V * rows]; -1 for padding."""
        first = np.cumsum([0, *self.repeats[:-1]])
        row = np.arange(self.rows)
        by_chunk = [np.where(row < count, start + row, -1) for start, count in zip(first, self.repeats, strict=True)]
        by_stage = np.array(by_chunk, np.int32).reshape(self.chunks, self.stages, self.rows).transpose(1, 0, 2)
        return by_stage.reshape(self.stages, self.chunks * self.rows)

    def order(self) -> tuple[int, ...]:
        """Repeat in each row of a stacked weight, in the order of the stages; -1 for padding."""
        return tuple(self.numbers().reshape(-1).tolist())

    def padded(self) -> bool:
        """Whether there are padding rows."""
        return min(self.repeats) < self.rows
