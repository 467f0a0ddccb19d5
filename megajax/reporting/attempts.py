"""The attempts of a run: their events, start and end, and the steps that a later attempt repeated.

Every line of metrics.jsonl and events.jsonl has the number of its attempt, and the event `attempt_end` says how it
ended. An attempt without that event was killed, or is still running.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

from megajax.faults.attempt_end import ATTEMPT_END, AUTHORITIES, BY_PROCESS
from megajax.faults.exit_codes import REQUEUE, SUCCESS
from megajax.reporting.history import RESTART, START, Event, History, LoggedLines

STOP = "supervisor_stop"
"""The launcher's event if it does not start another attempt."""

FAILURES = frozenset(("crash", "hang", "lost"))
"""Events of processes that failed. Their step is the one in progress."""

INCOMPLETE = FAILURES | {
    *("signal", RESTART, STOP, ATTEMPT_END, "restored", "start_source", "save_retried"),
    *("checkpoint_damaged", "checkpoint_fallback", "checkpoint_abandoned"),
}
"""Events whose step may not be complete."""


@dataclass(frozen=True, slots=True)
class RecordedEnd:
    """The end of an attempt, as it was recorded."""

    text: str
    reaction: str = ""
    """The launcher's reaction, to be appended to `text`."""
    code: int | None = None
    """Exit code; None if unknown."""
    failure: Event | None = None
    """The first failure; None without a failure, or if unknown."""
    cascade: tuple[Event, ...] = ()
    """Later failures of other processes, and signals to them."""

    @property
    def orderly(self) -> bool:
        """Whether the attempt was complete or stopped on request."""
        return self.code in (SUCCESS, REQUEUE)


@dataclass(frozen=True, slots=True)
class PastAttempt:
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
    outcome: RecordedEnd
    restart: Event | None
    """The launcher's event at its start."""
    events: tuple[Event, ...]
    """Without the records of its end."""
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


def attempts(history: History) -> list[PastAttempt]:
    """The attempts in events.jsonl, in order."""
    groups, runs = defaultdict[int, list[Event]](list), list[PastAttempt]()
    for event in history.events:
        groups[event.attempt].append(event)
    for number, following in zip_longest(sorted(groups), sorted(groups)[1:]):
        logged = history.logged.get(number, LoggedLines())
        runs.append(_attempt(history, logged, runs[-1:], groups[number], groups[following] if following else None))
    return runs


def _attempt(
    history: History,
    logged: LoggedLines,
    before: Sequence[PastAttempt],
    events: Sequence[Event],
    following: Sequence[Event] | None,
) -> PastAttempt:
    """before, following: the attempt before, if any, and the events of the next one."""
    restart, start = _first(events, RESTART), _first(events, START)
    launched = None if following is None else _first(following, RESTART)
    begins = [event.at for event in events] if start is None else [start.at - start.seconds("setup_seconds")]
    begins += [] if restart is None else [restart.at]
    begin = max([min(begins), *(run.end for run in before)])
    work = [event for event in events if event.name not in INCOMPLETE]
    if start is None:
        first = last = sum(run.last_step - run.rerun_steps for run in before)
    else:
        first = start.step or 0
        last = max([first, logged.last_step, *(event.step or 0 for event in work)])
    progress = max([begin, *(event.at for event in work)])
    if start is not None and logged.last is not None:
        progress = max(progress, start.at_of(logged.last))
    end = max([progress, *(event.at for event in events)])
    if launched is not None:
        end = max(progress, launched.at - launched.seconds("seconds_down"))
    # The start of an attempt is listed before what is written at the same moment.
    listed = sorted(
        (event for event in events if event.name != ATTEMPT_END),
        key=lambda event: (event is not restart, event is not start),
    )
    return PastAttempt(
        number=events[0].attempt,
        begin=begin,
        ready=None if start is None else max(start.at, begin),
        progress=progress,
        end=end,
        first_step=first,
        last_step=last,
        start={} if start is None else start.fields,
        outcome=_ending(events, launched, history.config.get("steps"), followed=following is not None),
        restart=restart,
        events=tuple(listed),
        rerun_steps=len(logged.rerun),
        rerun_seconds=float(sum(logged.rerun)),
    )


def _first(events: Sequence[Event], name: str) -> Event | None:
    return next((event for event in events if event.name == name), None)


def _ending(events: Sequence[Event], launched: Event | None, total: Any, *, followed: bool) -> RecordedEnd:
    """The end of the attempt with these events. launched: the launcher's event after it; total: steps of the run."""
    ends = [event for event in events if event.name == ATTEMPT_END and event.text("by") in AUTHORITIES]
    if not ends:
        return RecordedEnd("no end recorded: killed" + (" or crashed" if followed else ", crashed, or still running"))
    record = min(ends, key=lambda end: AUTHORITIES.index(end.text("by")))
    process, code, text = record.integer("process"), record.integer("code"), record.text("text")
    # A process knows best in what it failed.
    words = [end for end in ends if end.text("by") == BY_PROCESS and end.integer("process") in (None, process)]
    text = words[0].text("text") if words else text
    if code == SUCCESS and text == "done" and isinstance(total, int) and (record.step or 0) < total:
        text = f"done: step {record.step or 0:,} was its last"  # the config has more steps since then
    stop = _first(events, STOP)
    reaction = " (restarted)" * (launched is not None)
    reaction += "" if stop is None else f"; not restarted: {_give_up_reason(stop)}".removesuffix(": ")
    failures = [event for event in events if event.name in FAILURES]
    if code == SUCCESS or not failures:
        return RecordedEnd(text, reaction, code, None if code == SUCCESS else record)
    failure = next((event for event in failures if event.integer("process") == process), None)
    failure = failures[0] if process is None else failure
    since = min(event.at for event in failures)
    cascade = [event for event in events if event.name == "signal" and event.at >= since]
    return RecordedEnd(text, reaction, code, failure or record, (*(e for e in failures if e is not failure), *cascade))


def _give_up_reason(stop: Event) -> str:
    """Why the launcher gave up; "" if that only repeats the failure."""
    code, why = stop.integer("code"), stop.text("why")
    if why.startswith(("process ", "the command ")):
        return ""
    return (why or "the launcher gave up") + ("" if code is None else f" ({code})")
