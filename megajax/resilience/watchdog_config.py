"""Settings of the watchdog: how long a phase may take before the process counts as hung."""

from dataclasses import dataclass, fields

from megajax.config.errors import Problem
from megajax.resilience.activity import COMPILE

LONGEST = 1e8
"""Seconds: three years. Timers of the operating system and of XLA can't wait for ever."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WatchdogConfig:
    """Limits in seconds. A process in which a phase takes longer ends with exit code 124. The limit of a phase is
    `factor` times its median in this run, and at least the value below."""

    factor: float = 10.0
    """A phase may take this many times as long as the median of the last 64."""
    step: float = 600.0
    """A train step: computation, and collectives with other processes."""
    data_wait: float = 600.0
    """Waiting for the rows of a step."""
    evaluation: float = 1800.0
    """A batch or an answer of an evaluation."""
    save: float = 7200.0
    """The part of a save that holds training up, including the wait for the save before it."""
    background_save: float = 7200.0
    """Writing and committing a checkpoint while training goes on."""
    compile: float = 7200.0
    """Compiling a program. Also the minimum for the first of each phase, for another process may compile then."""
    setup: float = 7200.0
    """Everything before the first step: index files, weights, reading a checkpoint."""
    finish: float = 7200.0
    """What follows the last step: the last save, evaluations, report."""
    other: float = 1800.0
    """Any other phase."""

    def floor(self, phase: str) -> tuple[str, float]:
        """The setting for a phase, and its value."""
        name = phase if phase in PHASES else "other"
        return name, getattr(self, name)

    def problems(self) -> list[Problem]:
        off = f"{LONGEST:g} is never in practice, and resilience.watchdog=none turns the watchdog off"
        problems = [
            Problem(name, f"must be above 0 and at most {LONGEST:g} seconds, got {value:g}", off)
            for name in (*PHASES, "other")
            if not 0 < (value := getattr(self, name)) <= LONGEST
        ]
        if not 1 <= self.factor <= LONGEST:
            problems.append(Problem("factor", f"must be from 1 to {LONGEST:g}, got {self.factor:g}"))
        return problems


PHASES = tuple(each.name for each in fields(WatchdogConfig) if each.name not in ("factor", "other"))
"""Phases with a limit of their own."""
assert COMPILE in PHASES
