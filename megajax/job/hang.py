"""The thread that watches a training process: beats for the launcher, and the end of a process that hangs."""

import contextlib
import os
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Self

from megajax.mesh.world import process_index
from megajax.resilience.activity import Activity
from megajax.resilience.beats import Beat, beats_folder, exit_code, first_line, last_beat
from megajax.resilience.stacks import stacks, write_stacks

TICK_SECONDS = 1.0
"""How often the thread looks, and writes a beat."""

STUCK_SECONDS = 2.0
"""How long the end of a process waits for a beat that is being written."""


class Pulse:
    """Within its `with` block, a thread writes a beat about once a second, if a launcher has asked for beats.

    Attributes:
        before_exit: called before the process is ended, to restore the terminal.
    """

    def __init__(self, run_dir: str | Path, activity: Activity):
        self.activity, self.run_dir = activity, Path(run_dir).expanduser()
        self.process = process_index()
        self.before_exit: Callable[[], None] = lambda: None
        self._folder, self._host = beats_folder(), socket.gethostname()
        self._over, self._writing = threading.Event(), threading.Lock()

    def __enter__(self) -> Self:
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()

    def stop(self) -> None:
        """Write no more beats. Does not wait for a file system that does not answer."""
        self._over.set()
        if self._writing.acquire(timeout=STUCK_SECONDS):
            self._writing.release()

    def last_beat(self, failure: str, code: int, stacks: str | None = None) -> None:
        """Say why this process is about to end; no beat follows."""
        self.stop()
        last_beat(failure, code, stacks)

    def failed(self, error: BaseException) -> None:
        """Say which error ends this process."""
        self.last_beat(first_line(error), exit_code(error))

    def exiting(self, why: str, code: int) -> None:
        """A signal ends this process now, whatever it does."""
        self.before_exit()
        self.last_beat(why, code)

    def dump(self) -> None:
        """Write the stacks of all threads to the run folder, because the launcher asked for them."""
        write_stacks(self.run_dir, self.process, "asked for by SIGUSR2", stacks(self.activity))

    def _watch(self) -> None:
        while not self._over.is_set():
            self._beat()
            self._over.wait(TICK_SECONDS)

    def _beat(self) -> None:
        if self._folder is None:
            return
        doing = self.activity.of_main_thread()
        beat = Beat(
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
        # OSError: a full disk, or the launcher is gone.
        with self._writing, contextlib.suppress(OSError):
            if not self._over.is_set():
                beat.write(self._folder)
