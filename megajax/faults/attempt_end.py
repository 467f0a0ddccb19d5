"""The event `attempt_end`: how an attempt at a run ended, which process failed first, and its end in words.

A process that ends an attempt records its own end. The launcher sees all processes, and records which of them failed
first. Readers take the record of the highest authority, and judge nothing.
"""

import re
from collections.abc import Callable, Mapping
from typing import Any

from megajax.faults.activity import STEP
from megajax.faults.exit_codes import CRASH, HANG

ATTEMPT_END = "attempt_end"
BY_LAUNCHER, BY_PROCESS, BY_BYSTANDER = "launcher", "process", "bystander"
AUTHORITIES = (BY_LAUNCHER, BY_PROCESS, BY_BYSTANDER)
"""Who records an end, the highest authority first. A bystander failed because of another process, or waited for it."""

PEER_LOST = re.compile(
    r"lost the connection|gloo|nccl|connection (closed|reset|refused)|socket closed|broken pipe|coordination"
    r"|unavailable|barrier .*(timed out|failed|aborted)|heartbeat|unhealthy|preempted|another task"
    r"|terminating process because",
    re.IGNORECASE,
)
"""Words in errors of a process that has lost another one."""


def record_failure(record: Callable[..., None], name: str, /, *, several: bool, **fields: object) -> None:
    """Record the event of a process that fails (crash, hang, lost, signal), and the end of the attempt by it.

    several: whether the run has several processes.
    """
    record(name, **fields)
    record(ATTEMPT_END, **end_of(name, fields, several=several))


def end_of(name: str, fields: Mapping[str, Any], *, several: bool) -> dict[str, Any]:
    """Fields of `attempt_end` for the event of a process that fails."""
    process, cause = fields.get("process"), fields.get("cause_process")
    waits = name == "hang" and ((several and fields.get("phase") == STEP) or cause not in (None, process))
    follows = name == "crash" and PEER_LOST.search(str(fields.get("error"))) is not None
    return {
        "code": fields.get("exit_code", HANG if name == "hang" else CRASH),
        "cause": name,
        "process": process,
        "step": fields.get("step"),
        "text": describe_failure(name, fields, several=several),
        "by": BY_BYSTANDER if waits or follows else BY_PROCESS,
    }


def describe_failure(name: str, fields: Mapping[str, Any], *, several: bool = True) -> str:
    """The event of a process that fails as text. several: whether to name the process."""
    process, place = fields.get("process"), _place(fields.get("phase"), fields.get("step"))
    who = f"process {process} " if process is not None and several else ""
    match name:
        case "signal":
            return f"{fields['signal']} {place or 'again'}: ended at once, unsaved"
        case "lost":
            return _lost(process, str(fields.get("cause") or "failed").rstrip(";"), fields.get("step"))
        case "hang":
            seconds, why = fields.get("seconds"), fields.get("cause")
            duration = f" for {seconds:.0f} s" if seconds else ""
            cause = f"; {why}" if why and fields.get("cause_process") not in (None, process) else ""
            return f"hang: {who}{place}{duration}{cause}".replace("hang: in", "hang in").rstrip(": ")
    verb = "stopped" if fields.get("exit_code") == 2 else "crashed"
    return f"{who}{verb}{' ' * bool(place)}{place}: {fields.get('error') or 'no message'}"


def end_of_run(code: int, cause: str, text: str, step: int | None, *, by: str = BY_PROCESS) -> dict[str, Any]:
    """Fields of `attempt_end` for the run as a whole."""
    return {"code": code, "cause": cause, "process": None, "step": step, "text": text, "by": by}


def stopped_end(step: int, saved: int | None, reason: str, code: int) -> dict[str, Any]:
    """Fields of `attempt_end` for a run that stopped before its last step, with a checkpoint of step `saved`."""
    where = "nothing saved" if saved is None else f"step {saved} saved"
    return end_of_run(code, "stopped", f"stopped ({reason}), {where}", step)


def failed_saves_end(step: int, count: int, why: str) -> dict[str, Any]:
    """Fields of `attempt_end` for a run whose last `count` saves failed."""
    text = f"{count} saves failed in a row: {why}" if count > 1 else f"a save failed: {why}"
    return end_of_run(CRASH, "save_failed", text, step)


def _place(phase: str | None, step: int | None) -> str:
    name, of_step = (phase or "").replace("_", " "), "" if step is None else f"step {step:,}"
    if not name or name == STEP:
        return f"in {of_step or name}" if of_step or name else ""
    return f"in {name}{' of ' * bool(of_step)}{of_step}"


def _lost(process: int | None, cause: str, step: int | None) -> str:
    """The launcher's reason for the end of a process."""
    who = "" if process is None or cause.startswith(("process ", "hang")) else f"process {process} "
    if step is None or re.search(r"\bstep \d", cause):
        return f"{who}{cause}"
    return f"{who}{cause} at step {step:,}" if "," not in cause else f"{who}at step {step:,}: {cause}"
