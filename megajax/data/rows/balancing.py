"""Load balancing: the rows of a step assigned to data groups by their work, so that no group waits long for another.

A data group is the devices that hold the same rows. A step has G rows, [M, B]: M microbatches of B rows. A group holds
b = B / groups consecutive rows of each microbatch.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from megajax.data.rows.attention_work import RowWork, imbalance, lengths_of_row
from megajax.mesh.sequence_sharding import UNSHARDED_ROWS, SequenceSharding


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
    source: Any
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
