"""Requests to stop: between steps, and while the process waits for rows, a compilation or another process.

The loop checks for a request between steps. While it waits, the thread that watches the process checks every second.
"""

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Generator

from megajax.config.call_with_timeout import DISK_SECONDS, OUTPUT_SECONDS, with_time_limit
from megajax.faults.activity import BACKGROUND_SAVE, COMPILE, DATA_WAIT, EVALUATION, STEP
from megajax.faults.attempt_end import ATTEMPT_END, stopped_end
from megajax.faults.config import ResilienceConfig
from megajax.faults.pulse import Pulse
from megajax.faults.signals import Signals, StopRequest, StopWaiting, agree
from megajax.faults.unfailing_output import to_stderr

DATA_SECONDS = 5.0
"""How long one of several processes waits for its rows after a request: then all try to stop before this step."""

BARRIER_SECONDS = 5.0
"""How long processes wait for each other at the end."""

CLOSE_SECONDS = 5.0
"""How long the prefetch may take to stop after an abandoned wait."""

_WAITS = (DATA_WAIT, STEP, COMPILE, EVALUATION)


class Stopping:
    """Decides when training stops before its last step, and ends a process that waits after a request.

    Attributes:
        last_step: the last step of this attempt, without a request to stop.
        abandoned: whether a wait for rows was abandoned. The thread that reads them may never end, however short the
            wait was, and the interpreter must not wait for it.
        signalled: whether a signal stopped the run, the same on all processes; known after `agree_on_signal`.
    """

    def __init__(self, cfg: ResilienceConfig, steps: int, pulse: Pulse, signals: Signals, *, started: float):
        """steps: of the run. started: monotonic time at which this attempt began."""
        self._cfg, self._pulse, self._signals, self._steps = cfg, pulse, signals, steps
        self._activity, self._peers, self._started = pulse.activity, pulse.peers, started
        self._shared = False
        self.abandoned = self.signalled = False
        self.begin(0)
        pulse.ticks.append(self.check)
        pulse.peers.on_stop_request = signals.request_stop

    def begin(self, first: int) -> None:
        """first: steps before this attempt."""
        limit, self._first = self._cfg.exit_after_steps, first
        self.last_step = self._steps if limit is None else min(self._steps, first + limit)

    def requested(self) -> bool:
        """Whether this process was asked to stop, or its time limit has passed."""
        return self._signals.request is not None or self._out_of_time()

    def requested_anywhere(self) -> bool:
        """Whether any process was asked to stop. A collective, called before each batch of an evaluation."""
        self._activity.progress()
        return agree(self._signals.request is not None)

    def agree_on_signal(self) -> bool:
        """Sets `signalled` and returns it. A collective, after the last step: a signal may have reached one process."""
        self.signalled = agree(self._signals.request is not None)
        return self.signalled

    def reason(self, step: int) -> str:
        """Why training ended after `step`, before the last step of the run."""
        if self._signals.request is not None:
            return self._signals.request.signal
        if step >= self.last_step:
            return f"resilience.exit_after_steps={self._cfg.exit_after_steps}"
        minutes = self._cfg.exit_after_minutes
        return f"resilience.exit_after_minutes={minutes:g}" if self._out_of_time() else "asked to stop"

    def _out_of_time(self) -> bool:
        minutes = self._cfg.exit_after_minutes
        return minutes is not None and time.monotonic() - self._started >= 60 * minutes

    @contextlib.contextmanager
    def waiting(self, step: int) -> Generator[None]:
        """The block waits for the rows of a step. Raises StopWaiting if all processes can stop before that step."""
        try:
            with self._signals.interruptible(step, at_once=self._peers.single_process):
                yield
        except StopWaiting:
            self.abandoned = True
            # Another process may have begun the step, which donates the state before it.
            if not self._peers.barrier(f"stop before step {step}", self._cfg.stop_grace):
                self._end(f"no rows for step {step}, and other processes have begun that step", saved=False)
            raise

    def close(self, close: Callable[[], None]) -> None:
        """Stop the prefetch; after an abandoned wait, for at most CLOSE_SECONDS."""
        if not self.abandoned:
            close()
            return
        closing = threading.Thread(target=close, daemon=True)
        closing.start()
        closing.join(CLOSE_SECONDS)

    def code(self) -> int:
        """The exit code of a run that stopped early."""
        return self._cfg.exit_code_on_signal if self.signalled else 0

    def check(self) -> None:
        """End the process if it waits too long after a request, or has nothing to save; called every second."""
        request, doing = self._signals.request, self._activity.of_main_thread()
        if request is None or doing is None or not self._signals.polled:
            return
        if not self._shared:
            self._shared = True
            self._peers.share_stop(request.signal)
        now = time.monotonic()
        if any(activity.phase == BACKGROUND_SAVE for activity in self._activity.now()) or doing.phase not in _WAITS:
            return
        since, grace = now - max(request.at, doing.last_progress), self._cfg.stop_grace
        unsaved = self._activity.step not in (self._first, self._activity.committed)
        if not unsaved and doing.first and doing.phase != DATA_WAIT:
            if self._peers.single_process or now - request.at > BARRIER_SECONDS:
                self._end("a program is compiling, and there is nothing new to save", saved=True)
        elif since > max(grace, 2.0 * (self._activity.median_seconds(doing.phase) or 0.0)):
            delay = f"still {doing.description()} {since:.0f} s after the request"
            self._end(f"{delay} (resilience.stop_grace={grace:g})", saved=not unsaved)
        elif doing.phase == DATA_WAIT and since > min(DATA_SECONDS, grace / 2) and not self._peers.single_process:
            self._signals.wake(doing.step)

    def _end(self, why: str, *, saved: bool) -> None:
        """End this process now. saved: nothing is lost."""
        request = self._signals.request or StopRequest("SIGTERM", time.time())
        step, committed = self._activity.step, self._activity.committed
        code = self._cfg.exit_code_on_signal if saved else 128 + signal.Signals[request.signal].value
        last_saved = committed if committed is not None else self._first
        loss = "" if saved else f"; steps {last_saved + 1} to {step} are lost"
        if self._pulse.process == 0:
            with_time_limit(lambda: self._record(step, committed, f"{request.signal}: {why}", code), DISK_SECONDS)
        if code:
            self._pulse.last_beat(f"stopped by {request.signal}, unsaved: {why}", code)
        with_time_limit(self._pulse.before_exit, OUTPUT_SECONDS)
        if self._pulse.process == 0:
            line = f"megajax: stopped after step {step} ({request.signal}): {why}{loss}\n"
            with_time_limit(lambda: to_stderr(line), OUTPUT_SECONDS)
        self.leave(code)

    def _record(self, step: int, committed: int | None, reason: str, code: int) -> None:
        if self._pulse.record is not None:
            self._pulse.record("stopped", step=step, saved=committed, reason=reason)
            self._pulse.record(ATTEMPT_END, **stopped_end(step, committed, reason, code))

    def leave(self, code: int) -> None:
        """End the process without waiting for threads; several processes end together."""
        self._peers.barrier("leave", BARRIER_SECONDS)
        if self._pulse.process == 0:
            # The others end as soon as the coordination service is gone.
            time.sleep(0.0 if self._peers.single_process else 1.0)
        for stream in (sys.stdout, sys.stderr):
            with_time_limit(stream.flush, OUTPUT_SECONDS)
        os._exit(code)
