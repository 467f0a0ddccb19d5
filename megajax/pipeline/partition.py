"""Which layers a stage holds, and in which order they are stored.

A stack of R repeats is cut into P·V chunks of repeats that follow each other; stage s holds chunks s, P+s, 2P+s, ...
Every chunk is stored with as many rows as the largest has; the rows that are too many are zeros, which the executor
passes by. Stages go through the ticks together, so a chunk with fewer layers waits for the largest one anyway.
"""

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True)
class Partition:
    """Chunks in the order of the layers, each with the number of its repeats."""

    stages: int
    chunks: int
    """Of each stage: V."""
    repeats: tuple[int, ...]
    """Of each of the P·V chunks; in all, those of the stack."""

    @classmethod
    def even(cls, repeats: int, stages: int, chunks: int) -> "Partition":
        """Chunks as alike as can be: where the repeats do not divide, the first chunks have one more."""
        each, more = divmod(repeats, stages * chunks)
        return cls(stages, chunks, tuple(each + (place < more) for place in range(stages * chunks)))

    @property
    def rows(self) -> int:
        """Rows of a chunk in storage."""
        return max(self.repeats)

    def numbers(self) -> np.ndarray:
        """Repeat held by each row of each stage, int32 [P, V * rows]; -1 for a row that is none."""
        first = np.cumsum([0, *self.repeats[:-1]])
        row = np.arange(self.rows)
        held = [np.where(row < count, start + row, -1) for start, count in zip(first, self.repeats, strict=True)]
        by_stage = np.array(held, np.int32).reshape(self.chunks, self.stages, self.rows).transpose(1, 0, 2)
        return by_stage.reshape(self.stages, self.chunks * self.rows)

    def order(self) -> tuple[int, ...]:
        """Repeat held by each row of a stacked weight, stage after stage; -1 for a row that is none."""
        return tuple(self.numbers().reshape(-1).tolist())

    def padded(self) -> bool:
        """Whether some row is no layer."""
        return min(self.repeats) < self.rows
