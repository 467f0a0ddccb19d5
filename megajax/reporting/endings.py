"""Why an attempt ended: the failure that came first, in words, and those that followed from it."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from megajax.reporting.history import Event

FAILURES = frozenset(("crash", "hang", "lost", "supervisor_stop"))
"""Events of processes that end, or were ended. Their step is the one they were in."""

NOT_DONE = FAILURES | {
    *("signal", "restart", "restored", "start_source", "save_retried"),
    *("checkpoint_damaged", "checkpoint_fallback", "checkpoint_abandoned"),
}
"""Events whose step is not the last that was done."""

CODES = {"end": 0, "numeric_fault": 17, "hang": 124}
"""Event -> the exit code of the attempt, if no event has it."""

OF_PEERS = re.compile(
    r"gloo|nccl|connection (closed|reset|refused)|coordination|heartbeat|socket closed|UNAVAILABLE|peer"
    r"|lost the connection",
    re.IGNORECASE,
)
"""Errors of a process that has lost another one."""

WAITS = "step"
"""The phase in which processes wait for one another."""


@dataclass(frozen=True, slots=True)
class Ending:
    """How an attempt ended."""

    text: str
    then: str = ""
    """What the launcher did about it, to be appended."""
    code: int | None = None
    """Exit code; None if nothing tells it."""
    failure: Event | None = None
    """What began it; None: an end in order, or not known."""
    cascade: tuple[Event, ...] = ()
    """What followed from it: failures of other processes, and signals to them."""
    orderly: bool = False
    """Done, or stopped as asked."""


def ending_of(
    events: Sequence[Event], restart: Event | None, last: int, total: int | None, *, followed: bool
) -> Ending:
    """The end of the attempt with these events.

    restart: the launcher's event after it. last: the last step that was done, of `total`. followed: another attempt
    came after it.
    """
    failures = [event for event in events if event.name in FAILURES and event.name != "supervisor_stop"]
    stop = next((event for event in reversed(events) if event.name == "supervisor_stop"), None)
    several = any((event.whole("processes") or 1) > 1 or (event.whole("process") or 0) for event in events)
    after = " (restarted)" if restart is not None else ""
    after += "" if stop is None else f"; not restarted: {_why(stop)}".removesuffix(": ")
    if faults := [event for event in events if event.name == "numeric_fault"]:
        fault = faults[-1]
        text = fault.text("message") or "numeric fault"
        return Ending(text, after, _code(events, fault, restart), fault, tuple(failures))
    if failures:
        first = _initiating(failures, restart)
        text = _saves(events, first) or describe(_in_step(first, events, last), several=several)
        since = min(event.at for event in failures)
        signals = [event for event in events if event.name == "signal" and event.at >= since]
        others = tuple(event for event in (*failures, *signals) if event is not first)
        return Ending(text, after, _code(events, first, restart), first, others)
    if unsaved := [event for event in events if event.name == "save_failed" and event.whole("exit_code")]:
        return Ending(_unsaved(unsaved[-1]), after, unsaved[-1].whole("exit_code"), unsaved[-1])
    if (orderly := _orderly(events, last, total)) is not None:
        return orderly
    ending = next((event for event in events if event.name == "signal" and event.whole("exit_code") is not None), None)
    if ending is not None:
        text = f"{ending.text('signal')} {_where(ending) or 'again'}: ended at once, unsaved"
        return Ending(text, after, ending.whole("exit_code"), ending)
    if restart is not None or stop is not None:
        cause = _cause(restart) if restart is not None else "failed"
        return Ending(cause, after, _code(events, None, restart or stop), restart or stop)
    return Ending("no end recorded: killed" + (" or crashed" if followed else ", crashed, or still running"))


def _in_step(event: Event, events: Sequence[Event], last: int) -> Event:
    """A lost process was in a step after the last one that all have done; its last heartbeat may be older."""
    if event.name != "lost" or not any(one.name == "first_step" for one in events):
        return event
    return replace(event, step=max(event.step or 0, last + 1))


def describe(event: Event, *, several: bool = True) -> str:
    """A failure as a sentence. several: name the process."""
    process = event.whole("process")
    who = f"process {process} " if process is not None and several else ""
    where = _where(event)
    if event.name == "hang":
        seconds = event.seconds("seconds")
        lasted = f" for {seconds:.0f} s" if seconds else ""
        cause = f"; {event.text('cause')}" if _waits_for(event) is not None and event.text("cause") else ""
        return f"hang: {who}{where}{lasted}{cause}".replace("hang: in", "hang in").rstrip(": ")
    if event.name == "lost":
        return _cause(event)
    error = event.text("error") or "no message"
    verb = "stopped" if event.whole("exit_code") == 2 else "crashed"
    return f"{who}{verb}{' ' * bool(where)}{where}: {error}"


def _where(event: Event) -> str:
    phase = event.text("phase").replace("_", " ")
    step = "" if event.step is None else f"step {event.step:,}"
    if not phase or phase == WAITS:
        return f"in {step or phase}" if step or phase else ""
    return f"in {phase}{' of ' * bool(step)}{step}"


def _cause(event: Event) -> str:
    """What the launcher says of a process."""
    process, cause = event.whole("process"), event.text("cause").rstrip(";") or "failed"
    who = "" if process is None or cause.startswith(("process ", "hang")) else f"process {process} "
    if event.step is None or re.search(r"\bstep \d", cause):
        return f"{who}{cause}"
    return f"{who}{cause} at step {event.step:,}" if "," not in cause else f"{who}at step {event.step:,}: {cause}"


def _why(stop: Event) -> str:
    """Why the launcher gave up; "" if it only repeats the failure."""
    code, why = stop.whole("code"), stop.text("why")
    if why.startswith(("process ", "the command ")):
        return ""
    return (why or "the launcher gave up") + ("" if code is None else f" ({code})")


def _initiating(failures: Sequence[Event], restart: Event | None) -> Event:
    """Of several failures the one that the others followed from."""
    named = [restart.whole("process")] if restart is not None else [_waits_for(event) for event in failures]
    blamed = next((process for process in named if process is not None), None)
    recorded = {event.whole("process") for event in failures if event.name != "lost"}

    def late(event: Event) -> tuple[bool, bool, bool, int]:
        waiting = event.name == "hang" and (event.text("phase") == WAITS or _waits_for(event) is not None)
        followed = event.name == "crash" and OF_PEERS.search(event.text("error")) is not None
        step = event.step if event.name == "hang" and event.step is not None else 0
        process = event.whole("process")
        recorded_itself = event.name == "lost" and process in recorded
        return waiting or followed, blamed is not None and process != blamed, recorded_itself, step

    return min(failures, key=late)


def _waits_for(hang: Event) -> int | None:
    """The process that another one waits for, as its watchdog says."""
    cause = hang.whole("cause_process")
    return None if cause == hang.whole("process") else cause


def _saves(events: Sequence[Event], failure: Event) -> str:
    """That a failure is the end of saves that failed; "" if it is not."""
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
    count, why = event.whole("failures") or 1, event.text("why")
    return f"{count} saves failed in a row: {why}" if count > 1 else f"a save failed: {why}"


def _orderly(events: Sequence[Event], last: int, total: int | None) -> Ending | None:
    """Done, stopped as asked, or nothing to do; None if the events have no such end."""
    named = {event.name: event for event in events}
    if "end" not in named and "stopped" not in named:
        nothing = total is not None and "start" in named and (named["start"].step or 0) >= total
        return Ending("nothing to train", code=0, orderly=True) if nothing else None
    code = _code(events, named.get("end"), None)
    if "stopped" in named:
        saved, reason = (named["stopped"].fields.get(name) for name in ("saved", "reason"))
        kept = "nothing saved" if saved is None else f"step {saved} saved"
        return Ending(f"stopped ({reason}), {kept}", code=0 if code is None else code, orderly=not code)
    if code:
        return Ending(f"ended with code {code}", code=code)
    # The run may have been given more steps since.
    done = total is None or last >= total
    return Ending("done" if done else f"done: step {last:,} was its last", code=code, orderly=True)


def _code(events: Sequence[Event], cause: Event | None, launcher: Event | None) -> int | None:
    """Exit code of an attempt: as its cause says, else the launcher, else what its kind stands for."""
    known = [] if cause is None else [cause.whole("exit_code"), cause.whole("code")]
    if launcher is not None:
        known += [launcher.whole("after_code"), launcher.whole("code")]
    known += [event.whole("exit_code") for event in reversed(events) if event.name in ("end", "stopped")]
    known += [CODES.get("" if cause is None else cause.name)]
    return next((code for code in known if code is not None), None)
