"""Attention work of a row: the scores of its documents, and their distribution over the devices that share the row.

A query has a score with each key that it attends to, so a document of n tokens needs n (n + 1) / 2 scores. Rows of
equal length can differ a hundredfold, with one document or a hundred. All other layers have equal work for every row.

C devices of `context` hold parts of a row of S positions; see `megajax.mesh.sequence_sharding`.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from megajax.mesh.sequence_sharding import UNSHARDED_ROWS, SequenceSharding


def document_lengths(segment_ids: np.ndarray) -> np.ndarray:
    """Tokens of each document of a row, int64 [D]. segment_ids: int [S]; a document begins wherever the id changes."""
    starts = np.flatnonzero(np.diff(segment_ids)) + 1
    return np.diff(starts, prepend=0, append=len(segment_ids))


def lengths_of_row(source: object, row: int) -> np.ndarray:
    """Tokens of each document of row `row` of a row source, int64 [D], without reading the row if possible.

    A source may have `document_lengths(row)`, which returns them, or None if they depend on the tokens.
    """
    find_lengths: Callable[[int], np.ndarray | None] | None = getattr(source, "document_lengths", None)
    lengths = None if find_lengths is None else find_lengths(row)
    return document_lengths(source[row]["segment_ids"]) if lengths is None else lengths  # ty: ignore[not-subscriptable]


def scores(tokens: np.ndarray, window: int | None = None) -> np.ndarray:
    """Scores of the first n tokens of a document for each n in `tokens`, float64.

    window: number of keys before its own position that a query attends to; None: all.
    """
    tokens = np.asarray(tokens, np.float64)
    visible = tokens if window is None else np.minimum(tokens, window + 1)
    return visible * (visible + 1) / 2 + (tokens - visible) * visible


def device_scores(
    lengths: np.ndarray, sequence_sharding: SequenceSharding = UNSHARDED_ROWS, window: int | None = None
) -> np.ndarray:
    """Scores of a row on each device, float64 [C]. lengths: int [D], with a sum that `sequence_sharding` divides.

    Devices that exchange heads compute equal shares of their common part.
    """
    bounds = np.concatenate([[0], np.cumsum(lengths)])
    groups = sequence_sharding.exchanged()
    borders = np.linspace(0, bounds[-1], groups.unit + 1).astype(np.int64)
    place = np.minimum(np.searchsorted(bounds, borders, side="right") - 1, len(lengths))
    before = np.concatenate([[0.0], np.cumsum(scores(lengths, window))])
    chunks = np.diff(before[place] + scores(borders - bounds[place], window))
    of_groups = chunks[groups.chunk_order()].reshape(groups.devices, -1).sum(1)
    return np.repeat(of_groups / sequence_sharding.exchanging, sequence_sharding.exchanging)


def imbalance(work: np.ndarray) -> float:
    """The maximum over the mean; 1 if all are equal."""
    return float(work.max() / work.mean())


@dataclass(frozen=True, slots=True)
class RowWork:
    """The cost of the positions and scores of a row, in any unit, such as FLOPs of a step."""

    per_position: float = 0.0
    """Cost of a position, without its scores."""
    per_score: tuple[tuple[int | None, float], ...] = ((None, 1.0),)
    """(window, cost of a score of the layers with this window)."""

    def of_devices(self, lengths: np.ndarray, sequence_sharding: SequenceSharding = UNSHARDED_ROWS) -> np.ndarray:
        """Cost on each device that has a part of a row with documents of these lengths, float64 [C]."""
        work = np.full(sequence_sharding.devices, self.per_position * int(np.sum(lengths)) / sequence_sharding.devices)
        for window, cost in self.per_score:
            work += cost * device_scores(lengths, sequence_sharding, window)
        return work

    def of_row(self, lengths: np.ndarray, sequence_sharding: SequenceSharding = UNSHARDED_ROWS) -> float:
        """Cost on the busiest device of a row, for which the others wait in each layer."""
        return float(self.of_devices(lengths, sequence_sharding).max())
