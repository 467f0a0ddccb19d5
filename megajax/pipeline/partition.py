"""The layers of each stage, and the order in which they are stored.

A stack of R repeats is divided into P·V chunks of consecutive repeats; stage s has chunks s, P+s, 2P+s, ...
Every chunk stores as many rows of each weight as the largest chunk. The padding rows are zeros, which the executor
skips. All stages run each tick together, so a chunk with fewer layers waits for the largest one anyway.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np


def row_order(chunks: Sequence[range], layers: Sequence[int]) -> tuple[int, ...]:
    """For each row of a stacked weight, the index of its layer in `layers`; -1 for padding.

    chunks: layer numbers of each chunk, in the order of storage; layers: numbers of the layers that have the weight.
    """
    if len(chunks) == 1:
        return tuple(range(len(layers)))
    inside = [[place for place, layer in enumerate(layers) if layer in chunk] for chunk in chunks]
    rows = max(map(len, inside))
    return tuple(row for places in inside for row in (*places, *[-1] * (rows - len(places))))


@dataclass(frozen=True, slots=True)
class Partition:
    """The number of repeats in each chunk, in the order of the layers."""

    stages: int
    chunks: int
    """V, chunks per stage."""
    repeats: tuple[int, ...]
    """Repeats in each of the P·V chunks; they sum to the repeats of the stack."""
    size: int = 1
    """Layers per repeat."""

    @classmethod
    def even(cls, repeats: int, stages: int, chunks: int, size: int = 1) -> "Partition":
        """Chunks as even as possible; if the repeats don't divide, the first chunks have one more."""
        base, remainder = divmod(repeats, stages * chunks)
        return cls(stages, chunks, tuple(base + (chunk < remainder) for chunk in range(stages * chunks)), size)

    @property
    def rows(self) -> int:
        """Stored rows per chunk of a weight that every repeat has."""
        return max(self.repeats)

    def layers(self) -> tuple[tuple[range, ...], int]:
        """Layer numbers of each chunk in the order of the model, and `rows`."""
        bounds = np.cumsum([0, *self.repeats]) * self.size
        return tuple(range(int(a), int(b)) for a, b in pairwise(bounds)), self.rows

    def stored(self) -> tuple[range, ...]:
        """Layer numbers of each chunk, stage by stage."""
        chunks = self.layers()[0]
        return tuple(chunks[chunk * self.stages + s] for s in range(self.stages) for chunk in range(self.chunks))

    def order_of(self, layers: Sequence[int]) -> tuple[int, ...]:
        """Order of the rows of a weight in these layers: see `row_order`."""
        return row_order(self.stored(), layers)

    def order(self) -> tuple[int, ...]:
        """Order of the rows of a weight that every repeat has."""
        return self.order_of(range(0, self.size * sum(self.repeats), self.size))

    def numbers(self) -> np.ndarray:
        """First layer of the repeat in each row of each stage, int32 [P, V * rows]; -1 for padding."""
        first = np.cumsum([0, *self.repeats[:-1]])
        row = np.arange(self.rows)
        starts = zip(first, self.repeats, strict=True)
        by_chunk = [np.where(row < count, self.size * (start + row), -1) for start, count in starts]
        by_stage = np.array(by_chunk, np.int32).reshape(self.chunks, self.stages, self.rows).transpose(1, 0, 2)
        return by_stage.reshape(self.stages, self.chunks * self.rows)

    def padded(self) -> bool:
        """Whether any rows are padding."""
        return min(self.repeats) < self.rows
