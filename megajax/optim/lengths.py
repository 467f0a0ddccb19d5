"""Lengths of parts of a schedule: in samples, and in the unit in which a user gave them; without importing jax."""

from bisect import bisect_left, bisect_right
from collections.abc import Callable
from typing import Literal, NamedTuple

from megajax.config.errors import Problem

type Samples = Callable[[int], int]
"""Steps -> rows they read from the start of the run on; not a plain product where the batch size is ramped."""


class Length(NamedTuple):
    """A part of the schedule as the user gave it."""

    setting: str
    """The dotted name that says how long it is."""
    count: int
    """Its length."""
    unit: Literal["steps", "samples"]
    """What that counts."""

    def beyond(self, end: "Length", part: str, mine: float, others: float, hint: str) -> Problem:
        """This part takes `mine` samples, more than the `others` until `end`; samples are told where units differ."""
        taken, limit = f"{self.count} {self.unit}", f"{end.count} {end.unit}"
        if self.unit != end.unit:
            taken += f" ({mine:g} samples)" if self.unit == "steps" else ""
            limit += f" ({others:g} samples)" if end.unit == "steps" else ""
        where = "the whole run has" if end.setting == "steps" else "the decay ends after"
        return Problem(self.setting.removeprefix("schedule."), f"the {part} takes {taken}, {where} {limit}", hint)


def rows_of(steps: int, global_size: int, samples: Samples | None) -> int:
    """Rows that the first steps read."""
    return steps * global_size if samples is None else samples(steps)


class RowsOfSteps:
    """Steps for rows, the inverse of `Samples`."""

    def __init__(self, global_size: int, samples: Samples | None):
        self.of = lambda steps: rows_of(steps, global_size, samples)

    def steps_beyond(self, rows: float) -> int:
        """Fewest steps that read more than `rows`; every step reads at least one."""
        return bisect_right(range(_bounded(rows) + 2), rows, key=self.of)

    def steps_below(self, rows: int) -> int:
        """Most steps that read less than `rows`; -1 where even no step reads as many."""
        return bisect_left(range(_bounded(rows) + 1), rows, key=self.of) - 1


def _bounded(rows: float) -> int:
    return int(min(rows, 2**60))
