"""The attempts of a run: when they started and ended, how, and where their time went.

metrics.jsonl has the duration of each step, events.jsonl the time of each event. A killed attempt records no end: it is
taken to end after its last event and the steps it logged since then.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise, zip_longest
from typing import Any

import numpy as np

from megajax.reporting.history import Event, History

START, OPENING = "start", "metrics_superseded"
"""The first event of an attempt, and one that may precede it."""

ENDS = {"end": 0, "numeric_fault": 17}
"""Last event of an attempt -> its exit code, if the event has none."""

NOTES = {
    "steps": "those that counted, without compilation",
    "saving": "only while training waited for it",
    "compiling": "up to the end of each attempt's first step",
    "profiling": "starting and ending traces",
    "steps run again": "done, and lost to a restart",
    "between attempts": "waiting for a restart, and setting up",
    "other": "not accounted for",
}
"""Cause of time -> what it includes."""


@dataclass(frozen=True, slots=True)
class Attempt:
    """One process (group) of the run, from the end of its setup on."""

    number: int
    """From 1."""
    begin: float
    """Seconds since 1970, when it was ready to train."""
    end: float
    """Time of its last event or step."""
    first_step: int
    """Steps that were done before it."""
    last_step: int
    """The last step it logged."""
    start: Mapping[str, Any]
    """Fields of the event `start`: devices, processes."""
    ending: str
    """How it ended, in words."""
    exit_code: int | None
    """None if it recorded no end: killed, crashed, or still running."""
    events: tuple[Event, ...]
    rerun_steps: int
    """How many of its steps a later attempt ran again."""
    rerun_seconds: float
    """How long these took in this attempt."""

    @property
    def seconds(self) -> float:
        """Wall time."""
        return self.end - self.begin


@dataclass(frozen=True, slots=True)
class Share:
    """A part of the wall time."""

    cause: str
    seconds: float
    part: float
    """Of the wall time, 0 to 1."""
    note: str = ""


def attempts(history: History) -> list[Attempt]:
    """The attempts in events.jsonl, in order."""
    groups = _groups(history.events)
    opened = [next((e for e in group if e.name == OPENING), None) for group in groups]
    runs, used = [], 0
    for index, (group, after) in enumerate(zip_longest(groups, groups[1:])):
        opening = opened[index + 1] if after else None
        count = opening.fields.get("lines", 0) if opening else 0
        redone = history.superseded_seconds[used : used + count] if isinstance(count, int) else ()
        used += len(redone)
        runs.append(_attempt(history, index + 1, group, redone, after[0].step if after else None))
    return runs


def _groups(events: Sequence[Event]) -> list[list[Event]]:
    """The events of each attempt, `start` first; those before it that belong to it come after it."""
    groups: list[list[Event]] = []
    early: list[Event] = []
    for event in events:
        if event.name == START:
            groups.append([event, *early])
            early = []
        elif event.name == OPENING or not groups:
            early.append(event)
        else:
            groups[-1].append(event)
    return groups


def _attempt(
    history: History, number: int, group: list[Event], redone: Sequence[float], resumed_at: int | None
) -> Attempt:
    start = group[0]
    first, steps = start.step or 0, history.steps.step
    kept = steps[(steps > first) & (steps <= (np.inf if resumed_at is None else resumed_at))]
    last = max([first, *kept[-1:].tolist(), *(event.step or 0 for event in group)])
    if redone:
        last = max(last, (resumed_at or 0) + len(redone))
    code, ending = _ending(history, group, last, followed=resumed_at is not None)
    end = max(event.time for event in group)
    if code is None:  # the steps that it logged after its last event
        since, upto = max(event.step or 0 for event in group), np.inf if resumed_at is None else resumed_at
        logged = (history.steps.step > since) & (history.steps.step <= upto)
        end += float(np.nansum(history.steps.column("step_seconds")[logged]))
        end += sum(redone[max(since - (resumed_at or 0), 0) :])
    return Attempt(
        number=number,
        begin=start.time,
        end=end,
        first_step=first,
        last_step=last,
        start=start.fields,
        ending=ending,
        exit_code=code,
        events=tuple(group),
        rerun_steps=len(redone),
        rerun_seconds=float(sum(redone)),
    )


def _ending(history: History, group: Sequence[Event], last: int, *, followed: bool) -> tuple[int | None, str]:
    named = {event.name: event for event in group}
    codes = [event.fields["exit_code"] for event in group if isinstance(event.fields.get("exit_code"), int)]
    code = codes[-1] if codes else next((code for name, code in ENDS.items() if name in named), None)
    total = history.config.get("steps")
    if code is None and isinstance(total, int) and (group[0].step or 0) >= total:
        return 0, "nothing to train"
    if code is None:
        return None, "no end recorded: killed" + (" or crashed" if followed else ", crashed, or still running")
    if "numeric_fault" in named:
        return code, str(named["numeric_fault"].fields.get("message", "numeric fault"))
    if "stopped" in named:
        saved, reason = (named["stopped"].fields.get(name) for name in ("saved", "reason"))
        return code, f"stopped ({reason}), " + ("nothing saved" if saved is None else f"step {saved} saved")
    return code, "done" if code == 0 and (not isinstance(total, int) or last >= total) else f"ended with code {code}"


def time_by_cause(history: History, runs: Sequence[Attempt]) -> list[Share]:
    """Where the wall time from the first attempt's start to the last one's end went; [] without attempts.

    The parts add up to the wall time; the last one is what is not accounted for. Setup of an attempt, before its event
    `start`, counts as time between attempts (for the first attempt it is not counted).
    """
    if not runs:
        return []
    events = [event for run in runs for event in run.events]
    firsts = [(run, event) for run in runs for event in run.events if event.name == "first_step"]
    before_first = sum(max(event.time - run.begin - _seconds(event), 0.0) for run, event in firsts)
    # The first step of an attempt includes its compilation, whether the step was kept or run again.
    typical = history.steps.median("step_seconds") or 0.0
    compiling = [(run, max(_seconds(event) - typical, 0.0)) for run, event in firsts]
    compiled = sum(seconds for _, seconds in compiling)
    lost = sum(s for run, s in compiling if run.rerun_steps and run.last_step - run.rerun_steps <= run.first_step)
    causes = {
        "steps": max(history.steps.total("step_seconds") - (compiled - lost), 0.0),
        "evaluation": sum(_seconds(event) for event in events if event.name == "evaluate"),
        "saving": sum(_seconds(event) for event in events if event.name == "save_committed"),
        "compiling": compiled + before_first,
        "profiling": history.steps.total("seconds_profile"),
        "steps run again": max(sum(run.rerun_seconds for run in runs) - lost, 0.0),
        "between attempts": sum(max(after.begin - run.end, 0.0) for run, after in pairwise(runs)),
    }
    wall = max(runs[-1].end - runs[0].begin, 1e-9)
    causes["other"] = max(wall - sum(causes.values()), 0.0)
    wall = max(wall, sum(causes.values()))
    return [Share(cause, seconds, seconds / wall, NOTES.get(cause, "")) for cause, seconds in causes.items() if seconds]


def data_wait(history: History) -> float | None:
    """Seconds process 0 waited for data, within the steps; devices may have been busy meanwhile. None if unknown."""
    return None if history.steps.median("seconds_data_wait") is None else history.steps.total("seconds_data_wait")


def _seconds(event: Event) -> float:
    value = event.fields.get("blocking_seconds", event.fields.get("seconds"))
    return float(value) if isinstance(value, int | float) else 0.0
