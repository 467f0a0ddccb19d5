"""An encoder as the device of an engine: whole prompts in, embeddings out. There is no cache, and no next token."""

from collections import abc
from typing import Any, NamedTuple

import jax
import numpy as np

from megajax.inference.encoder.encoder_programs import POOLINGS, EncoderPrograms
from megajax.inference.request import Pooled, Sampled, Sequence, Step

TILE = 32
"""Tokens in which the scheduler counts prompts."""


class EncoderDevice:
    """A `megajax.inference.request.Device`. Prompts of one step are grouped by their padded lengths."""

    top, drafts, prefix_sharing, window, snapshots, memory, images = 0, 0, False, None, 0, 0, None
    generates = False
    experts: Any = None

    def __init__(self, programs: EncoderPrograms, vocabulary: int):
        """vocabulary: ids in use."""
        self.programs, self.vocabulary, self.length = programs, vocabulary, programs.lengths[-1]
        self.rows, self.replicas = programs.counts[-1], programs.replicas
        self.tile = self.block = TILE
        blocks = -(-self.length // TILE)
        self.chunk, self.blocks = self.rows * blocks * TILE, self.rows * blocks

    def start(self, work: abc.Sequence[Step | None]) -> "EncoderStep":
        """Dispatch the prompts of a step. A part of a prompt waits until the step with its end."""
        complete = [
            [row for row, start, count in step.prompts if start + count == row.prompt] if step else [] for step in work
        ]
        groups = []
        for shorter, length in zip((0, *self.programs.lengths), self.programs.lengths, strict=False):
            rows = [[row for row in replica if shorter < row.prompt <= length] for replica in complete]
            if any(rows):
                groups.append(self._group(rows, length))
        return EncoderStep(work, groups)

    def _group(self, rows: abc.Sequence[abc.Sequence[Sequence]], length: int) -> "Group":
        """The dispatched texts of each replica, all padded to a length."""
        most = max(map(len, rows))
        count = next(count for count in self.programs.counts if count >= most)
        tokens = np.zeros((self.replicas * count, length), np.int32)
        counts, poolings = (np.zeros(len(tokens), np.int32) for _ in range(2))
        places: dict[Sequence, int] = {}
        for replica, texts in enumerate(rows):
            for place, row in enumerate(texts, start=replica * count):
                tokens[place, : row.prompt], counts[place] = row.tokens[: row.prompt], row.prompt
                poolings[place], places[row] = POOLINGS.index(row.pooling or "mean"), place
        return Group(places, self.programs.embed(tokens, counts, poolings))


class Group(NamedTuple):
    """Texts of one padded length."""

    places: dict[Sequence, int]
    sums: Any
    """float32 [texts, D]."""


class EncoderStep:
    """A `megajax.inference.request.StartedStep` of an encoder."""

    def __init__(self, work: abc.Sequence[Step | None], groups: abc.Sequence[Group]):
        self._work, self._groups = work, groups

    def choose(self) -> None:
        """There is no next token to choose."""

    def results(self) -> list[list[Sampled]]:
        vectors: dict[Sequence, np.ndarray] = {}
        for group in self._groups:
            sums = jax.device_get(group.sums)
            vectors |= {row: sums[place] for row, place in group.places.items()}
        return [[_result(vectors.get(row)) for row, _ in step.parts()] if step else [] for step in self._work]


def _result(vector: np.ndarray | None) -> Sampled:
    """The token has no meaning: no text follows."""
    if vector is None:
        return Sampled(0, 0.0)
    return Sampled(0, 0.0, finite=bool(np.isfinite(vector).all()), pooled=Pooled(0, vector))
