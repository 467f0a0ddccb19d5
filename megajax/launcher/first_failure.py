"""Determines which process failed first and caused the others to end or to wait.

A process that waits in a collective looks hung to its own watchdog, and one that has lost a peer ends with an error of
its own. So neither the first exit nor the first watchdog shows the cause; exit codes, signals, messages in the last
heartbeats and the progress of each process are combined.
"""

import signal
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from megajax.faults.activity import describe_phase
from megajax.faults.attempt_end import BY_BYSTANDER, BY_LAUNCHER, PEER_LOST, describe_failure
from megajax.faults.beats import Beat
from megajax.faults.exit_codes import CRASH, HANG, INTERRUPTED, TERMINATED

SILENT_SECONDS = 5.0
"""A living process with a beat this old, unlike the others, is not running: beats come once a second."""

BEATS_APART = 2.0
"""Processes with last beats closer together than this, in seconds, may have ended in any order."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MemberState:
    """The state of a process at the failure of its gang."""

    process: int
    code: int | None = None
    """Exit code, negative for a signal; None if the process is alive."""
    order: float = 0.0
    """When it ended, by a clock that all processes share."""
    beat: Beat | None = None
    silent: float = 0.0
    """Age of its last beat, in seconds."""
    state: str | None = None
    """State in Linux (R, S, D, T, Z), if known."""
    start_problem: str | None = None
    """How it hangs before its first beat, if it does."""


class Cause(NamedTuple):
    """The first failure."""

    process: int | None
    """The process; None if it is not known."""
    code: int
    """Exit code for the gang; 1 for a signal."""
    text: str
    """The end of the process as a predicate: "killed by SIGKILL"."""
    message: str | None = None
    """Error message of the process."""
    step: int | None = None
    """The step it was in."""
    unrecorded: bool = False
    """Whether the process could not record the failure itself."""
    secondary: bool = False
    """Whether a process that the launcher does not know has caused it."""


def first_cause(members: Sequence[MemberState], hang: str | None = None) -> Cause:
    """The cause of a failure. hang: why the launcher considers the gang hung; None if a process has ended by itself."""
    failed = sorted((state for state in members if state.code), key=lambda state: (_secondary(state), state.order))
    if hang is None and failed and failed[0].code != HANG:
        return _own_failure(failed[0])
    blocking = _holding_up(members)
    if blocking is not None:
        return blocking
    if failed:
        return _own_failure(failed[0])
    return Cause(None, HANG, hang or "nothing is known")


def scheduler_cause(members: Sequence[MemberState], code: int | None, hang: str | None = None) -> Cause:
    """The cause of a failure under a scheduler's command. code: exit code of the command; None if it has not ended.

    srun returns the highest code of all processes: 137 for those that it killed after the first failure. So messages in
    last beats take precedence. If processes report that they lost another one, the lost process has no message.
    """
    failed = [state for state in members if state.code]
    if hang is not None or any(_secondary(state) < _VICTIM for state in failed):
        return first_cause(members, hang)
    if not failed and code is not None and CRASH < code < 128:
        return Cause(None, code, f"the command exited with code {code}")
    alive = (state for state in members if not state.code and state.beat is not None)
    silent = sorted(alive, key=lambda state: state.order)
    if silent and (failed or len(silent) == 1 or silent[1].order - silent[0].order > BEATS_APART):
        first = silent[0]
        host = f" on {first.beat.host}" if first.beat else ""
        text = f"was lost{host}: it reported nothing, and its beats ended first;"
        return Cause(first.process, CRASH, text, step=_step(first), unrecorded=True)
    if failed:
        return first_cause(members)
    ended = (
        f"exited with code {code}, and no process reported a reason"
        if code is None or code >= 0
        else f"was killed by {signal_name(-code)}"
    )
    return Cause(None, CRASH, f"the command {ended}")


_VICTIM = 2
"""From this value of `_secondary` on, another process is the cause."""


def _secondary(state: MemberState) -> int:
    """How likely another process caused this failure: 0 for a failure of its own; highest for an abort."""
    if state.code is not None and state.code < 0:
        return 3 if -state.code == signal.SIGABRT else 0
    if state.code in (INTERRUPTED, TERMINATED):
        return 2
    if state.code not in (CRASH, HANG):
        return 0
    message = None if state.beat is None else state.beat.failure
    return 2 if state.code == CRASH and message is not None and PEER_LOST.search(message) else 1


def attempt_end(cause: Cause, code: int, completed: int, *, several_machines: bool) -> dict[str, Any]:
    """Fields of the event `attempt_end`. completed: the last step that any process has completed."""
    name, step, text = "hang" if cause.code == HANG else "crash", cause.step, cause.text
    if cause.unrecorded:
        # It failed after the last completed step, even if its last heartbeat is older.
        name, step = "lost", max(step or 0, completed + 1) if completed else step
        text = describe_failure(name, {"process": cause.process, "cause": cause.text, "step": step})
    elif cause.process is not None:
        text = f"process {cause.process} {text}" + (f": {cause.message}" if cause.message else "")
    # The launcher of another machine knows more if processes of this one have lost one of that machine.
    by = BY_BYSTANDER if several_machines and cause.secondary else BY_LAUNCHER
    return {"code": code, "cause": name, "process": cause.process, "step": step, "text": text, "by": by}


def _own_failure(state: MemberState) -> Cause:
    code, message = state.code or 0, None if state.beat is None else state.beat.failure
    if code < 0:
        return Cause(state.process, CRASH, f"killed by {signal_name(-code)}", step=_step(state), unrecorded=True)
    secondary = _secondary(state) >= _VICTIM
    return Cause(state.process, code, f"exited with code {code}", message, _step(state), secondary=secondary)


def _holding_up(members: Sequence[MemberState]) -> Cause | None:
    """The process that the others wait for: stopped, silent, or behind them; None if there is none."""
    alive = [state for state in members if state.code is None and state.beat is not None]
    for state in members:
        if state.code is None and state.start_problem is not None:
            return Cause(state.process, HANG, state.start_problem, unrecorded=True)
    for state in alive:
        if state.state == "T":
            text = f"is stopped (state T), its last beat is {state.silent:.0f} s old"
            return Cause(state.process, HANG, text, step=_step(state), unrecorded=True)
    freshest = min((state.silent for state in members if state.beat is not None), default=0.0)
    worst = max(alive, key=lambda state: state.silent, default=None)
    if worst is not None and worst.silent - freshest > SILENT_SECONDS:
        place = (
            ""
            if worst.beat is None or worst.beat.phase is None
            else describe_phase(worst.beat.phase, worst.beat.phase_step, worst.beat.stage)
        )
        text = f"does not answer, its last beat is {worst.silent:.0f} s old ({place or 'between phases'})"
        return Cause(worst.process, HANG, text, step=_step(worst), unrecorded=True)
    return _behind(members)


def _behind(members: Sequence[MemberState]) -> Cause | None:
    running = [state for state in members if state.beat is not None and state.code in (None, HANG)]
    places = [(state.beat.position(), state) for state in running if state.beat is not None]
    if len(places) < 2:
        return None
    last = min(place for place, _ in places)
    behind = [state for place, state in places if place == last]
    if len(behind) == len(places):
        return _by_verdict(running)
    worst = max(behind, key=lambda state: state.beat.phase_seconds if state.beat else 0.0)
    ahead = max(places, key=lambda pair: (pair[0], -pair[1].process))[1]
    text = f"holds up the others: it {_doing(worst)}, process {ahead.process} {_doing(ahead)}"
    return Cause(worst.process, HANG, text, step=_step(worst), unrecorded=worst.code is None)


def _by_verdict(members: Sequence[MemberState]) -> Cause | None:
    """The process that one of equally far members waited for, in a background save for example."""
    for state in members:
        process = None if state.beat is None else state.beat.cause
        worst = next((other for other in members if other.process == process), None)
        if worst is not None and state.beat is not None and state.beat.failure is not None:
            message = state.beat.failure if worst.beat is None else worst.beat.failure or state.beat.failure
            return Cause(worst.process, HANG, "holds up the others", message, _step(worst), worst.code is None)
    return None


def _step(state: MemberState) -> int | None:
    beat = state.beat
    if beat is None:
        return None
    return beat.phase_step if beat.phase_step is not None else beat.step or None


def _doing(state: MemberState) -> str:
    """has been waiting for the rows of step 7 for 24 s."""
    if state.beat is None or state.beat.phase is None:
        return "was between phases"
    place = describe_phase(state.beat.phase, state.beat.phase_step, state.beat.stage)
    return f"has been {place} for {state.beat.phase_seconds:.0f} s"


def signal_name(number: int) -> str:
    """SIGKILL, or "signal 40" for one without a name."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
