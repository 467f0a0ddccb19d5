"""The thread that watches a training process: beats for the launcher, and the end of a process that hangs."""

import contextlib
import os
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Self

from megajax.job.lost_peer import LostPeer, lost_peer
from megajax.job.peer_status import PeerStatus, Status, Verdict
from megajax.mesh.world import process_index
from megajax.metrics.event_log import append_event
from megajax.resilience.activity import Activity
from megajax.resilience.backstop import Backstop
from megajax.resilience.beats import Beat, beats_folder, exit_code, first_line
from megajax.resilience.exit_codes import HANG
from megajax.resilience.stacks import stacks, write_stacks
from megajax.resilience.watchdog import Hang, Watchdog, WatchdogConfig

TICK_SECONDS = 1.0
"""How often the thread looks, and writes a beat."""

STUCK_SECONDS = 2.0
"""How long the end of a process waits for a beat that is being written."""

END_SECONDS = 30.0
"""How long a process that hangs may take to say so, where its disks hang too."""

OTHERS_SECONDS = 6.0
"""How long process 0 waits for the others, which may be about to say that they hang."""

BACKSTOP_SECONDS = 60.0
"""How much longer than the limits the backstop waits: longer than the end of a process that hangs takes."""


class Pulse:
    """Within its `with` block, a thread writes a beat about once a second, if a launcher has asked for beats, and ends
    the process if it hangs. A second thread publishes what the process does, for the others.

    Attributes:
        before_exit: called before the process is ended, to restore the terminal.
        events: events.jsonl of the run; None: not known yet.
        ticks: also called about once a second.
    """

    def __init__(self, run_dir: str | Path, activity: Activity, watchdog: WatchdogConfig | None = None):
        self.activity, self.run_dir = activity, Path(run_dir).expanduser()
        self.process = process_index()
        self.before_exit: Callable[[], None] = lambda: None
        self.events: Path | None = None
        self.ticks: list[Callable[[], None]] = []
        self.watchdog = None if watchdog is None else Watchdog(watchdog, activity)
        self.peers = PeerStatus(self._status, self.dump)
        self._folder, self._host = beats_folder(), socket.gethostname()
        self._backstop = Backstop()
        self._over, self._writing = threading.Event(), threading.Lock()

    def __enter__(self) -> Self:
        if self.watchdog is not None:
            self._backstop.__enter__()
        threading.Thread(target=self._watch, name="watchdog", daemon=True).start()
        self.peers.start()
        return self

    def __exit__(self, *error: object) -> None:
        # In no phase any more: the launcher expects no further beat while this process waits for the others to end.
        self._beat()
        self.stop()
        self._backstop.__exit__()

    def stop(self) -> None:
        """Watch no more, and write no more beats. Does not wait for a file system that does not answer."""
        self._over.set()
        self.peers.stop()
        self._backstop.hold(0.0)
        if self._writing.acquire(timeout=STUCK_SECONDS):
            self._writing.release()

    def last_beat(self, failure: str, code: int, stacks: str | None = None) -> None:
        """Say why this process is about to end; no beat follows."""
        self.stop()
        if self._folder is not None:
            with contextlib.suppress(OSError):
                replace(self._now(), failure=failure, code=code, stacks=stacks).write(self._folder)

    def failed(self, error: BaseException) -> LostPeer | None:
        """Say which error ends this process. -> the error explained, if the cause is another process."""
        self.last_beat(first_line(error), exit_code(error))
        explained = lost_peer(error, self.peers)
        if explained is not None:
            self.last_beat(first_line(explained[0]), exit_code(explained[0]))
            self._lost(explained[1])
        self.peers.publish_failure(first_line(error if explained is None else explained[0]))
        return None if explained is None else explained[0]

    def _lost(self, verdict: Verdict) -> None:
        """An event about a process that could not write one itself, by the first of the others or by the launcher."""
        if self._folder is not None:
            return
        first = verdict.process != self.process == 0 or (verdict.process, self.process) == (0, 1)
        if first and not verdict.reported and self.events is not None:
            with contextlib.suppress(OSError):
                step = self.activity.step
                append_event(self.events, "lost", process=verdict.process, cause=verdict.sentence, step=step)

    def exiting(self, why: str, code: int) -> None:
        """A signal ends this process now, whatever it does."""
        self.before_exit()
        self.last_beat(why, code)

    def dump(self, why: str = "asked for by SIGUSR2") -> None:
        """Write the stacks of all threads to the run folder."""
        write_stacks(self.run_dir, self.process, why, stacks(self.activity))

    def _watch(self) -> None:
        while not self._over.wait(TICK_SECONDS):
            self._tick()
            if self.watchdog is not None and (hang := self.watchdog.check(TICK_SECONDS)) is not None:
                self._hangs(self.watchdog, hang)

    def _tick(self) -> None:
        """What is due every second, whether or not this process waits for one that is late."""
        self._beat()
        for tick in self.ticks:
            tick()
        if self.watchdog is not None:
            self._backstop.hold(max(self.watchdog.longest(), 0.0) + BACKSTOP_SECONDS)

    def _hangs(self, watchdog: Watchdog, hang: Hang) -> None:
        """End the process, unless another one that it waits for has not reached its own limit."""
        verdict, deadline = self.peers.verdict(), time.monotonic()
        waited = verdict.patience > TICK_SECONDS
        while verdict.patience > TICK_SECONDS and time.monotonic() < deadline + verdict.patience:
            if self._over.wait(TICK_SECONDS):
                return
            self._tick()
            if watchdog.check(TICK_SECONDS) is None:
                return
        now = watchdog.check(TICK_SECONDS)
        if now is not None and not self._over.is_set():
            # What was said of the late process is old by now, and it may have said itself why it ends.
            self._end(now, self.peers.verdict() if waited else verdict)

    def _end(self, hang: Hang, verdict: Verdict) -> None:
        """Say where the process hangs, and end it with code 124."""
        late = threading.Timer(END_SECONDS, os._exit, (HANG,))
        late.daemon = True
        late.start()
        cause = f"; {verdict.sentence}" * bool(verdict.sentence)
        why, text = f"process {self.process} hangs, {hang.sentence()}{cause}", stacks(self.activity)
        self.before_exit()
        self.last_beat(why, HANG)
        _to_stderr(f"{text}\nmegajax: {why}; exit code {HANG}\n")
        written = write_stacks(self.run_dir, self.process, why, text)
        path = None if written is None else str(written)
        self.last_beat(why, HANG, path)
        self.peers.publish_failure(why)
        self.peers.ask_for_stacks()
        with contextlib.suppress(OSError):
            if self.events is not None:
                append_event(
                    self.events,
                    "hang",
                    process=self.process,
                    phase=hang.phase,
                    step=hang.step,
                    seconds=round(hang.seconds, 1),
                    limit=round(hang.limit, 1),
                    stacks=path,
                    cause=verdict.sentence or None,
                    cause_process=verdict.process,
                    exit_code=HANG,
                )
        self.peers.await_failures(OTHERS_SECONDS)
        os._exit(HANG)

    def _status(self, beat: int) -> Status:
        doing = self.activity.of_main_thread()
        if doing is None:
            return Status(beat)
        seconds = time.monotonic() - doing.last_progress
        left = 0.0 if self.watchdog is None else self.watchdog.limit(doing)[1] - seconds
        return Status(beat, doing.phase, doing.step, round(seconds, 1), round(left, 1))

    def _now(self) -> Beat:
        doing = self.activity.of_main_thread()
        return Beat(
            process=self.process,
            pid=os.getpid(),
            host=self._host,
            time=time.time(),
            run_dir=str(self.run_dir),
            step=self.activity.step,
            committed=self.activity.committed,
            phase=None if doing is None else doing.phase,
            phase_step=None if doing is None else doing.step,
            phase_seconds=0.0 if doing is None else round(time.monotonic() - doing.since, 3),
        )

    def _beat(self) -> None:
        if self._folder is None:
            return
        # OSError: a full disk, or the launcher is gone.
        with self._writing, contextlib.suppress(OSError):
            if not self._over.is_set():
                self._now().write(self._folder)


def _to_stderr(text: str) -> None:
    # Not sys.stderr: the thread that hangs may hold its lock.
    with contextlib.suppress(OSError):
        os.write(2, text.encode())
