"""Load balancing: the rows of a step assigned to data groups by their work, so that no group waits long for another.

A data group is the devices that hold the same rows. A step has G rows, [M, B]: M microbatches of B rows. A group holds
b = B / groups consecutive rows of each microbatch.

The attention work of a row is the scores of its documents: a query has a score with each key that it attends to, so a
document of n tokens needs n (n + 1) / 2 scores. Rows of equal length can differ a hundredfold, with one document or a
hundred. All other layers have equal work for every row. C devices of `context` hold parts of a row of S positions; see
`megajax.mesh.zigzag_order`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from megajax.data.rows.row_source import RowSource
from megajax.layers.multiply_adds import VisibleKeys
from megajax.mesh.zigzag_order import UNSHARDED_ROWS, SequenceSharding


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


CAUSAL = VisibleKeys(causal=True)


def device_scores(
    lengths: np.ndarray, sequence_sharding: SequenceSharding = UNSHARDED_ROWS, visible: VisibleKeys = CAUSAL
) -> np.ndarray:
    """Scores of a row on each device, float64 [C]. lengths: int [D], with a sum that `sequence_sharding` divides.

    Devices that exchange heads compute equal shares of their common part.
    """
    bounds = np.concatenate([[0], np.cumsum(lengths)])
    groups = sequence_sharding.exchanged()
    borders = np.linspace(0, bounds[-1], groups.unit + 1).astype(np.int64)
    place = np.minimum(np.searchsorted(bounds, borders, side="right") - 1, len(lengths))
    before = np.concatenate([[0.0], np.cumsum(visible.pairs(lengths))])
    chunks = np.diff(before[place] + visible.pairs(borders - bounds[place]))
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
    per_score: tuple[tuple[VisibleKeys, float], ...] = ((CAUSAL, 1.0),)
    """(mask, cost of a score of the layers with this mask)."""

    def of_devices(self, lengths: np.ndarray, sequence_sharding: SequenceSharding = UNSHARDED_ROWS) -> np.ndarray:
        """Cost on each device that has a part of a row with documents of these lengths, float64 [C]."""
        work = np.full(sequence_sharding.devices, self.per_position * int(np.sum(lengths)) / sequence_sharding.devices)
        for visible, cost in self.per_score:
            work += cost * device_scores(lengths, sequence_sharding, visible)
        return work

    def of_row(self, lengths: np.ndarray, sequence_sharding: SequenceSharding = UNSHARDED_ROWS) -> float:
        """Cost on the busiest device of a row, for which the others wait in each layer."""
        return float(self.of_devices(lengths, sequence_sharding).max())


def balance_rows(work: np.ndarray, groups: int, microbatches: int, *, across: bool) -> np.ndarray:
    """The row of the step at each place of the batch, int64 [G].

    In each microbatch, the row with the most work goes to the group with the least work so far in this microbatch, and
    among equals in the step (Graham 1969, "Bounds on Multiprocessing Timing Anomalies": longest processing time first).
    Ties go to the first row and to the first group, so all processes compute the same places.

    With `across`, a microbatch has rows of similar work: the first has those with the most work, and so on. This
    minimizes the waiting of groups that synchronize in each microbatch (to gather weights, or to send tokens to
    experts), and of pipeline stages, which work on adjacent microbatches at the same time.

    Args:
        work: float [G], of each row.
        groups: data groups, which divide B.
        microbatches: M.
        across: rows may move to another microbatch.
    """
    rows = np.arange(len(work)).reshape(microbatches, -1)
    if across:
        rows = np.argsort(-work, kind="stable").reshape(rows.shape)
    group_rows = rows.shape[1] // groups
    in_step, places = np.zeros(groups), np.empty((microbatches, groups, group_rows), np.int64)
    for number, micro in enumerate(rows):
        load, filled = np.zeros(groups), np.zeros(groups, np.int64)
        for row in micro[np.lexsort((micro, -work[micro]))].tolist():
            order = np.lexsort((in_step, load))
            group = int(order[filled[order] < group_rows][0])
            places[number, group, filled[group]] = row
            filled[group] += 1
            load[group] += work[row]
            in_step[group] += work[row]
    return places.ravel()


class Imbalance(NamedTuple):
    """Work of the busiest data group over the mean."""

    step: float
    """With the work summed over the step: for groups that synchronize at its end."""
    microbatch: float
    """With the busiest group of each microbatch, summed: for groups that synchronize in each microbatch."""

    @classmethod
    def of(cls, work: np.ndarray, groups: int, microbatches: int) -> "Imbalance":
        """work: float [G], of the rows at their places."""
        group_work = work.reshape(microbatches, groups, -1).sum(2)
        return cls(imbalance(group_work.sum(0)), float(group_work.max(1).sum() / group_work.mean(1).sum()))


@dataclass(frozen=True, slots=True)
class Balancing:
    """How rows are balanced over data groups."""

    work: RowWork
    across: bool
    """A row may move to another microbatch."""


@dataclass(frozen=True, slots=True)
class BalancedSteps:
    """The steps of a row source, of equal size. Every process needs the document lengths of all rows."""

    balancing: Balancing
    source: RowSource
    """Rows by number; see `lengths_of_row`."""
    microbatches: int
    micro_rows: int
    """B."""
    groups: int
    sequence_sharding: SequenceSharding = UNSHARDED_ROWS

    def work(self, first: int) -> np.ndarray:
        """The work of each row of the step that begins with row `first`, float64 [G]."""
        rows = range(first, first + self.microbatches * self.micro_rows)
        return np.array(
            [self.balancing.work.of_row(lengths_of_row(self.source, row), self.sequence_sharding) for row in rows]
        )

    def places(self, first: int) -> np.ndarray:
        """The row at each place of this step, counted from `first`, int64 [G]."""
        return balance_rows(self.work(first), self.groups, self.microbatches, across=self.balancing.across)

    def imbalance(self, first: int) -> tuple[Imbalance, Imbalance]:
        """Imbalance of this step, with its rows in order and balanced."""
        work = self.work(first)
        places = balance_rows(work, self.groups, self.microbatches, across=self.balancing.across)
        shape = self.groups, self.microbatches
        return Imbalance.of(work, *shape), Imbalance.of(work[places], *shape)
