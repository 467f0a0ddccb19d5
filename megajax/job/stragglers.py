"""Finds stragglers, processes that keep the others waiting, from the times of all processes in each phase."""

import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from statistics import median
from typing import NamedTuple, Self

from megajax.faults.config import StragglersConfig
from megajax.training.guarded.phase_timers import EXCHANGED, HOST, STALLED
from megajax.training.step_report import StepInfo

WINDOW = 64
"""Number of steps in the median step time."""

MIN_SECONDS = 1e-3
"""Lower bound of the denominator of a factor."""

MIN_EXCESS = 0.01
"""Minimum seconds by which a straggler is slower: schedulers of operating systems sometimes take a share of steps of
milliseconds."""

PHASE_NAMES = {
    HOST: "its own work on the host between steps",
    STALLED: "not running at all (stopped, starved of processors, or swapping)",
}
"""Names of phases in messages; other phases keep theirs."""

TICK_SECONDS = 0.05
"""Period of the thread of Stalls."""

TOLERATED_SECONDS = 0.05
"""Delays up to this are no stall: other threads may hold the interpreter."""


CALM_READINGS = 5
"""A straggler has recovered after this many readings in a row well below the limits, and after as many more each time
that it is reported again: a process near the limits is not reported at every other reading."""


class Straggler(NamedTuple):
    """A process that keeps the others waiting. The field names are those of the event `straggler`."""

    process: int
    phase: str
    factor: float
    """`seconds` divided by `others`."""
    seconds: float
    """Mean seconds of a step; for phases that few steps have, the total."""
    others: float
    """Median seconds of the other processes."""
    since_step: int


class StragglerRule:
    """Compares the times of all processes with the median of the others, and keeps the current stragglers."""

    def __init__(self, cfg: StragglersConfig, phases: Sequence[str]):
        self._cfg, self._phases = cfg, tuple(phases)
        self._slow: dict[tuple[int, str], Straggler] = {}
        self._calm = Counter[tuple[int, str]]()
        """Readings in a row of a straggler that are well below the limits."""
        self._reports = Counter[tuple[int, str]]()

    def __call__(
        self, first: int, step_seconds: float, seconds: Sequence[Sequence[float]]
    ) -> tuple[list[Straggler], list[Straggler]]:
        """-> (new stragglers, former stragglers that have recovered).

        first: the first step of the times. step_seconds: the median step measured. seconds: [processes][phases].
        """
        if self._cfg.factor is None:
            return [], []
        new, recovered = [], []
        least = max(self._cfg.share * step_seconds, MIN_EXCESS)
        for phase, column in zip(self._phases, zip(*seconds, strict=True), strict=True):
            for process, measured in enumerate(column):
                typical = median([*column[:process], *column[process + 1 :]])
                key, factor, excess = (process, phase), measured / max(typical, MIN_SECONDS), measured - typical
                if key in self._slow:
                    # Halfway between the limits and the others.
                    calm = factor <= (1 + self._cfg.factor) / 2 or excess < least / 2
                    self._calm[key] = self._calm[key] + 1 if calm else 0
                    if self._calm[key] >= CALM_READINGS * self._reports[key]:
                        recovered.append(self._slow.pop(key))
                elif factor > self._cfg.factor and excess >= least:
                    self._slow[key] = Straggler(
                        process, phase, round(factor, 1), round(measured, 4), round(typical, 4), first
                    )
                    self._calm[key] = 0
                    self._reports[key] += 1
                    new.append(self._slow[key])
        return new, recovered


class WatchStragglers:
    """Called with every step's numbers, some with the times of all processes; reports changes of the stragglers."""

    def __init__(self, cfg: StragglersConfig, event: Callable[..., None], say: Callable[[str], None]):
        self._event, self._say = event, say
        self._rule = StragglerRule(cfg, EXCHANGED)
        self._seconds, self._first = deque[float](maxlen=WINDOW), 1

    def __call__(self, info: StepInfo) -> None:
        if info.by_process is not None:
            typical = median(self._seconds or [info.seconds])
            new, recovered = self._rule(self._first, typical, info.by_process.tolist())
            for slow in new:
                self._event("straggler", step=info.step, **slow._asdict())
                phase = PHASE_NAMES.get(slow.phase, slow.phase.replace("_", " "))
                self._say(
                    f"step {info.step}: process {slow.process} is slow since step {slow.since_step}: {slow.factor:g} "
                    f"times as long as the others, {slow.seconds:.3f} s instead of {slow.others:.3f} s, for {phase}"
                )
            for slow in recovered:
                self._event("straggler_over", step=info.step, process=slow.process, phase=slow.phase)
                self._say(f"step {info.step}: process {slow.process} is no longer slow ({slow.phase})")
            self._first = info.step
        self._seconds.append(info.seconds)


class Stalls:
    """Measures how long this process did not run: stopped by a signal, starved of processors, or swapped out.

    A thread repeats short sleeps and sums its delays.
    """

    def __init__(self) -> None:
        self._over = threading.Event()
        self.seconds = 0.0
        """Seconds so far."""
        self._thread = threading.Thread(target=self._tick, name="stalls", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._over.set()
        self._thread.join()

    def _tick(self) -> None:
        before = time.monotonic()
        while not self._over.wait(TICK_SECONDS):
            now = time.monotonic()
            delay = now - before - TICK_SECONDS
            self.seconds += delay if delay > TOLERATED_SECONDS else 0.0
            before = now
