"""The wall time of a run by cause."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from megajax.metrics.goodput import Goodput
from megajax.reporting.attempts import Attempt
from megajax.reporting.history import Event, History

STEPS = "steps"

NOTES = {
    STEPS: "steps whose result was kept, without compilation",
    "waiting for data": "time by which it prolonged steps",
    "saving": "only while training waited",
    "checks": "of replicas and devices, and other work between steps",
    "setup": "from the start of the process to the first step's compilation",
    "restoring": "reading a checkpoint",
    "compiling": "up to the end of each attempt's first step",
    "profiling": "starting and stopping traces",
    "steps run again": "steps lost to a restart",
    "stuck": "from the last progress of a failed attempt to its end",
    "between attempts": "waiting for a restart",
    "other": "not accounted for",
}
"""Cause of time -> what it includes."""

FAST = 10
"""Percentile of step times taken as the time of a step that does not wait for data."""

KNOWN_PHASES = frozenset(("seconds_data_wait", "seconds_evaluation", "seconds_save", "seconds_profile"))
"""Columns of metrics.jsonl with their own cause."""


@dataclass(frozen=True, slots=True)
class Share:
    """A part of the wall time."""

    cause: str
    seconds: float
    part: float
    """Share of the wall time, 0 to 1."""
    note: str = ""


def time_by_cause(history: History, runs: Sequence[Attempt]) -> list[Share]:
    """The wall time from the start of the first attempt to the end of the last, by cause; [] without attempts.

    The shares add up to the wall time; the last one is the unexplained rest.
    """
    if not runs:
        return []
    events = [event for run in runs for event in run.events]
    firsts = [(run, event) for run in runs for event in run.events if event.name == "first_step"]
    waited = [event.at - (run.ready or run.begin) - event.seconds("seconds") for run, event in firsts]
    before_first = sum(max(seconds, 0.0) for seconds in waited)
    # The first step of an attempt includes its compilation, even if a later attempt repeated it.
    typical = _typical(history, runs)
    compiling = [(run, max(event.seconds("seconds") - typical, 0.0)) for run, event in firsts]
    compiled = sum(seconds for _, seconds in compiling)
    rerun_compilation = sum(
        s for run, s in compiling if run.rerun_steps and run.last_step - run.rerun_steps <= run.first_step
    )
    inside, outside = exposed_wait(history, runs)
    restored = _total(events, "restored", "seconds")
    causes = {
        STEPS: max(history.steps.total("step_seconds") - (compiled - rerun_compilation) - inside, 0.0),
        "waiting for data": inside + outside,
        "evaluation": max(_total(events, "evaluate", "seconds"), history.steps.total("seconds_evaluation")),
        "saving": max(_total(events, "save_committed", "blocking_seconds"), history.steps.total("seconds_save")),
        "checks": sum(history.steps.total(name) for name in _checks(history)),
        "setup": max(sum(run.ready - run.begin for run in runs if run.ready is not None) - restored, 0.0),
        "restoring": restored,
        "compiling": compiled + before_first,
        "profiling": history.steps.total("seconds_profile"),
        "steps run again": max(sum(run.rerun_seconds for run in runs) - rerun_compilation, 0.0),
        "stuck": sum(run.end - run.progress for run in runs if not run.outcome.orderly),
        "between attempts": sum(max(after.begin - run.end, 0.0) for run, after in pairwise(runs)),
    }
    wall = max(runs[-1].end - runs[0].begin, 1e-9)
    causes["other"] = max(wall - sum(causes.values()), 0.0)
    wall = max(wall, sum(causes.values()))
    return [Share(cause, seconds, seconds / wall, NOTES.get(cause, "")) for cause, seconds in causes.items() if seconds]


def goodput(history: History, runs: Sequence[Attempt]) -> Goodput | None:
    """The share of the wall time in steps whose result was kept; None without attempts."""
    shares = {share.cause: share.seconds for share in time_by_cause(history, runs)}
    if not shares:
        return None
    effective = shares.pop(STEPS, 0.0)
    return Goodput(effective + sum(shares.values()), effective, len(runs), shares)


def exposed_wait(history: History, runs: Sequence[Attempt]) -> tuple[float, float]:
    """Estimated seconds that devices waited for data: (within step times, between steps).

    The process waits for the rows of a step while the previous step runs. A wait therefore prolongs the previous step:
    by its excess over fast steps, but no more than the wait. After an evaluation or a save, no step runs meanwhile, and
    the whole wait counts. The wait for the first step of an attempt counts as compiling.
    """
    steps = history.steps
    waits, times = np.nan_to_num(steps.column("seconds_data_wait")), np.nan_to_num(steps.column("step_seconds"))
    if not waits.any() or not len(steps):
        return 0.0, 0.0
    compiles = np.isin(steps.step, [run.first_step + 1 for run in runs])
    idle = np.zeros(len(steps), bool)
    for name in {"seconds_evaluation", "seconds_save", *_checks(history)}:
        idle |= (np.nan_to_num(steps.column(name)) > 0) & ~compiles
    excess = np.maximum(times - np.percentile(times if compiles.all() else times[~compiles], FAST), 0.0)
    following = (np.diff(steps.step) == 1) & ~idle[1:] & ~compiles[1:] & ~compiles[:-1]
    return float(np.minimum(excess[:-1], waits[1:])[following].sum()), float(waits[idle].sum())


def _typical(history: History, runs: Sequence[Attempt]) -> float:
    """Median seconds of all steps except the first of each attempt; 0 without such steps."""
    steps = history.steps
    times = steps.column("step_seconds")[~np.isin(steps.step, [run.first_step + 1 for run in runs])]
    times = times[np.isfinite(times)]
    return float(np.median(times)) if len(times) else 0.0


def data_wait(history: History) -> float | None:
    """Seconds that process 0 waited for data, while devices may have been busy; None if unknown."""
    return None if history.steps.median("seconds_data_wait") is None else history.steps.total("seconds_data_wait")


def _checks(history: History) -> Iterator[str]:
    """Columns of hooks without their own cause."""
    for name in history.steps.columns:
        if name.startswith("seconds_") and name not in KNOWN_PHASES and not name.endswith(("_min", "_max")):
            yield name


def _total(events: Sequence[Event], name: str, field: str) -> float:
    return sum(event.seconds(field) for event in events if event.name == name)
