"""The wall time of a run as a bar: attempts, their phases, and marks for failures, saves and fallbacks."""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from typing import NamedTuple

from megajax.display.charts import Box, Mark, Timeline
from megajax.display.text import duration
from megajax.reporting.attempts import Attempt
from megajax.reporting.history import STATUS, Event
from megajax.reporting.how_runs_end import describe_failure
from megajax.reporting.time_shares import STEPS

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


class Span(NamedTuple):
    """A phase of a run; times in seconds since its start."""

    cause: str
    start: float
    length: float


@dataclass(frozen=True, slots=True)
class RunTimeline:
    """The bar of a run."""

    spans: Sequence[Span]
    """Later spans cover earlier ones."""
    marks: Sequence[Mark]
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
        return Timeline(
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


def timeline(runs: Sequence[Attempt]) -> RunTimeline | None:
    """The bar of a run; None if no time has passed."""
    if not runs or runs[-1].end <= runs[0].begin:
        return None
    begin = runs[0].begin
    spans = [
        Span(cause, start - begin, end - start)
        for run, after in zip_longest(runs, runs[1:])
        for cause, start, end in _phases(run, after)
        if end > start
    ]
    several = any((run.start.get("processes") or 1) != 1 for run in runs)
    marks = [
        Mark(event.at - begin, kind, _mark_text(event, several=several), line=kind != "save")
        for run in runs
        for event in run.events
        if (kind := MARKED.get(event.name))
    ]
    marks += [Mark(run.begin - begin, "resume", _resume_text(run)) for run in runs[1:]]
    starts = [(run.begin - begin, str(run.number)) for run in runs]
    return RunTimeline(spans, marks, starts, runs[-1].end - begin)


def _phases(run: Attempt, after: Attempt | None) -> Iterator[tuple[str, float, float]]:
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
        return describe_failure(event, several=several)
    why = event.text("why") or event.text("message") or event.text("signal")
    step = "" if event.step is None else f"step {event.step:,}: "
    return f"{step}{event.name.replace('_', ' ')}{': ' * bool(why)}{why}"


def _resume_text(run: Attempt) -> str:
    detail = f" after step {run.first_step:,}" if run.ready is not None else ", which did not finish its setup"
    return f"attempt {run.number}{detail}"
