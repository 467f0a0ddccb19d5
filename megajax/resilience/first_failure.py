"""Which process failed first: the others end, or wait, because of it.

A process that waits in a collective looks hung to its own watchdog, and one that has lost a peer ends with an error of
its own. Therefore neither the first exit nor the first watchdog names the cause: exit codes, signals, messages in the
last heartbeats and the progress of each process are taken together.
"""

import re
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from megajax.resilience.activity import COMPILE, SETUP, STEP, describe_phase
from megajax.resilience.beats import Beat
from megajax.resilience.exit_codes import CRASH, HANG, INTERRUPTED, TERMINATED

DATA_WAIT = "data_wait"

SILENT_SECONDS = 5.0
"""A living process whose beat is this old, while others' are not, does not run: beats come once a second."""

BEATS_APART = 2.0
"""Processes whose last beats are less far apart, in seconds, may have ended in any order."""

_PEER_LOST = re.compile(
    r"lost the connection|gloo|connection (closed|reset|refused)|socket closed|coordination|UNAVAILABLE|heartbeat|NCCL|"
    r"broken pipe|preempted|another task|terminating process because",
    re.IGNORECASE,
)
"""Words in errors of processes that have lost another."""

_BEFORE_STEP, _IN_STEP, _AFTER_STEP = 0, 2, 3
_ORDER = {SETUP: -1, DATA_WAIT: _BEFORE_STEP, COMPILE: 1, STEP: _IN_STEP}


@dataclass(frozen=True, kw_only=True, slots=True)
class MemberState:
    """A process when its gang has failed."""

    process: int
    code: int | None = None
    """Its exit code, negative for a signal; None: alive."""
    order: float = 0.0
    """When it ended, by any clock that all share."""
    beat: Beat | None = None
    silent: float = 0.0
    """How long ago its last beat came, in seconds."""
    state: str | None = None
    """Its state as Linux has it, where that is known."""


class Cause(NamedTuple):
    """The first failure."""

    process: int | None
    """None: not known."""
    code: int
    """Exit code for the gang; 1 for a signal."""
    text: str
    """What happened to it, without its name: "killed by SIGKILL"."""
    message: str | None = None
    """Its own error message."""
    step: int | None = None
    """The step it was in."""
    unrecorded: bool = False
    """Whether it could not record this itself."""


def first_cause(members: Sequence[MemberState], hang: str | None = None) -> Cause:
    """The cause of a failure. hang: why the launcher took the gang for hung; None: a process has ended by itself."""
    failed = sorted((each for each in members if each.code), key=lambda each: (_secondary(each), each.order))
    if hang is None and failed and failed[0].code != HANG:
        return _own_failure(failed[0])
    late = _holding_up(members)
    if late is not None:
        return late
    if failed:
        return _own_failure(failed[0])
    return Cause(None, HANG, hang or "nothing is known")


def scheduler_cause(members: Sequence[MemberState], code: int | None, hang: str | None = None) -> Cause:
    """The same where a scheduler's command runs the processes. code: its exit code; None: it has not ended.

    srun returns the highest code of all: 137 for processes that it killed itself after the first failure. Therefore
    messages in last beats take precedence. If processes report that they lost another one, it is the one without a
    message.
    """
    failed = [each for each in members if each.code]
    if hang is not None or any(_secondary(each) < _VICTIM for each in failed):
        return first_cause(members, hang)
    if not failed and code is not None and CRASH < code < 128:
        return Cause(None, code, f"the command exited with code {code}")
    silent = sorted((each for each in members if not each.code and each.beat is not None), key=lambda each: each.order)
    if silent and (failed or len(silent) == 1 or silent[1].order - silent[0].order > BEATS_APART):
        first = silent[0]
        where = f" on {first.beat.host}" if first.beat else ""
        text = f"was lost{where}: it said nothing, and its beats ended first;"
        return Cause(first.process, CRASH, text, step=_step(first), unrecorded=True)
    if failed:
        return first_cause(members)
    ended = (
        f"exited with code {code}, and no process said why"
        if code is None or code >= 0
        else f"was killed by {signal_name(-code)}"
    )
    return Cause(None, CRASH, f"the command {ended}")


_VICTIM = 2
"""From here on, `_secondary` takes another failure for the cause."""


def _secondary(state: MemberState) -> int:
    """How likely another process caused this failure: 0 if it caused it itself; an abort is the most likely."""
    if state.code is not None and state.code < 0:
        return 3 if -state.code == signal.SIGABRT else 0
    if state.code in (INTERRUPTED, TERMINATED):
        return 2
    if state.code not in (CRASH, HANG):
        return 0
    message = None if state.beat is None else state.beat.failure
    return 2 if state.code == CRASH and message is not None and _PEER_LOST.search(message) else 1


def _own_failure(state: MemberState) -> Cause:
    code, message = state.code or 0, None if state.beat is None else state.beat.failure
    if code < 0:
        return Cause(state.process, CRASH, f"killed by {signal_name(-code)}", step=_step(state), unrecorded=True)
    return Cause(state.process, code, f"exited with code {code}", message, _step(state))


def _holding_up(members: Sequence[MemberState]) -> Cause | None:
    """The process that the others wait for: stopped, silent, or behind them; None if no process stands out."""
    alive = [each for each in members if each.code is None and each.beat is not None]
    for each in alive:
        if each.state == "T":
            text = f"is stopped (state T), its last beat is {each.silent:.0f} s old"
            return Cause(each.process, HANG, text, step=_step(each), unrecorded=True)
    freshest = min((each.silent for each in members if each.beat is not None), default=0.0)
    worst = max(alive, key=lambda each: each.silent, default=None)
    if worst is not None and worst.silent - freshest > SILENT_SECONDS:
        place = (
            ""
            if worst.beat is None or worst.beat.phase is None
            else describe_phase(worst.beat.phase, worst.beat.phase_step)
        )
        text = f"does not answer, its last beat is {worst.silent:.0f} s old ({place or 'between phases'})"
        return Cause(worst.process, HANG, text, step=_step(worst), unrecorded=True)
    return _behind(members)


def _behind(members: Sequence[MemberState]) -> Cause | None:
    places = [(position(each.beat), each) for each in members if each.beat is not None and each.code in (None, HANG)]
    if len(places) < 2:
        return None
    last = min(place for place, _ in places)
    behind = [each for place, each in places if place == last]
    if len(behind) == len(places):
        return None
    worst = max(behind, key=lambda each: each.beat.phase_seconds if each.beat else 0.0)
    ahead = min(places, key=lambda pair: (-pair[0][0], -pair[0][1], pair[1].process))[1]
    text = f"holds up the others: it {_doing(worst)}, process {ahead.process} {_doing(ahead)}"
    return Cause(worst.process, HANG, text, step=_step(worst), unrecorded=worst.code is None)


def position(beat: Beat) -> tuple[int, int]:
    """How far a process is: the step, and the place in it: rows, the step itself, then evaluation and saving."""
    if beat.phase is None or beat.phase_step is None:
        # Within the step after the last one that has arrived, but where is not known.
        return beat.step + 1, _ORDER.get(beat.phase or "", _IN_STEP)
    return beat.phase_step, _ORDER.get(beat.phase, _AFTER_STEP)


def _step(state: MemberState) -> int | None:
    beat = state.beat
    if beat is None:
        return None
    return beat.phase_step if beat.phase_step is not None else beat.step or None


def _doing(state: MemberState) -> str:
    """has been waiting for the rows of step 7 for 24 s."""
    if state.beat is None or state.beat.phase is None:
        return "was between phases"
    return f"has been {describe_phase(state.beat.phase, state.beat.phase_step)} for {state.beat.phase_seconds:.0f} s"


def signal_name(number: int) -> str:
    """SIGKILL, or "signal 40" for one without a name."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
