"""Why an attempt ended: the first failure, as text, and the failures that it caused."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from megajax.reporting.history import Event

FAILURES = frozenset(("crash", "hang", "lost", "supervisor_stop"))
"""Events of processes that failed or were stopped. Their step is the one in progress."""

INCOMPLETE = FAILURES | {
    *("signal", "restart", "restored", "start_source", "save_retried"),
    *("checkpoint_damaged", "checkpoint_fallback", "checkpoint_abandoned"),
}
"""Events whose step may not be complete."""

CODES = {"end": 0, "numeric_fault": 17, "hang": 124}
"""Event -> exit code of the attempt, unless an event has an exit code."""

OF_PEERS = re.compile(
    r"gloo|nccl|connection (closed|reset|refused)|coordination|heartbeat|socket closed|UNAVAILABLE|peer"
    r"|lost the connection",
    re.IGNORECASE,
)
"""Errors of a process that has lost another process."""

WAITS = "step"
"""The phase in which processes wait for each other."""


@dataclass(frozen=True, slots=True)
class Ending:
    """The end of an attempt."""

    text: str
    reaction: str = ""
    """The launcher's reaction, to be appended to `text`."""
    code: int | None = None
    """Exit code; None if unknown."""
    failure: Event | None = None
    """The first failure; None without a failure, or if unknown."""
    cascade: tuple[Event, ...] = ()
    """Later failures of other processes, and signals to them."""
    orderly: bool = False
    """Whether the attempt was complete or stopped on request."""


def find_ending(
    events: Sequence[Event], restart: Event | None, last: int, total: int | None, *, followed: bool
) -> Ending:
    """The end of the attempt with these events.

    restart: the launcher's event after it. last: its last completed step, of `total`. followed: whether another attempt
    follows.
    """
    failures = [event for event in events if event.name in FAILURES and event.name != "supervisor_stop"]
    stop = next((event for event in reversed(events) if event.name == "supervisor_stop"), None)
    several = any((event.integer("processes") or 1) > 1 or (event.integer("process") or 0) for event in events)
    after = " (restarted)" if restart is not None else ""
    after += "" if stop is None else f"; not restarted: {_give_up_reason(stop)}".removesuffix(": ")
    if faults := [event for event in events if event.name == "numeric_fault"]:
        fault = faults[-1]
        text = fault.text("message") or "numeric fault"
        return Ending(text, after, _code(events, fault, restart), fault, tuple(failures))
    if failures:
        first = _initiating(failures, restart)
        text = _save_failure(events, first) or describe_failure(_in_step(first, events, last), several=several)
        since = min(event.at for event in failures)
        signals = [event for event in events if event.name == "signal" and event.at >= since]
        cascade = tuple(event for event in (*failures, *signals) if event is not first)
        return Ending(text, after, _code(events, first, restart), first, cascade)
    if unsaved := [event for event in events if event.name == "save_failed" and event.integer("exit_code")]:
        return Ending(_unsaved(unsaved[-1]), after, unsaved[-1].integer("exit_code"), unsaved[-1])
    if (orderly := _orderly(events, last, total)) is not None:
        return orderly
    signals = [event for event in events if event.name == "signal" and event.integer("exit_code") is not None]
    if signals:
        text = f"{signals[0].text('signal')} {_place(signals[0]) or 'again'}: ended at once, unsaved"
        return Ending(text, after, signals[0].integer("exit_code"), signals[0])
    if restart is not None or stop is not None:
        cause = _cause(restart) if restart is not None else "failed"
        return Ending(cause, after, _code(events, None, restart or stop), restart or stop)
    return Ending("no end recorded: killed" + (" or crashed" if followed else ", crashed, or still running"))


def _in_step(event: Event, events: Sequence[Event], last: int) -> Event:
    """A lost process failed after the last completed step, even if its last heartbeat is older."""
    if event.name != "lost" or "first_step" not in {other.name for other in events}:
        return event
    return replace(event, step=max(event.step or 0, last + 1))


def describe_failure(event: Event, *, several: bool = True) -> str:
    """A failure as text. several: whether to name the process."""
    process = event.integer("process")
    who = f"process {process} " if process is not None and several else ""
    place = _place(event)
    if event.name == "hang":
        seconds = event.seconds("seconds")
        duration = f" for {seconds:.0f} s" if seconds else ""
        cause = f"; {event.text('cause')}" if _waits_for(event) is not None and event.text("cause") else ""
        return f"hang: {who}{place}{duration}{cause}".replace("hang: in", "hang in").rstrip(": ")
    if event.name == "lost":
        return _cause(event)
    error = event.text("error") or "no message"
    verb = "stopped" if event.integer("exit_code") == 2 else "crashed"
    return f"{who}{verb}{' ' * bool(place)}{place}: {error}"


def _place(event: Event) -> str:
    phase = event.text("phase").replace("_", " ")
    step = "" if event.step is None else f"step {event.step:,}"
    if not phase or phase == WAITS:
        return f"in {step or phase}" if step or phase else ""
    return f"in {phase}{' of ' * bool(step)}{step}"


def _cause(event: Event) -> str:
    """The launcher's reason for the end of a process."""
    process, cause = event.integer("process"), event.text("cause").rstrip(";") or "failed"
    who = "" if process is None or cause.startswith(("process ", "hang")) else f"process {process} "
    if event.step is None or re.search(r"\bstep \d", cause):
        return f"{who}{cause}"
    return f"{who}{cause} at step {event.step:,}" if "," not in cause else f"{who}at step {event.step:,}: {cause}"


def _give_up_reason(stop: Event) -> str:
    """Why the launcher gave up; "" if that only repeats the failure."""
    code, why = stop.integer("code"), stop.text("why")
    if why.startswith(("process ", "the command ")):
        return ""
    return (why or "the launcher gave up") + ("" if code is None else f" ({code})")


def _initiating(failures: Sequence[Event], restart: Event | None) -> Event:
    """The failure that caused the others."""
    candidates = [restart.integer("process")] if restart is not None else [_waits_for(event) for event in failures]
    blamed = next((process for process in candidates if process is not None), None)
    recorded = {event.integer("process") for event in failures if event.name != "lost"}

    def rank(event: Event) -> tuple[bool, bool, bool, int]:
        waiting = event.name == "hang" and (event.text("phase") == WAITS or _waits_for(event) is not None)
        followed = event.name == "crash" and OF_PEERS.search(event.text("error")) is not None
        step = event.step if event.name == "hang" and event.step is not None else 0
        process = event.integer("process")
        recorded_itself = event.name == "lost" and process in recorded
        return waiting or followed, blamed is not None and process != blamed, recorded_itself, step

    return min(failures, key=rank)


def _waits_for(hang: Event) -> int | None:
    """The process that a hanging process waits for, according to its watchdog."""
    cause = hang.integer("cause_process")
    return None if cause == hang.integer("process") else cause


def _save_failure(events: Sequence[Event], failure: Event) -> str:
    """The text of a failure caused by failed saves; "" for another failure."""
    local = ("local", "emergency")
    saves = [event for event in events if event.name in ("save_failed", "save_committed")]
    saves = [event for event in saves if event.text("kind") not in local]
    if failure.name != "crash" or not saves or saves[-1].name != "save_failed":
        return ""
    why, error = saves[-1].text("why"), failure.text("error")
    if not (why and why in error) and not re.search(r"checkpoint|saves?\b", f"{error} {failure.text('phase')}"):
        return ""
    return _unsaved(saves[-1])


def _unsaved(event: Event) -> str:
    count, why = event.integer("failures") or 1, event.text("why")
    return f"{count} saves failed in a row: {why}" if count > 1 else f"a save failed: {why}"


def _orderly(events: Sequence[Event], last: int, total: int | None) -> Ending | None:
    """The end if complete, stopped on request, or without steps to train; else None."""
    by_name = {event.name: event for event in events}
    if "end" not in by_name and "stopped" not in by_name:
        nothing = total is not None and "start" in by_name and (by_name["start"].step or 0) >= total
        return Ending("nothing to train", code=0, orderly=True) if nothing else None
    code = _code(events, by_name.get("end"), None)
    if "stopped" in by_name:
        saved, reason = (by_name["stopped"].fields.get(name) for name in ("saved", "reason"))
        saved_text = "nothing saved" if saved is None else f"step {saved} saved"
        return Ending(f"stopped ({reason}), {saved_text}", code=0 if code is None else code, orderly=not code)
    if code:
        return Ending(f"ended with code {code}", code=code)
    # The config may have more steps since then.
    complete = total is None or last >= total
    return Ending("done" if complete else f"done: step {last:,} was its last", code=code, orderly=True)


def _code(events: Sequence[Event], cause: Event | None, launcher: Event | None) -> int | None:
    """Exit code of an attempt: from its cause, else from the launcher, else from the kind of the cause."""
    codes = [] if cause is None else [cause.integer("exit_code"), cause.integer("code")]
    if launcher is not None:
        codes += [launcher.integer("after_code"), launcher.integer("code")]
    codes += [event.integer("exit_code") for event in reversed(events) if event.name in ("end", "stopped")]
    codes += [CODES.get("" if cause is None else cause.name)]
    return next((code for code in codes if code is not None), None)
