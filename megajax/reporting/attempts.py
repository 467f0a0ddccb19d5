"""The attempts of a run: which events belong to each, when it began and ended, and what of it was run again.

metrics.jsonl has the duration of each step, events.jsonl the time of each event. An attempt that was killed writes no
line about its end: it is taken to end after its last event and the steps it logged since then, or when the launcher
says so.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from megajax.reporting.endings import FAILURES, NOT_DONE, Ending, ending_of
from megajax.reporting.history import Event, History

START, OPENING, RESTART, STOP = "start", "metrics_superseded", "restart", "supervisor_stop"
"""The first event of an attempt; one that may precede it; the launcher's about its beginning and the last end."""

LATE = frozenset(("save_committed", "save_failed"))
"""Events that are written some time after their step."""

SETUP = "setup"
"""Phase of a process before `start`."""


@dataclass
class Group:
    """The events of one attempt."""

    events: list[Event] = field(default_factory=list)
    """Its own, in file order, without those of the launcher about its beginning and end."""
    restart: Event | None = None
    """The launcher's, with which it began."""
    start: Event | None = None
    """None: it did not get that far."""

    def failed(self) -> bool:
        """Whether it has ended, or a process of it has."""
        return any(
            event.name in FAILURES or event.name == "end" or "exit_code" in event.fields for event in self.events
        )


@dataclass(frozen=True, slots=True)
class Attempt:
    """One process (group) of the run. Times are on the common axis of `Event.at`."""

    number: int
    """From 1."""
    begin: float
    """When its setup began, as far as that is known."""
    ready: float | None
    """When it was ready to train; None: it did not get that far."""
    progress: float
    """When its last step or other work was done."""
    end: float
    """When it was over: no earlier than `progress`."""
    first_step: int
    """Steps that were done before it."""
    last_step: int
    """The last step it logged."""
    start: Mapping[str, Any]
    """Fields of the event `start`: devices, processes."""
    how: Ending
    """How it ended."""
    restart: Event | None
    """The launcher's event with which it began."""
    events: tuple[Event, ...]
    rerun_steps: int
    """How many of its steps a later attempt ran again."""
    rerun_seconds: float
    """How long these took in this attempt."""

    @property
    def seconds(self) -> float:
        """Wall time."""
        return self.end - self.begin

    @property
    def ending(self) -> str:
        """How it ended, in words, and what the launcher did about it."""
        return self.how.text + self.how.then

    @property
    def exit_code(self) -> int | None:
        """None if nothing tells it: killed, or still running."""
        return self.how.code


def attempts(history: History) -> list[Attempt]:
    """The attempts in events.jsonl, in order."""
    groups = groups_of(history.events)
    redone = _superseded(history, groups)
    runs: list[Attempt] = []
    for index, group in enumerate(groups):
        later = [after for after in groups[index + 1 :] if after.start is not None]
        resumed_at = (later[0].start.step or 0) if later and later[0].start else None
        following = groups[index + 1] if index + 1 < len(groups) else None
        runs.append(_attempt(history, runs, group, redone.get(index, []), resumed_at, following))
    return runs


def groups_of(events: Sequence[Event]) -> list[Group]:
    """The events of each attempt.

    Lines of several processes and of the launcher follow one another as they were written: early events of an attempt
    come after its `start`, and failures of a setup without one.
    """
    groups: list[Group] = []
    opening: list[Event] = []
    for event in events:
        now = groups[-1] if groups else None
        if event.name == OPENING:
            opening.append(event)
        elif event.name == START:
            group = _begun(groups, event)
            group.start = event
            group.events = [event, *opening, *group.events]
            opening = []
        elif event.name == RESTART:
            groups.append(Group(restart=event))
        elif now is None or _of_another(now, event):
            groups.append(Group([event]))
        else:
            now.events.append(event)
    return groups


def _begun(groups: list[Group], start: Event) -> Group:
    """The group that an attempt's `start` belongs to: the present one, or a new one with what its setup wrote."""
    begin = start.at - start.seconds("setup_seconds")
    now = groups[-1] if groups else None
    if now is None:
        groups.append(Group())
    elif now.start is not None or (now.failed() and now.events[-1].at < begin):
        early = [event for event in now.events if "setup_seconds" in start.fields and event.at >= begin]
        early = [event for event in early if event.name not in ("end", START)]
        now.events = [event for event in now.events if event not in early]
        groups.append(Group(early))
    return groups[-1]


def _of_another(group: Group, event: Event) -> bool:
    """Whether a failure in the setup is of an attempt that has no other line yet."""
    if event.fields.get("phase") != SETUP:
        return False
    if group.start is not None:
        return group.failed() or any(one.name == "first_step" for one in group.events)
    process = event.whole("process")
    return any(one.name == event.name and one.whole("process") == process for one in group.events)


def _superseded(history: History, groups: Sequence[Group]) -> dict[int, list[float]]:
    """Place of a group -> seconds of its steps that were run again, in order."""
    used, last, found = 0, None, {}
    for index, group in enumerate(groups):
        opening = next((event for event in group.events if event.name == OPENING), None)
        count = (opening.whole("lines") or 0) if opening is not None else 0
        lines = history.superseded_seconds[used : used + max(count, 0)]
        used += len(lines)
        if last is not None:
            found[last] = [seconds for seconds in lines if seconds is not None]
        if group.start is not None:
            last = index
    return found


def _attempt(
    history: History,
    before: Sequence[Attempt],
    group: Group,
    redone: Sequence[float],
    resumed_at: int | None,
    following: Group | None,
) -> Attempt:
    """following: the next group; resumed_at: the step from which the next that was ready to train went on."""
    own, start = tuple(group.events), group.start
    work = [event for event in own if event.name not in NOT_DONE]
    first, last = _range(history, before, group, redone, resumed_at)
    launched = following.restart if following is not None else None
    how = ending_of(own, launched, last, _total(history), followed=following is not None)
    begin = _begin(group, before)
    ready = None if start is None else max(start.at, begin)
    progress = max([begin, *(event.at for event in work)])
    if start is not None and not any(event.name == "end" for event in own):
        progress = max(progress, _last_logged(history, work, redone, resumed_at))
    end = max([progress, *(event.at for event in own)])
    if launched is not None:
        end = max(progress, launched.at - launched.seconds("seconds_down"))
    return Attempt(
        number=len(before) + 1,
        begin=begin,
        ready=ready,
        progress=progress,
        end=end,
        first_step=first,
        last_step=last,
        start={} if start is None else start.fields,
        how=how,
        restart=group.restart,
        events=(*([group.restart] if group.restart else []), *own),
        rerun_steps=len(redone),
        rerun_seconds=float(sum(redone)),
    )


def _begin(group: Group, before: Sequence[Attempt]) -> float:
    """When the setup began, but not before the attempt before ended."""
    times = [event.at for event in group.events]
    if group.start is not None:
        times = [group.start.at - group.start.seconds("setup_seconds")]
    if group.restart is not None:
        times.append(group.restart.at)
    return max([min(times, default=0.0), *(run.end for run in before[-1:])])


def _range(
    history: History, before: Sequence[Attempt], group: Group, redone: Sequence[float], resumed_at: int | None
) -> tuple[int, int]:
    """Steps that were done before an attempt, and the last it logged."""
    if group.start is None:
        done = before[-1].last_step - before[-1].rerun_steps if before else 0
        return done, done
    first, steps = group.start.step or 0, history.steps.step
    kept = steps[(steps > first) & (steps <= (np.inf if resumed_at is None else resumed_at))]
    known = [event.step or 0 for event in group.events if event.name not in NOT_DONE]
    last = max([first, *kept[-1:].tolist(), *known])
    return first, max(last, (resumed_at or 0) + len(redone)) if redone else last


def _last_logged(history: History, work: Sequence[Event], redone: Sequence[float], resumed_at: int | None) -> float:
    """When the last step was done that an attempt logged: so long after the last event that was written at its step."""
    timely = [event for event in work if event.step is not None and event.name not in LATE]
    last = max(reversed(timely), key=lambda event: (event.step or 0, event.at), default=work[0])
    saved = [event for event in work if event.name == "save_committed" and event.step == last.step]
    blocked = sum(event.seconds("blocking_seconds") for event in saved) if last.name == "save_begun" else 0.0
    since, upto = last.step or 0, np.inf if resumed_at is None else resumed_at
    logged = (history.steps.step > since) & (history.steps.step <= upto)
    kept = float(np.nansum(history.steps.column("step_seconds")[logged]))
    return last.at + blocked + kept + sum(redone[max(since - (resumed_at or 0), 0) :])


def _total(history: History) -> int | None:
    total = history.config.get("steps")
    return total if isinstance(total, int) else None
