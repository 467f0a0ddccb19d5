"""Which processes are slower than the others, phase by phase, from what all of them measured."""

from collections.abc import Sequence
from statistics import median
from typing import NamedTuple

from megajax.resilience.integrity_config import StragglersConfig

LEAST_SECONDS = 1e-3
"""What a factor is at least divided by."""
LEAST_EXCESS = 0.01
"""A process is slower by at least so many seconds: in steps of milliseconds, a share of one is what any scheduler of
processes takes now and then."""


class Straggler(NamedTuple):
    """A process that keeps the others waiting."""

    process: int
    phase: str
    factor: float
    """Its seconds over the median of the others."""
    seconds: float
    """Of a step on average; of phases that few steps have, in total."""
    others: float
    """Median of the other processes."""
    since_step: int


class Change(NamedTuple):
    """A process that became a straggler, or that no longer is one."""

    straggler: Straggler
    over: bool


class StragglerRule:
    """Takes the times of all processes, and remembers who was slow before."""

    def __init__(self, cfg: StragglersConfig, phases: Sequence[str]):
        self._cfg, self._phases = cfg, tuple(phases)
        self._now: dict[tuple[int, str], Straggler] = {}

    def __call__(self, first: int, step_seconds: float, seconds: Sequence[Sequence[float]]) -> list[Change]:
        """What has changed.

        first: the first step that the times are of. step_seconds: the median of a step. seconds: [processes][phases].
        """
        found = {}
        for number, phase in enumerate(self._phases):
            column = [row[number] for row in seconds]
            for process, own in enumerate(column):
                if (slow := self._slow(process, phase, own, column, first, step_seconds)) is not None:
                    found[process, phase] = slow
        changes = [Change(slow, over=False) for key, slow in found.items() if key not in self._now]
        changes += [Change(slow, over=True) for key, slow in self._now.items() if key not in found]
        self._now = {key: self._now.get(key, slow) for key, slow in found.items()}
        return changes

    def _slow(
        self, process: int, phase: str, own: float, column: Sequence[float], first: int, step_seconds: float
    ) -> Straggler | None:
        others = median([*column[:process], *column[process + 1 :]])
        factor = own / max(others, LEAST_SECONDS)
        least = max(self._cfg.share * step_seconds, LEAST_EXCESS)
        if self._cfg.factor is None or factor <= self._cfg.factor or own - others < least:
            return None
        return Straggler(process, phase, round(factor, 1), round(own, 4), round(others, 4), first)
