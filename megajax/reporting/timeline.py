"""When a run's attempts began and ended, how, and what their time went into.

metrics.jsonl says how long each step took and events.jsonl when things happened; an attempt that was killed says
nothing of its end, which is then put after its last event and the steps it logged since.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from megajax.reporting.history import Event, History

START, OPENING = "start", "metrics_superseded"
"""The event an attempt begins with, and the one that may come before it."""

ENDS = {"end": 0, "numeric_fault": 17}
"""Last event of an attempt -> the exit code that goes with it."""


@dataclass(frozen=True, slots=True)
class Attempt:
    """One start of the run's command, from the moment it was set up."""

    number: int
    """From 1."""
    begin: float
    """Seconds since 1970, when it was ready to train."""
    end: float
    """Of its last sign of life."""
    first_step: int
    """Steps done before it."""
    last_step: int
    """The last step it logged."""
    start: Mapping[str, Any]
    """Fields of the event `start`: devices, processes."""
    ending: str
    """How it ended, in words."""
    exit_code: int | None
    """None where nothing was written at its end: killed, crashed, or still running."""
    events: tuple[Event, ...]
    again: int
    """Steps of it that were later run again."""
    again_seconds: float
    """Time these had taken."""

    @property
    def seconds(self) -> float:
        """Wall time."""
        return self.end - self.begin


@dataclass(frozen=True, slots=True)
class Share:
    """What a part of the wall time went into."""

    cause: str
    seconds: float
    part: float
    """Of the wall time, 0 to 1."""
    useful: bool
    """Whether it brought the run forward."""
    note: str = ""


def attempts(history: History) -> list[Attempt]:
    """The attempts events.jsonl tells of, in order."""
    groups = list(_groups(history.events))
    opened = [next((e for e in group if e.name == OPENING), None) for group in groups]
    found, used = [], 0
    for index, group in enumerate(groups):
        after = opened[index + 1] if index + 1 < len(groups) else None
        count = after.fields.get("lines", 0) if after else 0
        redone = history.superseded_seconds[used : used + count] if isinstance(count, int) else ()
        used += len(redone)
        resumed_at = groups[index + 1][0].step if index + 1 < len(groups) else None
        found.append(_attempt(history, index + 1, group, redone, resumed_at))
    return found


def _groups(events: Sequence[Event]) -> Iterator[list[Event]]:
    """The events of each attempt, `start` first; what comes before the first start belongs to it."""
    group: list[Event] = []
    early: list[Event] = []
    for event in events:
        if event.name == START:
            if group:
                yield group
            group, early = [event, *early], []
        elif event.name == OPENING or not group:
            early.append(event)
        else:
            group.append(event)
    if group:
        yield group


def _attempt(
    history: History, number: int, group: list[Event], redone: Sequence[float], resumed_at: int | None
) -> Attempt:
    start = group[0]
    first = start.step or 0
    kept = history.steps.step
    kept = kept[kept > first] if resumed_at is None else kept[(kept > first) & (kept <= resumed_at)]
    last = max([first, *(int(step) for step in kept[-1:]), *(event.step or 0 for event in group)])
    if redone:
        last = max(last, (resumed_at or 0) + len(redone))
    code, ending = _ending(history, group, last, followed=resumed_at is not None)
    end = max(event.time for event in group)
    if code is None:
        end += _after_last_event(history, group, redone, resumed_at)
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
        again=len(redone),
        again_seconds=float(sum(redone)),
    )


def _ending(history: History, group: Sequence[Event], last: int, *, followed: bool) -> tuple[int | None, str]:
    named = {event.name: event for event in group}
    told = [event.fields["exit_code"] for event in group if isinstance(event.fields.get("exit_code"), int)]
    code = told[-1] if told else next((code for name, code in ENDS.items() if name in named), None)
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


def _after_last_event(
    history: History, group: Sequence[Event], redone: Sequence[float], resumed_at: int | None
) -> float:
    """Seconds of the steps an attempt logged after its last event."""
    newest = max(group, key=lambda event: event.time)
    since = max((event.step or 0 for event in group), default=0)
    step, seconds = history.steps.step, history.steps.column("step_seconds")
    upto = np.inf if resumed_at is None else resumed_at
    total = float(np.nansum(seconds[(step > since) & (step <= upto)]))
    if redone and resumed_at is not None:
        total += sum(redone[max(since - resumed_at, 0) :])
    return total if newest.name != START or since or total else 0.0


def time_by_cause(history: History, found: Sequence[Attempt]) -> list[Share]:
    """What the wall time from the first attempt's start to the last one's end went into; [] without any attempt.

    The parts add up to the wall time: what nothing accounts for is the last of them. Setting up an attempt before its
    event `start` lies between attempts, for the first one nowhere.
    """
    if not found:
        return []
    wall = max(found[-1].end - found[0].begin, 1e-9)
    seconds = history.steps.column("step_seconds")
    typical = float(np.nanmedian(seconds)) if np.isfinite(seconds).any() else 0.0
    events = [event for a in found for event in a.events]
    firsts = [(a, event) for a in found for event in a.events if event.name == "first_step"]
    opened = sum(max(event.time - a.begin - _seconds(event), 0.0) for a, event in firsts)
    # The first step of an attempt holds its compilation, whether the step was kept or run again.
    compiling = [(a, max(_seconds(event) - typical, 0.0)) for a, event in firsts]
    lost = sum(seconds for a, seconds in compiling if a.again and a.last_step - a.again <= a.first_step)
    kept = history.steps.total("step_seconds")
    again = sum(a.again_seconds for a in found)
    evaluation = sum(_seconds(event) for event in events if event.name == "evaluate")
    saving = sum(_seconds(event) for event in events if event.name == "save")
    gaps = sum(max(after.begin - a.end, 0.0) for a, after in pairwise(found))
    profile = history.steps.total("seconds_profile")
    built = sum(seconds for _, seconds in compiling)
    parts = [
        (
            "steps",
            max(kept - (built - lost), 0.0),
            True,
            "those that counted, without the compilation in the first of each attempt",
        ),
        ("evaluation", evaluation, True, ""),
        ("saving", saving, True, "as long as training waited for it"),
        ("compiling", built + opened, False, f"{len(found)} attempt{'s' * (len(found) > 1)}, up to the first step"),
        ("profiling", profile, False, "starting and ending traces"),
        ("steps run again", max(again - lost, 0.0), False, "done, and lost to a restart"),
        ("between attempts", gaps, False, "waiting for a restart and setting up"),
    ]
    rest = wall - sum(seconds for _, seconds, _, _ in parts)
    parts.append(("other", max(rest, 0.0), False, "not accounted for"))
    wall = max(wall, sum(seconds for _, seconds, _, _ in parts))
    return [Share(cause, seconds, seconds / wall, useful, note) for cause, seconds, useful, note in parts if seconds]


def data_wait(history: History) -> float | None:
    """Seconds the first process waited for rows; part of the steps, during which devices may have been busy."""
    column = history.steps.column("seconds_data_wait")
    return float(np.nansum(column)) if np.isfinite(column).any() else None


def _seconds(event: Event) -> float:
    value = event.fields.get("seconds", event.fields.get("blocking_seconds"))
    return float(value) if isinstance(value, int | float) else 0.0
