"""One attempt at a run: its processes are watched until all have ended; the first failure ends the others."""

import contextlib
import os
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import NamedTuple

from megajax.faults.exit_codes import HANG, REQUEUE
from megajax.launcher.first_failure import Cause, MemberState, first_cause, scheduler_cause, signal_name
from megajax.launcher.gang import Member
from megajax.launcher.gang_watch import GangWatch, handles

GRACE_SECONDS = 7.0
"""From SIGTERM to SIGKILL after a failure: time for a surviving process to save its state to a local disk."""

HUNG_GRACE_SECONDS = 1.0
"""From SIGTERM to SIGKILL after a hang: processes that wait for a stuck one can't finish their step."""

SCHEDULER_GRACE_SECONDS = 30.0
"""From SIGTERM to SIGKILL for a scheduler's command, which has to end processes on other machines."""

SCHEDULER_SIGNALS = ((1.0, signal.SIGTERM), (10.0, signal.SIGINT), (10.5, signal.SIGINT))
"""Signals to a scheduler's command in the meantime: (seconds after the first SIGTERM, signal)."""

OTHER_ERRORS_SECONDS = 1.0
"""From an exit with an error code to SIGTERM for the others, which may be about to print their own errors."""

TOGETHER_SECONDS = 0.05
"""Processes that end within this time may have failed in any order."""

STACKS_SECONDS = 2.0
"""Time for the processes of a hung gang to write their stacks."""

TICK_SECONDS = 1.0
"""How often heartbeats are read."""

READS_PER_SECOND = 100
"""Largest rate of reading heartbeats: with a scheduler, thousands of processes write them to a shared file system."""

FIRST_TICKS, FIRST_SECONDS = 0.1, 60.0
"""Interval of reading heartbeats until the run folder is known, to see its state at the beginning of the attempt; and
the limit of that time."""

LATE_SECONDS = 5.0
"""If heartbeats are read this much too late, the launcher itself was not running: it was stopped by Ctrl-Z, its machine
was suspended, or a file system did not answer."""

DUPLICATE_SECONDS = 0.25
"""A signal this soon after another is the same request, delivered twice."""


class Outcome(NamedTuple):
    """The end of an attempt."""

    code: int
    """Exit code; 1 for a signal."""
    cause: Cause | None = None
    """The first failure; None if nothing has failed."""
    description: str = ""
    """The cause, and the failures after it."""
    failed: float = 0.0
    """When it failed, by the monotonic clock."""
    stop_signal: signal.Signals | None = None
    """The signal by which the launcher was asked to stop."""
    log: Path | None = None
    """The log of the process that failed first."""
    stacks: tuple[Path, ...] = ()
    """Files with the stacks of a hung gang."""


class Attempt:
    """Watches the processes of one attempt."""

    def __init__(
        self,
        members: Sequence[Member],
        events: "SimpleQueue[Member | signal.Signals]",
        watch: GangWatch,
        *,
        scheduler: bool = False,
    ):
        """scheduler: the only member starts the processes, which are known only by their beats."""
        self._members, self._events, self._watch, self._scheduler = members, events, watch, scheduler
        self._alive = set(members)
        self._actions: list[tuple[float, Callable[[], None]]] = []
        self._stop_request: tuple[signal.Signals, float] | None = None
        self._cause: Cause | None = None
        self._failed: float | None = None
        self._description = ""
        self._dumped: float | None = None

    def supervise(self) -> Outcome:
        """Forward signals until all have ended; at the first failure, stop the others."""
        began = last_read = time.monotonic()
        while self._alive:
            first = self._watch.run_dir is None and last_read < began + FIRST_SECONDS
            period = FIRST_TICKS if first else max(TICK_SECONDS, len(self._watch.sightings) / READS_PER_SECOND)
            next_read = last_read + period
            event = self._next(next_read)
            if isinstance(event, signal.Signals):
                self._forward_signal(event)
            elif event is not None:
                self._alive.discard(event)
                if event.process.returncode not in (0, REQUEUE, None) and self._failed is None:
                    self._fail(event)
            for action in self._pop_due_actions():
                action()
            if (delay := time.monotonic() - next_read) >= 0:
                if delay > LATE_SECONDS:
                    self._watch.pause(delay)
                last_read = time.monotonic()
                self._check_beats()
        return self._outcome()

    def _next(self, until: float) -> Member | signal.Signals | None:
        wake = min((moment for moment, _ in self._actions), default=until)
        try:
            return self._events.get(timeout=max(min(wake, until) - time.monotonic(), 0))
        except Empty:
            return None

    def _pop_due_actions(self) -> list[Callable[[], None]]:
        now = time.monotonic()
        due = [action for moment, action in self._actions if moment <= now]
        self._actions = [entry for entry in self._actions if entry[0] > now]
        return due

    def _forward_signal(self, number: signal.Signals) -> None:
        now = time.monotonic()
        repeated = self._stop_request is not None and now - self._stop_request[1] > DUPLICATE_SECONDS
        self._signal(self._passed_on(number) if not repeated else number)
        if self._stop_request is None:
            self._stop_request = number, now
        elif repeated and number in (signal.SIGTERM, signal.SIGINT):
            # Processes end at once unless they are stopped or ignore the signal.
            self._actions.append((now + self._grace(), lambda: self._signal(signal.SIGKILL)))

    def _passed_on(self, number: signal.Signals) -> signal.Signals:
        """srun kills its tasks at SIGTERM and only prints at SIGINT; it passes SIGUSR1 on, which stops training too."""
        return signal.SIGUSR1 if self._scheduler else number

    def _check_beats(self) -> None:
        self._watch.read_beats()
        if self._failed is not None:
            return
        if not self._scheduler:
            self._watch.look_at_starts({member.index: member.process.pid for member in self._alive})
        ended = {member.index for member in self._members if member not in self._alive and not self._scheduler}
        if (reason := self._watch.hang(ended)) is not None:
            self._failed = time.monotonic()
            self._decide(reason)
            self._ask_for_stacks()

    def _fail(self, first: Member) -> None:
        """Handles the failure of a process. Others that end shortly after it may have failed before it."""
        self._failed = now = time.monotonic()
        code = first.process.returncode
        if code == HANG:
            self._watch.read_beats()
            self._decide(None)
            self._ask_for_stacks()
        else:
            self._actions.append(
                (now + (TOGETHER_SECONDS if code < 0 else OTHER_ERRORS_SECONDS), self._decide_and_stop)
            )

    def _decide_and_stop(self) -> None:
        self._watch.read_beats()
        self._decide(None)
        self._stop()

    def _decide(self, hang: str | None) -> None:
        """Determine the first failure while the other processes still exist."""
        states = self._member_states()
        if self._scheduler:
            self._cause = scheduler_cause(states, self._members[0].process.returncode, hang)
        else:
            self._cause = first_cause(states, hang)
        self._description = self._describe(self._cause)
        for state in sorted(states, key=lambda state: state.order):
            if state.code and state.process != self._cause.process and not self._scheduler:
                end = f"killed by {signal_name(-state.code)}" if state.code < 0 else f"exited with code {state.code}"
                self._description += f"; after it, process {state.process} {end}"

    def _member_states(self) -> list[MemberState]:
        sights, silent = self._watch.sightings, self._watch.silent
        if self._scheduler:
            return [
                MemberState(
                    process=index,
                    code=sight.beat.code if sight.beat.failure else None,
                    order=sight.beat.time,
                    beat=sight.beat,
                    silent=silent(index),
                    state=sight.state,
                )
                for index, sight in sights.items()
            ]
        return [
            MemberState(
                process=member.index,
                code=member.process.returncode or None,
                order=member.ended or 0.0,
                beat=sight.beat if (sight := sights.get(member.index)) else None,
                silent=silent(member.index),
                state=sight.state if sight else None,
                start_problem=self._watch.start_problem(member.index),
            )
            for member in self._members
            if member.process.returncode != 0
        ]

    def _member(self, cause: Cause) -> Member:
        """The process of a cause; the first one if that is not known or was started by a scheduler's command."""
        known = self._members if not self._scheduler else ()
        return next((member for member in known if member.index == cause.process), self._members[0])

    def _describe(self, cause: Cause) -> str:
        """process 2 killed by SIGKILL after 12.3 s at step 7 (DIR/process_2.log)."""
        if cause.process is None:
            return cause.text
        if cause.code == HANG and cause.message is None:
            return f"process {cause.process} {cause.text}"
        # The last beat of a process that was killed may be a second old.
        step = "" if cause.step is None else f"{', last seen' * cause.unrecorded} at step {cause.step}"
        member = self._member(cause)
        log = f" ({member.log})" if member.log else ""
        message = f": {cause.message}" if cause.message else ""
        return f"process {cause.process} {cause.text} after {member.seconds:.1f} s{step}{log}{message}"

    def _ask_for_stacks(self) -> None:
        """Make all processes that can do so write their stacks, then stop them."""
        self._dumped = time.time()
        for sight in self._watch.sightings.values():
            # Signal the process of the beat: the command may be a wrapper script, which the signal would end.
            if sight.state is not None and handles(sight.beat.pid, signal.SIGUSR2):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(sight.beat.pid, signal.SIGUSR2)
        if self._scheduler and any(sight.state is None for sight in self._watch.sightings.values()):
            self._signal(signal.SIGUSR2)  # srun and mpirun pass it on to their processes
        self._actions.append((time.monotonic() + (STACKS_SECONDS if self._alive else 0.0), self._stop))

    def _stop(self) -> None:
        """Send SIGTERM to the remaining processes, and SIGKILL after a grace period."""
        now = time.monotonic()
        self._signal(signal.SIGTERM)
        if self._scheduler:
            # If the command is killed, its processes on other machines survive, so it has to end them first. Training
            # ends at once at a second SIGTERM; srun kills its tasks at the second of two SIGINTs.
            for seconds, number in SCHEDULER_SIGNALS:
                self._actions.append((now + seconds, lambda number=number: self._signal(number)))
        self._actions.append((now + self._grace(), lambda: self._signal(signal.SIGKILL)))

    def _grace(self) -> float:
        if self._scheduler:
            return SCHEDULER_GRACE_SECONDS
        return GRACE_SECONDS if self._dumped is None else HUNG_GRACE_SECONDS

    def _signal(self, number: int) -> None:
        for member in self._alive:
            member.signal(number)

    def _outcome(self) -> Outcome:
        self._watch.read_beats()
        if self._failed is not None and self._cause is None:
            self._decide(None)
        stop_signal = None if self._stop_request is None else self._stop_request[0]
        cause = self._cause
        if cause is None:
            return Outcome(max(member.process.returncode for member in self._members), stop_signal=stop_signal)
        member = self._member(cause)
        # A process that does not handle signals yet is killed by the forwarded signal, which is not a crash.
        passed_on = None if stop_signal is None else self._passed_on(stop_signal)
        ended = passed_on is not None and member.process.returncode in (-passed_on, 128 + passed_on)
        return Outcome(
            128 + stop_signal if ended and stop_signal else cause.code,
            cause,
            self._description + "; the others were stopped" * (len(self._members) > 1),
            self._failed or time.monotonic(),
            stop_signal,
            None if cause.process is None else member.log,
            () if self._dumped is None else tuple(self._watch.stacks_since(self._dumped - STACKS_SECONDS)),
        )
