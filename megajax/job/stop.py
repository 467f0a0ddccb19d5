"""Requests to stop: when training ends early, and what happens while it waits for rows, a compilation or a process.

Between steps the loop itself sees the request. Elsewhere the thread that watches the process looks every second.
"""

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Generator

from megajax.job.hang import Pulse
from megajax.metrics.event_log import append_event
from megajax.resilience.activity import BACKGROUND_SAVE, COMPILE, STEP, describe_phase
from megajax.resilience.signals import Signals, StopRequest, StopWaiting, agree
from megajax.training.run_config import RunConfig
from megajax.training.timing import DATA_WAIT, EVALUATION

DATA_SECONDS = 5.0
"""How long one of several processes that was asked to stop waits for its rows: then all see whether they can stop
before this step."""

TOGETHER_SECONDS = 5.0
"""How long processes wait for each other at the end."""

IN_VAIN_SECONDS = 0.5
"""After a longer wait, the threads that read may never end, and the interpreter is not to wait for them."""

CLOSE_SECONDS = 5.0
"""How long reading ahead may take to stop, where rows were awaited in vain."""

_WAITS = (DATA_WAIT, STEP, COMPILE, EVALUATION)


class Stopping:
    """When training stops before its last step, and what a process does about a request while it waits.

    Attributes:
        last_step: the step this attempt ends after, unless it is asked to stop.
        abandoned: whether rows were awaited in vain: a thread that reads them may never end.
    """

    def __init__(self, cfg: RunConfig, pulse: Pulse, signals: Signals, *, first: int, started: float):
        """first: steps done before this attempt. started: when it began, by the monotonic clock."""
        self._cfg, self._pulse, self._signals, self._first = cfg.resilience, pulse, signals, first
        self._activity, self._peers, self._started = pulse.activity, pulse.peers, started
        limit = cfg.resilience.exit_after_steps
        self.last_step = cfg.steps if limit is None else min(cfg.steps, first + limit)
        self._shared = False
        self.abandoned = False
        pulse.ticks.append(self.look)
        pulse.peers.asked_to_stop = signals.request_stop

    def requested(self) -> bool:
        """Whether this process was asked to stop, or its time is up."""
        return self._signals.request is not None or self._out_of_time()

    def requested_anywhere(self) -> bool:
        """Whether any process was asked to stop; all ask together, before each batch of an evaluation."""
        self._activity.progress()
        return agree(self._signals.request is not None)

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
        """Rows of a step are awaited within the block. Raises StopWaiting if all processes can stop before it."""
        begun = time.monotonic()
        try:
            with self._signals.interruptible(step, at_once=self._peers.alone):
                yield
        except StopWaiting:
            self.abandoned = time.monotonic() - begun > IN_VAIN_SECONDS
            # Another process may have begun the step: then no process has the state before it any more.
            if not self._peers.barrier(f"stop before step {step}", self._cfg.stop_grace):
                self._end(f"the rows of step {step} did not come, and other processes are in that step", saved=False)
            raise

    def close(self, close: Callable[[], None]) -> None:
        """Stop reading ahead, as long as that does not wait for rows that never come."""
        if not self.abandoned:
            close()
            return
        closing = threading.Thread(target=close, daemon=True)
        closing.start()
        closing.join(CLOSE_SECONDS)

    def code(self) -> int:
        """The exit code of a run that was asked to stop, and did."""
        return self._cfg.exit_code_on_signal if self._signals.request is not None else 0

    def look(self) -> None:
        """End the process if it waits in vain, or has nothing to save; called by another thread every second."""
        request, doing = self._signals.request, self._activity.of_main_thread()
        if request is None or doing is None or not self._signals.polled:
            return
        if not self._shared:
            self._shared = True
            self._peers.share_stop(request.signal)
        now = time.monotonic()
        if any(each.phase == BACKGROUND_SAVE for each in self._activity.now()) or doing.phase not in _WAITS:
            return
        since, grace = now - max(request.at, doing.last_progress), self._cfg.stop_grace
        unsaved = self._activity.step not in (self._first, self._activity.committed)
        if not unsaved and doing.first and doing.phase != DATA_WAIT:
            if self._peers.alone or now - request.at > TOGETHER_SECONDS:
                self._end("a program is compiled, and there is nothing new to save", saved=True)
        elif since > max(grace, 2.0 * (self._activity.median_seconds(doing.phase) or 0.0)):
            what = f"still {describe_phase(doing.phase, doing.step)} {since:.0f} s after the request"
            self._end(f"{what} (resilience.stop_grace={grace:g})", saved=not unsaved)
        elif doing.phase == DATA_WAIT and since > min(DATA_SECONDS, grace / 2) and not self._peers.alone:
            self._signals.wake(doing.step)

    def _end(self, why: str, *, saved: bool) -> None:
        """End this process now. saved: nothing is lost."""
        request = self._signals.request or StopRequest("SIGTERM", time.time())
        step, committed = self._activity.step, self._activity.committed
        code = self._cfg.exit_code_on_signal if saved else 128 + signal.Signals[request.signal].value
        kept = committed if committed is not None else self._first
        lost = "" if saved else f"; steps {kept + 1} to {step} are lost"
        self._pulse.before_exit()
        if self._pulse.process == 0:
            _say(f"stopped after step {step} ({request.signal}): {why}{lost}")
            self._event(step, committed, f"{request.signal}: {why}")
        if code:
            self._pulse.last_beat(f"stopped by {request.signal}, unsaved: {why}", code)
        self.leave(code)

    def _event(self, step: int, committed: int | None, reason: str) -> None:
        with contextlib.suppress(OSError):
            if self._pulse.events is not None:
                append_event(self._pulse.events, "stopped", step=step, saved=committed, reason=reason)

    def leave(self, code: int) -> None:
        """End the process without waiting for threads that may never end; with several, together."""
        self._peers.barrier("leave", TOGETHER_SECONDS)
        if self._pulse.process == 0:
            # The others end as soon as the coordination service is gone.
            time.sleep(0.0 if self._peers.alone else 1.0)
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
        os._exit(code)


def _say(text: str) -> None:
    with contextlib.suppress(OSError):
        os.write(2, f"megajax: {text}\n".encode())
