"""The wall time of a run: by cause, and as a bar with attempts, their phases and marks."""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise, zip_longest
from typing import NamedTuple

import numpy as np

from megajax.display.charts import Box, EventMark, TimelineChart
from megajax.display.text import duration
from megajax.faults.attempt_end import describe_failure
from megajax.metrics.throughput import Goodput
from megajax.reporting.attempts import PastAttempt
from megajax.reporting.history import STATUS, Event, History

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
class TimeShare:
    """A part of the wall time."""

    cause: str
    seconds: float
    part: float
    """Share of the wall time, 0 to 1."""
    note: str = ""


def time_by_cause(history: History, runs: Sequence[PastAttempt]) -> list[TimeShare]:
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
    return [
        TimeShare(cause, seconds, seconds / wall, NOTES.get(cause, "")) for cause, seconds in causes.items() if seconds
    ]


def goodput(history: History, runs: Sequence[PastAttempt]) -> Goodput | None:
    """The share of the wall time in steps whose result was kept; None without attempts."""
    shares = {share.cause: share.seconds for share in time_by_cause(history, runs)}
    if not shares:
        return None
    effective = shares.pop(STEPS, 0.0)
    return Goodput(effective + sum(shares.values()), effective, len(runs), shares)


def exposed_wait(history: History, runs: Sequence[PastAttempt]) -> tuple[float, float]:
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


def _typical(history: History, runs: Sequence[PastAttempt]) -> float:
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


UNITS = ((120.0, 1.0, "s"), (3 * 3600.0, 60.0, "min"), (3 * 86400.0, 3600.0, "h"), (float("inf"), 86400.0, "d"))
"""Largest length in seconds, seconds of a unit, and name of the unit."""

LETTERS = {
    STEPS: "=",
    "evaluation": "e",
    "saving": "s",
    "setup": ".",
    "restoring": "r",
    "compiling": "c",
    "steps run again": "x",
    "stuck": "!",
    "between attempts": " ",
    "other": "-",
}
"""Cause of time -> its character in the text bar."""

UNMARKED = ("persistent_fault", "evaluation_broken_off", "update_skipped", "layer_warning", "stopped", "restart")
MARKED = {name: status for name, status in STATUS.items() if name not in UNMARKED} | {"save_committed": "save"}
"""Event -> kind of its mark."""

COLUMNS = 100
"""Width of the text bar in characters."""

APART = 0.02
"""Minimum distance between numbers of attempts, as a share of the time; closer numbers are omitted."""


class TimedPhase(NamedTuple):
    """A phase of a run; times in seconds since its start."""

    cause: str
    start: float
    length: float


@dataclass(frozen=True, slots=True)
class RunTimeline:
    """The bar of a run."""

    spans: Sequence[TimedPhase]
    """Later spans cover earlier ones."""
    marks: Sequence[EventMark]
    starts: Sequence[tuple[float, str]]
    """Start and number of each attempt."""
    length: float
    """Seconds."""

    def svg(self) -> str:
        """The bar as an <svg>."""
        _, unit, name = next(row for row in UNITS if self.length <= row[0])
        boxes: dict[str, list[Box]] = defaultdict(list)
        for span in self.spans:
            boxes[span.cause.replace(" ", "-")].append(Box(0, span.start / unit, span.length / unit))
        return TimelineChart(
            title="phases of the run",
            rows=("attempt",),
            boxes=boxes,
            end=self.length / unit,
            names={cause.replace(" ", "-"): cause for cause in LETTERS},
            breaks=[(at / unit, number) for at, number in self._numbers()],
            marks=[replace(mark, x=mark.x / unit) for mark in self.marks],
            time_text=lambda time: f"{time:g} {name}",
        ).svg()

    def text(self) -> str:
        """The bar as text: numbers of attempts, the bar, failures, and a legend."""
        bar = [" "] * COLUMNS
        for span in self.spans:
            first, last = self._column(span.start), self._column(span.start + span.length)
            small = span.length < 0.5 * self.length / COLUMNS
            if not small:
                bar[first : max(last, first + 1)] = LETTERS.get(span.cause, "-") * (max(last, first + 1) - first)
        numbers, failures = [" "] * COLUMNS, [" "] * COLUMNS
        for at, number in self._numbers():
            column = min(self._column(at), COLUMNS - len(number))
            numbers[column : column + len(number)] = number
        for mark in self.marks:
            if mark.kind == "bad":
                failures[self._column(mark.x)] = "^"
        used = [f"{letter} {cause}" for cause, letter in LETTERS.items() if letter in bar and letter != " "]
        lines = [" " + "".join(numbers).rstrip(), f"|{''.join(bar)}| {duration(self.length)}"]
        lines += [" " + "".join(failures).rstrip()] if "^" in failures else []
        return "\n".join([*lines, "  ".join([*used, *["^ failure"] * ("^" in failures)])])

    def _column(self, at: float) -> int:
        return min(max(int(at / (self.length or 1.0) * COLUMNS), 0), COLUMNS - 1)

    def _numbers(self) -> Iterator[tuple[float, str]]:
        last = float("-inf")
        for at, number in self.starts:
            if at - last >= APART * self.length:
                last = at
                yield at, number


def timeline(runs: Sequence[PastAttempt]) -> RunTimeline | None:
    """The bar of a run; None if no time has passed."""
    if not runs or runs[-1].end <= runs[0].begin:
        return None
    begin = runs[0].begin
    spans = [
        TimedPhase(cause, start - begin, end - start)
        for run, after in zip_longest(runs, runs[1:])
        for cause, start, end in _phases(run, after)
        if end > start
    ]
    several = any((run.start.get("processes") or 1) != 1 for run in runs)
    marks = [
        EventMark(event.at - begin, kind, _mark_text(event, several=several), line=kind != "save")
        for run in runs
        for event in run.events
        if (kind := MARKED.get(event.name))
    ]
    marks += [EventMark(run.begin - begin, "resume", _resume_text(run)) for run in runs[1:]]
    starts = [(run.begin - begin, str(run.number)) for run in runs]
    return RunTimeline(spans, marks, starts, runs[-1].end - begin)


def _phases(run: PastAttempt, after: PastAttempt | None) -> Iterator[tuple[str, float, float]]:
    """Cause, start and end of the phases of an attempt, in drawing order."""
    ready = run.ready or run.end
    yield "setup", run.begin, ready
    first = next((event.at for event in run.events if event.name == "first_step"), run.progress)
    yield "compiling", ready, first
    yield STEPS, first, run.progress
    if run.rerun_seconds:
        yield "steps run again", max(first, run.progress - run.rerun_seconds), run.progress
    yield "other" if run.outcome.orderly else "stuck", run.progress, run.end
    if after is not None:
        yield "between attempts", run.end, after.begin
    blocked = {event.step: event.seconds("blocking_seconds") for event in run.events if event.name == "save_committed"}
    for event in run.events:
        if event.name == "evaluate":
            yield "evaluation", event.at - event.seconds("seconds"), event.at
        elif event.name == "restored":
            yield "restoring", event.at - event.seconds("seconds"), event.at
        elif event.name == "save_begun":
            yield "saving", event.at, event.at + blocked.get(event.step, 0.0)


def _mark_text(event: Event, *, several: bool) -> str:
    if event.name in ("crash", "hang", "lost"):
        return describe_failure(event.name, {**event.fields, "step": event.step}, several=several)
    why = event.text("why") or event.text("message") or event.text("signal")
    step = "" if event.step is None else f"step {event.step:,}: "
    return f"{step}{event.name.replace('_', ' ')}{': ' * bool(why)}{why}"


def _resume_text(run: PastAttempt) -> str:
    detail = f" after step {run.first_step:,}" if run.ready is not None else ", which did not finish its setup"
    return f"attempt {run.number}{detail}"
