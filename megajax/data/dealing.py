"""Rows of a step dealt out over data groups by their work, so that no group waits long for another.

A data group is the devices that hold the same rows. A step has G rows, [M, B]: M microbatches of B rows; a group holds
b = B / groups rows that follow each other of each microbatch.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from megajax.data.attention_work import RowWork, imbalance, lengths_of_row
from megajax.mesh.row_cut import WHOLE, RowCut


def dealt_rows(work: np.ndarray, groups: int, microbatches: int, *, across: bool) -> np.ndarray:
    """Which row of a step stands at each place, int64 [G].

    In each microbatch the row with the most work goes to the group with the least work so far in this microbatch, and
    of equals in the step (Graham 1969, "Bounds on Multiprocessing Timing Anomalies": longest processing time first).
    Ties go to the first row and to the first group, so every process finds the same places.

    With `across`, microbatches have rows of like work: those with the most in the first, and so on. Groups that meet
    in each microbatch (where weights are gathered, or tokens sent to experts) then wait least, and so do the stages of
    a pipeline, which work on neighbouring microbatches at the same time.

    Args:
        work: float [G], of each row.
        groups: data groups, which divide B.
        microbatches: M.
        across: rows may change their microbatch.
    """
    rows = np.arange(len(work)).reshape(microbatches, -1)
    if across:
        rows = np.argsort(-work, kind="stable").reshape(rows.shape)
    each = rows.shape[1] // groups
    in_step, places = np.zeros(groups), np.empty((microbatches, groups, each), np.int64)
    for number, micro in enumerate(rows):
        load, held = np.zeros(groups), np.zeros(groups, np.int64)
        for row in micro[np.lexsort((micro, -work[micro]))].tolist():
            order = np.lexsort((in_step, load))
            group = int(order[held[order] < each][0])
            places[number, group, held[group]] = row
            held[group] += 1
            load[group] += work[row]
            in_step[group] += work[row]
    return places.ravel()


class Imbalance(NamedTuple):
    """Work of the busiest data group over the mean."""

    step: float
    """Of the sums over a step: groups that meet at its end wait for that."""
    microbatch: float
    """Of the sum over microbatches of the busiest in each: groups that meet in each wait for that."""

    @classmethod
    def of(cls, work: np.ndarray, groups: int, microbatches: int) -> "Imbalance":
        """work: float [G], of the rows at their places."""
        each = work.reshape(microbatches, groups, -1).sum(2)
        return cls(imbalance(each.sum(0)), float(each.max(1).sum() / each.mean(1).sum()))


@dataclass(frozen=True, slots=True)
class Dealing:
    """How rows are dealt out."""

    work: RowWork
    across: bool
    """A row may change its microbatch."""


@dataclass(frozen=True, slots=True)
class DealtSteps:
    """The steps of a row source, of equal size. Every process needs the lengths of the documents of all rows."""

    dealing: Dealing
    source: Any
    """Rows by number; see `lengths_of_row`."""
    microbatches: int
    micro_rows: int
    """B."""
    groups: int
    cut: RowCut = WHOLE

    def work(self, first: int) -> np.ndarray:
        """Of each row of the step that begins with row `first`, float64 [G]."""
        rows = range(first, first + self.microbatches * self.micro_rows)
        return np.array([self.dealing.work.of_row(lengths_of_row(self.source, row), self.cut) for row in rows])

    def places(self, first: int) -> np.ndarray:
        """Which row stands at each place of this step, counted from `first`, int64 [G]."""
        return dealt_rows(self.work(first), self.groups, self.microbatches, across=self.dealing.across)

    def imbalance(self, first: int) -> tuple[Imbalance, Imbalance]:
        """Of this step, with its rows in their order and as dealt out."""
        work = self.work(first)
        places = dealt_rows(work, self.groups, self.microbatches, across=self.dealing.across)
        shape = self.groups, self.microbatches
        return Imbalance.of(work, *shape), Imbalance.of(work[places], *shape)
