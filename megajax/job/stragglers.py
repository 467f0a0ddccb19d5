"""Stragglers: processes that keep the others waiting, from the times that all of them measured phase by phase."""

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from statistics import median
from typing import NamedTuple, Self

from megajax.resilience.integrity_config import StragglersConfig
from megajax.training.loop import StepInfo
from megajax.training.timing import EXCHANGED, HOST, STALLED

WINDOW = 64
"""Steps whose median is the time of a step."""

MIN_SECONDS = 1e-3
"""A factor is a quotient by at least this."""

MIN_EXCESS = 0.01
"""Seconds by which a straggler is slower at least: in steps of milliseconds, a share of one is what any scheduler of
processes takes now and then."""

PHASE_NAMES = {
    HOST: "its own work on the host between steps",
    STALLED: "not running at all (stopped, starved of processors, or swapping)",
}
"""For people; other phases are called by their names."""

TICK_SECONDS = 0.05
"""How often the thread of Stalls wants to run."""

TOLERATED_SECONDS = 0.05
"""A thread that wakes this much too late did not stall: other threads hold the interpreter for a while."""


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


class StragglerRule:
    """Compares the times of all processes, and remembers who was slow before."""

    def __init__(self, cfg: StragglersConfig, phases: Sequence[str]):
        self._cfg, self._phases = cfg, tuple(phases)
        self._slow: dict[tuple[int, str], Straggler] = {}

    def __call__(
        self, first: int, step_seconds: float, seconds: Sequence[Sequence[float]]
    ) -> tuple[list[Straggler], list[Straggler]]:
        """-> those that have become stragglers, and those that no longer are.

        first: the first step that the times are of. step_seconds: the median of a step. seconds: [processes][phases].
        """
        slow, before = {}, self._slow
        for phase, column in zip(self._phases, zip(*seconds, strict=True), strict=True):
            for process, own in enumerate(column):
                others = median([*column[:process], *column[process + 1 :]])
                factor = own / max(others, MIN_SECONDS)
                excess = max(self._cfg.share * step_seconds, MIN_EXCESS)
                if self._cfg.factor is not None and factor > self._cfg.factor and own - others >= excess:
                    new = Straggler(process, phase, round(factor, 1), round(own, 4), round(others, 4), first)
                    slow[process, phase] = before.get((process, phase), new)
        self._slow = slow
        return [slow[key] for key in slow if key not in before], [before[key] for key in before if key not in slow]


class WatchStragglers:
    """Gets every step's numbers, some with the times of all processes; says who is slow when that changes."""

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
                    f"times as long as the others, {slow.seconds:.3f} s and not {slow.others:.3f} s, for {phase}"
                )
            for slow in recovered:
                self._event("straggler_over", step=info.step, process=slow.process, phase=slow.phase)
                self._say(f"step {info.step}: process {slow.process} is no longer slow ({slow.phase})")
            self._first = info.step
        self._seconds.append(info.seconds)


class Stalls:
    """Measures how long this process did not run at all: stopped by a signal, starved of processors, or swapped out.

    A thread sleeps briefly again and again and adds up by how much it woke too late.
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
            late = now - before - TICK_SECONDS
            self.seconds += late if late > TOLERATED_SECONDS else 0.0
            before = now
