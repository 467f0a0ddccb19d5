"""The thread that watches a training process: it writes beats for the launcher, and ends the process if it hangs."""

import contextlib
import os
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Self

from megajax.config.call_with_timeout import DISK_SECONDS, OUTPUT_SECONDS, with_time_limit
from megajax.config.errors import first_line
from megajax.faults.activity import ActivePhase, Activity, stacks, write_stacks
from megajax.faults.attempt_end import record_failure
from megajax.faults.beats import Beat, beats_folder, exit_code
from megajax.faults.exit_codes import HANG
from megajax.faults.peer_status import LostPeer, PeerStatus, Status, Verdict, lost_peer
from megajax.faults.unfailing_output import to_stderr
from megajax.faults.watchdog import Backstop, Hang, Watchdog, WatchdogConfig, waits_for_peers
from megajax.processes.world import StartError, World, find_world, process_index

TICK_SECONDS = 1.0
"""Period of the thread's checks and beats."""

STUCK_SECONDS = 2.0
"""How long a process that ends waits for a beat that is being written."""

END_SECONDS = 30.0
"""How long a process that hangs may take to report it: its disks may hang too."""

OTHERS_SECONDS = 6.0
"""How long process 0 waits for the failure reports of the others."""

BACKSTOP_SECONDS = 60.0
"""How much longer than the limits the backstop waits: longer than a process that hangs takes to end."""


class Pulse:
    """Within its `with` block, a thread writes a beat about once a second, if a launcher wants beats, and ends the
    process if it hangs. Enter it before the processes connect; after `peers.join`, another thread publishes the status
    of the process for the others.

    Attributes:
        attempt: number of the attempt in the records of the run, once it is known.
        before_exit: called before the process is ended, to restore the terminal.
        record: appends an event to events.jsonl of the run; None: nothing is recorded.
        ticks: also called about once a second.
    """

    def __init__(self, run_dir: str | Path, activity: Activity, watchdog: WatchdogConfig | None = None):
        self.activity, self.run_dir = activity, Path(run_dir).expanduser()
        self.process = process_index()
        self.attempt: int | None = None
        self.before_exit: Callable[[], None] = lambda: None
        self.record: Callable[..., None] | None = None
        self.ticks: list[Callable[[], None]] = []
        self.watchdog = None if watchdog is None else Watchdog(watchdog, activity)
        self.peers = PeerStatus(self._status, self.dump)
        self._folder, self._host = beats_folder(), socket.gethostname()
        self._world: World | None = None
        with contextlib.suppress(StartError):  # raised again when the processes connect
            self._world = find_world()
        self._backstop = Backstop()
        self._stopped, self._writing = threading.Event(), threading.Lock()

    def __enter__(self) -> Self:
        if self.watchdog is not None:
            self._backstop.__enter__()
        threading.Thread(target=self._watch, name="watchdog", daemon=True).start()
        return self

    def __exit__(self, *error: object) -> None:
        # Outside of all phases: the launcher expects no beat while this process waits for the others to end.
        self._write_beat()
        self.stop()
        self._backstop.__exit__()

    def stop(self) -> None:
        """Stop watching and writing beats. Does not wait for a file system that does not answer."""
        self._stopped.set()
        self.peers.stop()
        self._backstop.reset(0.0)
        if self._writing.acquire(timeout=STUCK_SECONDS):
            self._writing.release()

    def last_beat(self, failure: str, code: int, stacks: str | None = None, cause: int | None = None) -> None:
        """Write why this process is about to end, as its last beat. cause: the process that it waited for."""
        self.stop()
        if (folder := self._folder) is not None:
            beat = replace(self._current_beat(), failure=failure, code=code, stacks=stacks, cause=cause)
            with_time_limit(lambda: beat.write(folder), DISK_SECONDS)

    def failed(self, error: BaseException) -> LostPeer | None:
        """Report the error that ends this process -> an explained error, if the cause is another process."""
        self.last_beat(first_line(error), exit_code(error))
        explained = lost_peer(error, self.peers)
        if explained is not None:
            self.last_beat(first_line(explained[0]), exit_code(explained[0]))
            self._log_lost_process(explained[1])
        self.peers.publish_failure(first_line(error if explained is None else explained[0]))
        return None if explained is None else explained[0]

    def _log_lost_process(self, verdict: Verdict) -> None:
        """Log a process that could not write an event itself; the first other process does, unless a launcher does."""
        if self._folder is not None:
            return
        first = verdict.process != self.process == 0 or (verdict.process, self.process) == (0, 1)
        if first and not verdict.reported and self.record is not None:
            with contextlib.suppress(OSError):
                step = self.activity.step + 1 if self.activity.step else None  # the one in progress
                lost = {"process": verdict.process, "cause": verdict.explanation, "step": step}
                record_failure(self.record, "lost", several=True, **lost)

    def exiting(self, why: str, code: int) -> None:
        """A signal ends this process now."""
        self.last_beat(why, code)
        with_time_limit(self.before_exit, OUTPUT_SECONDS)

    def dump(self, why: str = "asked for by SIGUSR2") -> None:
        """Write the stacks of all threads to the run folder."""
        write_stacks(self.run_dir, self.process, why, stacks(self.activity))

    def _watch(self) -> None:
        # The launcher blames only processes that have written a beat, so the first one comes at once.
        self._write_beat()
        while not self._stopped.wait(TICK_SECONDS):
            self._tick()
            if self.watchdog is not None and (hang := self.watchdog.check(TICK_SECONDS)) is not None:
                self._handle_hang(self.watchdog, hang)

    def _tick(self) -> None:
        """The work of every second, whether or not this process waits for a slow one."""
        self._write_beat()
        for tick in self.ticks:
            tick()
        if self.watchdog is not None:
            self._backstop.reset(max(self.watchdog.longest(), 0.0) + BACKSTOP_SECONDS)

    def _handle_hang(self, watchdog: Watchdog, hang: Hang) -> None:
        """End the process, unless it waits for another process that is still within its own limit."""
        verdict, deadline = self.peers.verdict(background=hang.background), time.monotonic()
        waited = verdict.patience > TICK_SECONDS
        while verdict.patience > TICK_SECONDS and time.monotonic() < deadline + verdict.patience:
            if self._stopped.wait(TICK_SECONDS):
                return
            self._tick()
            if watchdog.check(TICK_SECONDS) is None:
                return
        now = watchdog.check(TICK_SECONDS)
        if now is not None and not self._stopped.is_set():
            # After a wait the first verdict is old, and the slow process may have reported its failure.
            self._end(now, self.peers.verdict(background=now.background) if waited else verdict)

    def _end(self, hang: Hang, verdict: Verdict) -> None:
        """Report where the process hangs, and end it with code 124.

        Nothing waits for the disk or for a reader of the standard error, which may be what hangs, and files come first.
        """
        timer = threading.Timer(END_SECONDS, os._exit, (HANG,))
        timer.daemon = True
        timer.start()
        cause = f"; {verdict.explanation}" * bool(verdict.explanation)
        why, text = f"process {self.process} hangs, {hang.sentence()}{cause}", stacks(self.activity)
        self.last_beat(why, HANG, cause=verdict.process)
        file = with_time_limit(lambda: write_stacks(self.run_dir, self.process, why, text), DISK_SECONDS)
        self.last_beat(why, HANG, None if file is None else str(file), verdict.process)
        with_time_limit(lambda: self._log_hang(hang, verdict, file), DISK_SECONDS)
        self.peers.publish_failure(why, verdict.process)
        with_time_limit(self.before_exit, OUTPUT_SECONDS)
        with_time_limit(lambda: to_stderr(f"{text}\nmegajax: {why}; exit code {HANG}\n"), OUTPUT_SECONDS)
        self.peers.ask_for_stacks()
        self.peers.await_failures(OTHERS_SECONDS)
        os._exit(HANG)

    def _log_hang(self, hang: Hang, verdict: Verdict, file: Path | None) -> None:
        if self.record is not None:
            record_failure(
                self.record,
                "hang",
                several=self.peers.count > 1 or self._world is not None,
                process=self.process,
                phase=hang.phase,
                stage=hang.stage,
                step=hang.step,
                seconds=round(hang.seconds, 1),
                limit=round(hang.limit, 1),
                stacks=None if file is None else str(file),
                cause=verdict.explanation or None,
                cause_process=verdict.process,
                exit_code=HANG,
            )

    def _status(self, beat: int) -> Status:
        main = self.activity.of_main_thread()
        others = [doing for doing in self.activity.now() if main is None or doing.thread != main.thread]
        background = min(others, key=lambda doing: doing.last_progress, default=None)
        status = Status(beat, completed=self.activity.step) if main is None else self._status_of(beat, main)
        return status if background is None else status._replace(background=self._status_of(beat, background))

    def _status_of(self, beat: int, doing: ActivePhase) -> Status:
        seconds = time.monotonic() - doing.last_progress
        remaining = 0.0 if self.watchdog is None else self.watchdog.limit(doing)[1] - seconds
        return Status(
            beat,
            doing.phase,
            doing.step,
            round(seconds, 1),
            round(remaining, 1),
            stage=doing.stage,
            waits=waits_for_peers(doing.thread),
            completed=self.activity.step,
        )

    def _current_beat(self) -> Beat:
        doing = self.activity.of_main_thread()
        return Beat(
            process=self.process,
            pid=os.getpid(),
            host=self._host,
            time=time.time(),
            run_dir=str(self.run_dir.absolute()),
            step=self.activity.step,
            attempt=self.attempt,
            committed=self.activity.committed,
            phase=None if doing is None else doing.phase,
            phase_step=None if doing is None else doing.step,
            phase_seconds=0.0 if doing is None else round(time.monotonic() - doing.since, 3),
            stage=None if doing is None else doing.stage,
            waits=doing is not None and waits_for_peers(doing.thread),
        )

    def _write_beat(self) -> None:
        if self._folder is None:
            return
        # OSError: a full disk, or the launcher is gone.
        with self._writing, contextlib.suppress(OSError):
            if not self._stopped.is_set():
                self._current_beat().write(self._folder)
