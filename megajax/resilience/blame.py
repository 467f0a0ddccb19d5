"""Which process failed first: the others end, or wait, because of it.

A process that waits in a collective looks hung to its own watchdog, and one that has lost a peer ends with an error of
its own. So neither the first end nor the first watchdog names the cause by itself: exit codes, signals, what
processes said in their last heartbeats, and how far each one is decide together.
"""

import re
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from megajax.resilience.activity import COMPILE, SETUP, STEP, words
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
class Seen:
    """What is known of one process when its gang has failed."""

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
    said: str | None = None
    """What it said of it itself."""
    step: int | None = None
    """The step it was in."""
    silenced: bool = False
    """Whether it had no chance to record this itself."""


def first_cause(seen: Sequence[Seen], hang: str | None = None) -> Cause:
    """The cause of a failure. hang: why the launcher took the gang for hung; None: a process has ended by itself."""
    failed = sorted((each for each in seen if each.code), key=lambda each: (_secondary(each), each.order))
    if hang is None and failed and failed[0].code != HANG:
        return _own_failure(failed[0])
    late = _held_up_by(seen)
    if late is not None:
        return late
    if failed:
        return _own_failure(failed[0])
    return Cause(None, HANG, hang or "nothing is known")


def scheduler_cause(seen: Sequence[Seen], code: int | None, hang: str | None = None) -> Cause:
    """The same where a command of a scheduler runs the processes. code: what it ended with; None: it has not ended.

    srun returns the highest code of all: 137 for processes that it has killed itself after the first failure. So what
    processes said in their last beats comes first. A process that said nothing while others said that they lost one
    is the lost one.
    """
    failed = [each for each in seen if each.code]
    if hang is not None or any(_secondary(each) < _VICTIM for each in failed):
        return first_cause(seen, hang)
    if not failed and code is not None and CRASH < code < 128:
        return Cause(None, code, f"the command exited with code {code}")
    silent = sorted((each for each in seen if not each.code and each.beat is not None), key=lambda each: each.order)
    if silent and (failed or len(silent) == 1 or silent[1].order - silent[0].order > BEATS_APART):
        first = silent[0]
        where = f" on {first.beat.host}" if first.beat else ""
        text = f"was lost{where}: it said nothing, and its beats ended first;"
        return Cause(first.process, CRASH, text, step=_step(first), silenced=True)
    if failed:
        return first_cause(seen)
    ended = (
        f"exited with code {code}, and no process said why"
        if code is None or code >= 0
        else f"was killed by {signal_name(-code)}"
    )
    return Cause(None, CRASH, f"the command {ended}")


_VICTIM = 2
"""From here on, `_secondary` takes another failure for the cause."""


def _secondary(seen: Seen) -> int:
    """How likely another process caused this failure: 0 if it caused it itself; an abort is the most likely."""
    if seen.code is not None and seen.code < 0:
        return 3 if -seen.code == signal.SIGABRT else 0
    if seen.code in (INTERRUPTED, TERMINATED):
        return 2
    if seen.code not in (CRASH, HANG):
        return 0
    said = None if seen.beat is None else seen.beat.failure
    return 2 if seen.code == CRASH and said is not None and _PEER_LOST.search(said) else 1


def _own_failure(seen: Seen) -> Cause:
    code, said = seen.code or 0, None if seen.beat is None else seen.beat.failure
    if code < 0:
        return Cause(seen.process, CRASH, f"killed by {signal_name(-code)}", step=_step(seen), silenced=True)
    return Cause(seen.process, code, f"exited with code {code}", said, _step(seen))


def _held_up_by(seen: Sequence[Seen]) -> Cause | None:
    """Whom the others wait for: one that is stopped, or does not run, or is behind them; None: nobody stands out."""
    alive = [each for each in seen if each.code is None and each.beat is not None]
    for each in alive:
        if each.state == "T":
            text = f"is stopped (state T), its last beat is {each.silent:.0f} s old"
            return Cause(each.process, HANG, text, step=_step(each), silenced=True)
    freshest = min((each.silent for each in seen if each.beat is not None), default=0.0)
    worst = max(alive, key=lambda each: each.silent, default=None)
    if worst is not None and worst.silent - freshest > SILENT_SECONDS:
        place = "" if worst.beat is None or worst.beat.phase is None else words(worst.beat.phase, worst.beat.phase_step)
        text = f"does not answer, its last beat is {worst.silent:.0f} s old ({place or 'between phases'})"
        return Cause(worst.process, HANG, text, step=_step(worst), silenced=True)
    return _behind(seen)


def _behind(seen: Sequence[Seen]) -> Cause | None:
    places = [(position(each.beat), each) for each in seen if each.beat is not None and each.code in (None, HANG)]
    if len(places) < 2:
        return None
    last = min(place for place, _ in places)
    behind = [each for place, each in places if place == last]
    if len(behind) == len(places):
        return None
    worst = max(behind, key=lambda each: each.beat.phase_seconds if each.beat else 0.0)
    ahead = min(places, key=lambda pair: (-pair[0][0], -pair[0][1], pair[1].process))[1]
    text = f"holds up the others: it {_doing(worst)}, process {ahead.process} {_doing(ahead)}"
    return Cause(worst.process, HANG, text, step=_step(worst), silenced=worst.code is None)


def position(beat: Beat) -> tuple[int, int]:
    """How far a process is: the step, and the place in it: rows, the step itself, then evaluation and saving."""
    if beat.phase is None or beat.phase_step is None:
        # Within the step after the last one that has arrived, but where is not known.
        return beat.step + 1, _ORDER.get(beat.phase or "", _IN_STEP)
    return beat.phase_step, _ORDER.get(beat.phase, _AFTER_STEP)


def _step(seen: Seen) -> int | None:
    beat = seen.beat
    if beat is None:
        return None
    return beat.phase_step if beat.phase_step is not None else beat.step or None


def _doing(seen: Seen) -> str:
    """has been waiting for the rows of step 7 for 24 s."""
    if seen.beat is None or seen.beat.phase is None:
        return "was between phases"
    return f"has been {words(seen.beat.phase, seen.beat.phase_step)} for {seen.beat.phase_seconds:.0f} s"


def signal_name(number: int) -> str:
    """SIGKILL, or "signal 40" for one without a name."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
