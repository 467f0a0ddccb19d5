"""Converts stop signals to a request that the training loop polls, so that it can save a checkpoint first."""

import faulthandler
import os
import signal
import socket
import threading
import time
import weakref
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FrameType
from typing import Any, Self

import jax
import numpy as np
from jax.experimental import multihost_utils

from megajax.config.call_with_timeout import DISK_SECONDS, OUTPUT_SECONDS, with_time_limit
from megajax.faults.unfailing_output import stderr_descriptor, to_stderr

_STOP = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)
_EXIT_IF_REPEATED = (signal.SIGTERM, signal.SIGINT)
_DUMP = signal.SIGUSR2
_WAKE = signal.SIGURG
"""Interrupts a wait of the main thread. Nothing else uses this signal, and by default it is ignored."""

# A launcher and the terminal, or two layers of a scheduler, may forward the same request within milliseconds.
_DUPLICATE_SECONDS = 0.25


@dataclass(frozen=True, slots=True)
class StopRequest:
    """The first signal that asked this process to stop."""

    signal: str
    """Name of the signal: "SIGTERM", "SIGINT", "SIGUSR1" or "SIGHUP"."""
    time: float
    """Time of the signal, in seconds since 1970."""
    at: float = field(default_factory=time.monotonic, compare=False)
    """Time of the signal by the monotonic clock."""


class StopWaiting(Exception):
    """Ends a wait of the main thread, because this process was asked to stop."""


class Signals:
    """Context manager in which SIGTERM, SIGINT and SIGUSR1 set `request` instead of ending the process.

    The loop polls `request` wherever it may wait: between steps, in evaluation, and for data. A second SIGTERM or
    SIGINT ends the process at once with exit code 143 or 130, without saving, even if the main thread is in a
    compilation or a collective; `before_exit(message, code)` is called first, to restore the terminal. A signal within
    0.25 s of another is a duplicate. SIGUSR1 never ends the process at once. While `polled` is False, because there is
    nothing to save yet, the first SIGTERM or SIGINT ends the process in the same way.

    SIGHUP, sent when a terminal is closed, is like SIGUSR1, unless it is ignored (`nohup`).

    SIGUSR2 does not stop the process. It writes the stacks of all threads to stderr, also while C code holds the
    interpreter's lock, and calls `dump` in another thread.

    Enter it in the main thread, after `jax.distributed.initialize`, which replaces the handler of SIGTERM unless
    jax_enable_preemption_service is off. Leaving the block restores the former handlers.
    """

    def __init__(
        self,
        *,
        announce: Callable[[str], None] | None = None,
        before_exit: Callable[[str, int], None] | None = None,
        polled: bool = True,
        dump: Callable[[], None] | None = None,
        received: Callable[[str, int | None], None] | None = None,
    ):
        """received: called with the name of each signal, and the exit code if it ends the process now."""
        self._announce = announce or (lambda message: to_stderr(f"megajax: {message}\n"))
        self._before_exit, self._dump = before_exit, dump or (lambda: None)
        self._received = received or (lambda name, code: None)
        self._request: StopRequest | None = None
        self._former: dict[signal.Signals, Any] = {}
        self._first_time: float | None = None
        self._place: object = None
        self._woken: object = None
        self._at_once = False
        self.polled = polled
        """Whether the program polls `request`."""
        self.when = "after this step"
        """Time of the stop, for messages."""

    @property
    def request(self) -> StopRequest | None:
        """The request to stop this process, or None. Other processes may have different ones: see `agree`."""
        return self._request

    def request_stop(self, name: str) -> None:
        """Request a stop because another process received signal `name`."""
        self._set_request(signal.Signals[name])

    @contextmanager
    def interruptible(self, place: object, *, at_once: bool) -> Generator[None]:
        """Within the block, in the main thread, a stop request raises StopWaiting.

        at_once: whether immediately, or only at `wake(place)`. place: identifies the wait; not None.
        """
        self._at_once, self._place = at_once, place
        try:
            self._interrupt()
            yield
        finally:
            self._place = None

    def wake(self, place: object) -> None:
        """Interrupt the wait for `place`, if the main thread is still in it."""
        self._woken = place
        signal.pthread_kill(threading.main_thread().ident or 0, _WAKE)

    def _interrupt(self) -> None:
        if self._request is not None and self._place is not None and (self._at_once or self._woken == self._place):
            self._place = None
            raise StopWaiting

    def __enter__(self) -> Self:
        # Python runs handlers only between bytecodes of the main thread, which may be in XLA for minutes. So C code
        # also writes the number of each signal to a socket immediately, and a thread reads it.
        self._inbox, self._outbox = socket.socketpair()
        self._outbox.setblocking(False)
        ignored = {signal.SIGHUP} if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN else set()
        handled = (number for number in (*_STOP, _DUMP, _WAKE) if number not in ignored)
        self._former = {number: signal.signal(number, self._handle) for number in handled}
        if (stderr := stderr_descriptor()) is not None:
            faulthandler.register(_DUMP, file=stderr, all_threads=True, chain=True)
        self._former_descriptor = signal.set_wakeup_fd(self._outbox.fileno(), warn_on_full_buffer=False)
        self._watcher = threading.Thread(target=self._watch, name="signals", daemon=True)
        self._watcher.start()
        leave = weakref.WeakMethod(self._restore)
        os.register_at_fork(after_in_child=lambda: (restore := leave()) and restore())
        return self

    def __exit__(self, *error: object) -> None:
        self._restore()
        self._outbox.close()
        self._watcher.join()
        self._inbox.close()

    def _restore(self) -> None:
        """Restores the former handlers. Also called in a forked child."""
        if not self._former:
            return
        faulthandler.unregister(_DUMP)
        signal.set_wakeup_fd(self._former_descriptor)
        for number, handler in self._former.items():
            # None: a handler that was not installed from Python and cannot be restored.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        self._former = {}

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if number in _STOP:
            self._set_request(signal.Signals(number))
        self._interrupt()

    def _watch(self) -> None:
        while numbers := self._inbox.recv(64):
            for number in numbers:
                if number in _STOP:
                    self._receive(signal.Signals(number))
                elif number == _DUMP:
                    with_time_limit(self._dump, DISK_SECONDS)

    def _set_request(self, which: signal.Signals) -> None:
        if self._request is None:
            self._request = StopRequest(which.name, time.time())

    def _receive(self, which: signal.Signals) -> None:
        """Handles a signal in the watcher thread."""
        self._set_request(which)
        if which not in _EXIT_IF_REPEATED:
            self._note(which.name, None)
            self._say(f"{which.name} received: stopping {self.when}")
            return
        now = time.monotonic()
        if not self.polled:
            self._exit_now(f"{which.name}: exiting at once, with nothing to save yet", which)
        elif self._first_time is None:
            self._first_time = now
            self._note(which.name, None)
            repeat = "press Ctrl-C again" if which is signal.SIGINT else "send it again"
            self._say(f"{which.name} received: stopping {self.when}; {repeat} to exit at once, unsaved")
        elif now - self._first_time > _DUPLICATE_SECONDS:
            self._exit_now(f"second {which.name}: exiting at once, unsaved", which)

    def _say(self, message: str) -> None:
        # The terminal may be gone, or its output stopped; the watcher must survive for the second signal.
        with_time_limit(lambda: self._announce(message), OUTPUT_SECONDS)

    def _note(self, name: str, code: int | None) -> None:
        with_time_limit(lambda: self._received(name, code), DISK_SECONDS)

    def _exit_now(self, message: str, which: signal.Signals) -> None:
        try:
            self._note(which.name, 128 + which)
            if self._before_exit is not None:
                self._before_exit(message, 128 + which)
            with_time_limit(lambda: to_stderr(f"megajax: {message}\n"), OUTPUT_SECONDS)
        finally:
            # Not sys.exit: atexit hooks of the runtime wait minutes for other processes.
            os._exit(128 + which)


def agree(flag: bool) -> bool:
    """True on every process if `flag` is true on any of them.

    With several processes this is a collective, which waits for the current step: every process must call it at the
    same steps. With one process it costs nothing.
    """
    if jax.process_count() == 1:
        return flag
    return bool(np.any(multihost_utils.process_allgather(np.asarray(flag, np.int32))))
