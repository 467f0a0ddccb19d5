"""Starts the processes of a run, and restarts them after failures that may be transient."""

import contextlib
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from pathlib import Path
from queue import Empty, SimpleQueue

from megajax.config.call_with_timeout import OUTPUT_SECONDS, with_time_limit
from megajax.config.errors import UserError
from megajax.faults.attempt_end import ATTEMPT_END, BY_LAUNCHER, end_of_run
from megajax.faults.exit_codes import CRASH
from megajax.launcher.attempt import Attempt, Outcome
from megajax.launcher.first_failure import Cause, attempt_end
from megajax.launcher.gang import CannotStart, Gang, Member, forwarding, last_lines, running, write_or_drop
from megajax.launcher.gang_watch import GangWatch, HangLimits
from megajax.launcher.restarts import Restart, RestartConfig, Restarts, Stop

type Record = Callable[..., None]
"""(events.jsonl, name, **fields): `megajax.metrics.event_log.append_event`, passed in by the caller."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Supervision:
    """Restarts, limits of hangs, and the folder of heartbeats."""

    restarts: RestartConfig = field(default_factory=RestartConfig)
    limits: HangLimits = field(default_factory=HangLimits)
    beats: Path | None = None
    """Folder for heartbeats, shared by all machines of the run; None: a temporary folder of this machine."""


def run(gang: Gang, supervision: Supervision, record: Record) -> int:
    """Start the gang, restart it if that may help, and wait for its end.

    -> 0, or the exit code of the process that failed first (1 for a signal), or 93 if restarts make no progress.
    Raises UserError if a process can't be started.
    """
    for name, folder in (("log-dir", gang.log_dir), ("beats", supervision.beats)):
        if folder is not None:
            try:
                folder.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise UserError(f"--{name}={folder} cannot be created: {error.strerror}") from error
    events: SimpleQueue[Member | signal.Signals] = SimpleQueue()
    with forwarding(events), _beats_folder(supervision.beats) as beats:
        return Supervisor(gang, supervision, record, beats, events).run()


class Supervisor:
    """The attempts of a run, one after another."""

    def __init__(
        self,
        gang: Gang,
        supervision: Supervision,
        record: Record,
        beats: Path,
        events: "SimpleQueue[Member | signal.Signals]",
    ):
        self._gang, self._limits, self._record, self._beats = gang, supervision.limits, record, beats
        self._events = events
        self._restarts = Restarts(supervision.restarts, range(gang.processes))
        self._supervised = supervision.restarts.max_restarts > 0
        self._run_dir: Path | None = None
        self._number = self._recorded = 0
        """Number of the attempt of this launcher, and in the records of the run, which may have had earlier ones."""

    def run(self) -> int:
        """-> exit code."""
        while True:
            self._number += 1
            watch = GangWatch(self._fresh_folder(), self._limits)
            try:
                outcome = self._attempt(watch)
            except CannotStart as error:
                if self._number == 1:
                    raise
                outcome = Outcome(1, None, str(error), time.monotonic())
                self._recorded += 1
                self._record_event(ATTEMPT_END, **end_of_run(CRASH, "start", str(error), None, by=BY_LAUNCHER))
                decision = self._restarts.unable_to_start(error.index)
            else:
                if outcome.cause is None:
                    return outcome.code
                self._run_dir = watch.run_dir or self._run_dir
                self._record_end(outcome, outcome.cause, watch)
                committed = watch.committed(self._run_dir)
                decision = self._restarts.after(
                    outcome.cause, baseline=watch.baseline, committed=committed, has_beats=bool(watch.sightings)
                )
                if outcome.stop_signal is not None:
                    decision = Stop(outcome.code, f"{outcome.stop_signal.name} asked for the end")
            if isinstance(decision, Stop):
                return self._stop(outcome, decision)
            self._announce(outcome, decision)
            if (stop_signal := self._wait(decision.wait)) is not None:
                return self._stop(
                    outcome, Stop(128 + stop_signal, f"{stop_signal.name} asked for the end before the restart")
                )
            self._record_restart(outcome)

    def _attempt(self, watch: GangWatch) -> Outcome:
        slots, beats, number = self._restarts.slots, watch.folder, self._number
        with running(self._gang, slots, beats=beats, attempt=number, events=self._events) as members:
            return Attempt(members, self._events, watch, scheduler=self._gang.scheduler).supervise()

    def _fresh_folder(self) -> Path:
        """An empty folder for the beats of this attempt. On a full disk it is not created, and training continues."""
        folder = self._beats / f"attempt_{self._number}"
        shutil.rmtree(folder, ignore_errors=True)
        with contextlib.suppress(OSError):
            folder.mkdir(parents=True, exist_ok=True)
        return folder

    def _wait(self, seconds: float) -> signal.Signals | None:
        """Wait for the restart -> the signal that ended the wait, if any."""
        deadline = time.monotonic() + seconds
        while (remaining := deadline - time.monotonic()) > 0:
            with contextlib.suppress(Empty):
                event = self._events.get(timeout=remaining)
                if isinstance(event, signal.Signals):
                    return event
        return None

    def _announce(self, outcome: Outcome, decision: Restart) -> None:
        newest, unknown = self._restarts.newest, "the beginning" if self._run_dir else "the newest checkpoint, if any"
        place = unknown if newest is None else f"step {newest}"
        number, of = self._restarts.restarts, self._restarts.cfg.max_restarts
        line = f"attempt {self._number}: {outcome.description}; restart {number} of {of} in {decision.wait:g} s"
        if decision.dropped is not None:
            count, slots = len(decision.slots), ", ".join(map(str, decision.slots))
            line += f", with {count} processes (places {slots}): the one in place {decision.dropped} keeps failing"
        self._say(f"{line}, from {place}")
        self._say_stacks(outcome)

    def _stop(self, outcome: Outcome, decision: Stop) -> int:
        if outcome.log is not None and (lines := last_lines(outcome.log)):
            self._say("\n    ".join([f"the last lines of {outcome.log}:", *lines]))
        self._say_stacks(outcome)
        if self._supervised:
            self._record_event("supervisor_stop", code=decision.code, why=decision.why or outcome.description)
        attempt = f"attempt {self._number}: " * self._supervised
        self._say(f"{attempt}{outcome.description}" + f"; {decision.why}" * bool(decision.why))
        return decision.code

    def _say_stacks(self, outcome: Outcome) -> None:
        if outcome.stacks:
            self._say(f"stacks of its processes: {', '.join(map(str, outcome.stacks))}")

    def _record_end(self, outcome: Outcome, cause: Cause, watch: GangWatch) -> None:
        """Record which process failed first."""
        beats = [sight.beat for sight in watch.sightings.values()]
        self._recorded = max((beat.attempt for beat in beats if beat.attempt), default=self._recorded + 1)
        if cause.unrecorded:
            self._record_event("lost", process=cause.process, cause=cause.text, step=cause.step)
        completed = max((beat.step for beat in beats), default=0)
        end = attempt_end(cause, outcome.code, completed, several_machines=self._gang.machines > 1)
        self._record_event(ATTEMPT_END, **end)

    def _record_restart(self, outcome: Outcome) -> None:
        cause = outcome.cause
        self._record_event(
            "restart",
            attempt=self._recorded + 1,
            after_code=outcome.code,
            cause=outcome.description,
            process=None if cause is None else cause.process,
            step=None if cause is None else cause.step,
            processes=len(self._restarts.slots),
            seconds_down=round(time.monotonic() - outcome.failed, 3),
        )

    def _record_event(self, name: str, /, **fields: object) -> None:
        """Record an event in the run folder, if the beats have named it."""
        if self._run_dir is None or not self._run_dir.is_dir():
            return
        try:
            self._record(self._run_dir / "events.jsonl", name, **{"attempt": self._recorded, **fields})
        except OSError as error:
            self._say(f"{self._run_dir / 'events.jsonl'} can't be written: {error.strerror}")

    def _say(self, text: str) -> None:
        line = f"megajax.launch: {text}\n".encode()
        # The output may be a pipe that nobody reads.
        with_time_limit(lambda: write_or_drop(sys.stderr.fileno(), line), OUTPUT_SECONDS)


@contextlib.contextmanager
def _beats_folder(folder: Path | None) -> Generator[Path]:
    if folder is not None:
        yield folder.absolute()
        return
    with tempfile.TemporaryDirectory(prefix="megajax-beats-", ignore_cleanup_errors=True) as temporary:
        yield Path(temporary)
