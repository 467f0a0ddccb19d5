"""The attempts of a run: their events, start and end, and the steps that a later attempt repeated.

metrics.jsonl has the duration of each step, events.jsonl the time of each event. A killed attempt writes no line about
its end. Its end is then estimated as the time of its last event plus the steps logged since, or is the time in the
launcher's event.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from megajax.reporting.history import Event, History
from megajax.reporting.how_runs_end import FAILURES, INCOMPLETE, Ending, find_ending

START, OPENING, RESTART, STOP = "start", "metrics_superseded", "restart", "supervisor_stop"
"""The first event of an attempt; an event that may precede it; the launcher's events at its start and the last end."""

LATE = frozenset(("save_committed", "save_failed"))
"""Events written some time after their step."""

SETUP = "setup"
"""Phase of a process before the event `start`."""


@dataclass
class AttemptEvents:
    """The events of an attempt."""

    events: list[Event] = field(default_factory=list)
    """Events of its processes in file order, without those of the launcher at its start and end."""
    restart: Event | None = None
    """The launcher's event at its start."""
    start: Event | None = None
    """The event `start`; None if its setup did not finish."""

    def failed(self) -> bool:
        """Whether the attempt or one of its processes has ended."""
        return any(
            event.name in FAILURES or event.name == "end" or "exit_code" in event.fields for event in self.events
        )


@dataclass(frozen=True, slots=True)
class Attempt:
    """An attempt of the run: one start of its processes. Times are on the common axis of `Event.at`."""

    number: int
    """Counts from 1."""
    begin: float
    """Start of its setup, if known; else its first event."""
    ready: float | None
    """End of its setup; None if the setup did not finish."""
    progress: float
    """End of its last step or other work."""
    end: float
    """End of the attempt, at or after `progress`."""
    first_step: int
    """Number of steps completed before it."""
    last_step: int
    """The last step that it logged."""
    start: Mapping[str, Any]
    """Fields of the event `start`: devices, processes."""
    outcome: Ending
    restart: Event | None
    """The launcher's event at its start."""
    events: tuple[Event, ...]
    rerun_steps: int
    """Number of its steps that a later attempt repeated."""
    rerun_seconds: float
    """Duration of those steps in this attempt."""

    @property
    def seconds(self) -> float:
        """Wall time."""
        return self.end - self.begin

    @property
    def ending(self) -> str:
        """The end of the attempt and the launcher's reaction, as text."""
        return self.outcome.text + self.outcome.reaction

    @property
    def exit_code(self) -> int | None:
        """None if unknown: killed, or still running."""
        return self.outcome.code


def attempts(history: History) -> list[Attempt]:
    """The attempts in events.jsonl, in order."""
    groups = events_by_attempt(history.events)
    rerun = _superseded(history, groups)
    runs: list[Attempt] = []
    for index, group in enumerate(groups):
        later_groups = [later for later in groups[index + 1 :] if later.start is not None]
        resumed_at = (later_groups[0].start.step or 0) if later_groups and later_groups[0].start else None
        following = groups[index + 1] if index + 1 < len(groups) else None
        runs.append(_attempt(history, runs, group, rerun.get(index, []), resumed_at, following))
    return runs


def events_by_attempt(events: Sequence[Event]) -> list[AttemptEvents]:
    """The events of each attempt.

    Events of processes and the launcher are in the order of writing: early events of an attempt may follow its `start`,
    and failures of a setup may have no `start`.
    """
    groups: list[AttemptEvents] = []
    opening: list[Event] = []
    for event in events:
        now = groups[-1] if groups else None
        if event.name == OPENING:
            opening.append(event)
        elif event.name == START:
            group = _group_of_start(groups, event)
            group.start = event
            group.events = [event, *opening, *group.events]
            opening = []
        elif event.name == RESTART:
            groups.append(AttemptEvents(restart=event))
        elif now is None or _belongs_to_next(now, event):
            groups.append(AttemptEvents([event]))
        else:
            now.events.append(event)
    return groups


def _group_of_start(groups: list[AttemptEvents], start: Event) -> AttemptEvents:
    """The group of a `start`: the last group, or a new one with the events of its setup."""
    begin = start.at - start.seconds("setup_seconds")
    now = groups[-1] if groups else None
    if now is None:
        groups.append(AttemptEvents())
    elif now.start is not None or (now.failed() and now.events[-1].at < begin):
        early = [event for event in now.events if "setup_seconds" in start.fields and event.at >= begin]
        early = [event for event in early if event.name not in ("end", START)]
        now.events = [event for event in now.events if event not in early]
        groups.append(AttemptEvents(early))
    return groups[-1]


def _belongs_to_next(group: AttemptEvents, event: Event) -> bool:
    """Whether a failure in the setup belongs to a new attempt without other events."""
    if event.fields.get("phase") != SETUP:
        return False
    if group.start is not None:
        return group.failed() or any(earlier.name == "first_step" for earlier in group.events)
    process = event.integer("process")
    return any(earlier.name == event.name and earlier.integer("process") == process for earlier in group.events)


def _superseded(history: History, groups: Sequence[AttemptEvents]) -> dict[int, list[float]]:
    """Index of a group -> seconds of its repeated steps, in order."""
    used, last, rerun_by_attempt = 0, None, {}
    for index, group in enumerate(groups):
        opening = next((event for event in group.events if event.name == OPENING), None)
        count = (opening.integer("lines") or 0) if opening is not None else 0
        lines = history.superseded_seconds[used : used + max(count, 0)]
        used += len(lines)
        if last is not None:
            rerun_by_attempt[last] = [seconds for seconds in lines if seconds is not None]
        if group.start is not None:
            last = index
    return rerun_by_attempt


def _attempt(
    history: History,
    before: Sequence[Attempt],
    group: AttemptEvents,
    rerun: Sequence[float],
    resumed_at: int | None,
    following: AttemptEvents | None,
) -> Attempt:
    """following: the next group. resumed_at: the step from which the next attempt that became ready resumed."""
    events, start = tuple(group.events), group.start
    work = [event for event in events if event.name not in INCOMPLETE]
    first, last = _range(history, before, group, rerun, resumed_at)
    launched = following.restart if following is not None else None
    outcome = find_ending(events, launched, last, _total(history), followed=following is not None)
    begin = _begin(group, before)
    ready = None if start is None else max(start.at, begin)
    progress = max([begin, *(event.at for event in work)])
    if start is not None and not any(event.name == "end" for event in events):
        progress = max(progress, _last_logged(history, work, rerun, resumed_at))
    end = max([progress, *(event.at for event in events)])
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
        outcome=outcome,
        restart=group.restart,
        events=(*([group.restart] if group.restart else []), *events),
        rerun_steps=len(rerun),
        rerun_seconds=float(sum(rerun)),
    )


def _begin(group: AttemptEvents, before: Sequence[Attempt]) -> float:
    """Start of the setup, at or after the end of the previous attempt."""
    times = [event.at for event in group.events]
    if group.start is not None:
        times = [group.start.at - group.start.seconds("setup_seconds")]
    if group.restart is not None:
        times.append(group.restart.at)
    return max([min(times, default=0.0), *(run.end for run in before[-1:])])


def _range(
    history: History, before: Sequence[Attempt], group: AttemptEvents, rerun: Sequence[float], resumed_at: int | None
) -> tuple[int, int]:
    """Number of steps before an attempt, and the last step that it logged."""
    if group.start is None:
        completed = before[-1].last_step - before[-1].rerun_steps if before else 0
        return completed, completed
    first, steps = group.start.step or 0, history.steps.step
    logged_steps = steps[(steps > first) & (steps <= (np.inf if resumed_at is None else resumed_at))]
    done_steps = [event.step or 0 for event in group.events if event.name not in INCOMPLETE]
    last = max([first, *logged_steps[-1:].tolist(), *done_steps])
    return first, max(last, (resumed_at or 0) + len(rerun)) if rerun else last


def _last_logged(history: History, work: Sequence[Event], rerun: Sequence[float], resumed_at: int | None) -> float:
    """End of the last logged step: the time of the last event that is written at its step, plus the steps since."""
    timely = [event for event in work if event.step is not None and event.name not in LATE]
    last = max(reversed(timely), key=lambda event: (event.step or 0, event.at), default=work[0])
    saved = [event for event in work if event.name == "save_committed" and event.step == last.step]
    blocked = sum(event.seconds("blocking_seconds") for event in saved) if last.name == "save_begun" else 0.0
    since, upto = last.step or 0, np.inf if resumed_at is None else resumed_at
    logged = (history.steps.step > since) & (history.steps.step <= upto)
    logged_seconds = float(np.nansum(history.steps.column("step_seconds")[logged]))
    return last.at + blocked + logged_seconds + sum(rerun[max(since - (resumed_at or 0), 0) :])


def _total(history: History) -> int | None:
    total = history.config.get("steps")
    return total if isinstance(total, int) else None
