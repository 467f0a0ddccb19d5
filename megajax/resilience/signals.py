"""Being told to stop: signals become a request that the training loop polls, so that it can save first."""

import os
import signal
import socket
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from types import FrameType, TracebackType
from typing import Any, Self

import jax
import numpy as np
from jax.experimental import multihost_utils

_STOP = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
_INSIST = (signal.SIGTERM, signal.SIGINT)

# A launcher and the terminal, or two layers of a scheduler, pass on one and the same request within milliseconds.
_ECHO_SECONDS = 0.25


@dataclass(frozen=True, slots=True)
class StopRequest:
    """The first signal that asked this process to stop."""

    signal: str
    """Its name: "SIGTERM", "SIGINT" or "SIGUSR1"."""
    time: float
    """When it came, seconds since 1970."""


class Signals:
    """Within its `with` block SIGTERM, SIGINT and SIGUSR1 set `request` instead of ending the process.

    The loop polls `request` wherever it may wait long: between steps, in evaluation, while data is awaited. A second
    SIGTERM or SIGINT ends the process at once, with exit code 143 or 130 and nothing saved, even while the main thread
    is inside a compilation or a collective; `before_exit` is then called first, to put a terminal in order. A signal
    that follows another within a quarter of a second counts as its echo. SIGUSR1 only ever asks. Not `polled`, while
    there is nothing to save yet, the first SIGTERM or SIGINT ends the process so.

    To be entered in the main thread, after `jax.distributed.initialize`: that installs a SIGTERM handler of its own
    (unless jax_enable_preemption_service is off) over one that is there, and is not undone here. Leaving the block puts
    the former handlers back.
    """

    def __init__(
        self,
        *,
        announce: Callable[[str], None] | None = None,
        before_exit: Callable[[], None] | None = None,
        polled: bool = True,
    ):
        self._announce = announce or _to_stderr
        self._before_exit = before_exit
        self._request: StopRequest | None = None
        self._former: dict[signal.Signals, Any] = {}
        self._insisted: float | None = None
        self.polled = polled
        """Whether anybody looks at `request`."""
        self.when = "after this step"
        """When the run will stop, as people are told."""

    @property
    def request(self) -> StopRequest | None:
        """What asked this process to stop, or None. Other processes may know of another: see `agree`."""
        return self._request

    def __enter__(self) -> Self:
        # Python runs handlers only between bytecodes of the main thread, which may be inside XLA for minutes. The
        # number of each signal is therefore also written to a socket, by C code at once, and a thread reads it there.
        self._inbox, self._outbox = socket.socketpair()
        self._outbox.setblocking(False)
        self._former = {number: signal.signal(number, self._handle) for number in _STOP}
        self._former_descriptor = signal.set_wakeup_fd(self._outbox.fileno(), warn_on_full_buffer=False)
        self._watcher = threading.Thread(target=self._watch, name="signals", daemon=True)
        self._watcher.start()
        leave = weakref.WeakMethod(self._restore)
        os.register_at_fork(after_in_child=lambda: (restore := leave()) and restore())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._restore()
        self._outbox.close()
        self._watcher.join()
        self._inbox.close()

    def _restore(self) -> None:
        """Put back what was there before; also in a forked child, whose signals are not this process's."""
        if not self._former:
            return
        signal.set_wakeup_fd(self._former_descriptor)
        for number, handler in self._former.items():
            # None: a handler that was not installed from Python, which Python cannot put back.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        self._former = {}

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self._take(signal.Signals(number))

    def _watch(self) -> None:
        while numbers := self._inbox.recv(64):
            for number in numbers:
                if number in _STOP:
                    self._arrive(signal.Signals(number))

    def _take(self, which: signal.Signals) -> None:
        if self._request is None:
            self._request = StopRequest(which.name, time.time())

    def _arrive(self, which: signal.Signals) -> None:
        """Count a signal; only the watcher thread comes here."""
        self._take(which)
        if which not in _INSIST:
            self._tell(f"{which.name} received: stopping {self.when}")
            return
        now = time.monotonic()
        if not self.polled:
            self._exit_now(f"{which.name}: ended at once, with nothing to save yet", which)
        elif self._insisted is None:
            self._insisted = now
            again = "press Ctrl-C again" if which is signal.SIGINT else "send it again"
            self._tell(f"{which.name} received: stopping {self.when}; {again} to exit at once, unsaved")
        elif now - self._insisted > _ECHO_SECONDS:
            self._exit_now(f"second {which.name}: exiting at once, unsaved", which)

    def _tell(self, message: str) -> None:
        try:
            self._announce(message)
        except Exception:
            # The terminal may be gone; the watcher has to live on for the second signal.
            traceback.print_exc()

    def _exit_now(self, message: str, which: signal.Signals) -> None:
        try:
            if self._before_exit is not None:
                self._before_exit()
            _to_stderr(message)
        finally:
            # Not sys.exit: atexit hooks of the runtime wait minutes for other processes.
            os._exit(128 + which)


def _to_stderr(message: str) -> None:
    os.write(sys.__stderr__.fileno() if sys.__stderr__ else 2, f"megajax: {message}\n".encode())


def agree(flag: bool) -> bool:
    """True on every process as soon as `flag` is true on one of them.

    With several processes this is a collective over all of them and waits for the step that is under way: every
    process calls it at the same steps. With one process it costs nothing.
    """
    if jax.process_count() == 1:
        return flag
    return bool(np.any(multihost_utils.process_allgather(np.asarray(flag, np.int32))))
