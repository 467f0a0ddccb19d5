"""Ends a process in which no Python thread can run, because C code holds the interpreter's lock.

The watchdog is a Python thread, so it can't detect this. Instead, it keeps resetting a timer of the operating system.
When the timer expires, a thread of the C library calls alarm(GRACE_SECONDS); then SIGALRM writes the stacks of all
threads and ends the process. A process that was stopped by SIGSTOP for longer than the timer cancels the alarm as soon
as it continues.
"""

import ctypes
import faulthandler
import signal
import sys
from typing import Self

GRACE_SECONDS = 10
"""Time from the end of the timer to SIGALRM."""
LONGEST_SECONDS = 1e9
"""A longer timer may not fit into the system's numbers."""

_MONOTONIC, _CALL_IN_THREAD = 1, 2


class _Event(ctypes.Structure):
    """struct sigevent of Linux."""

    _fields_ = (
        ("value", ctypes.c_int64),
        ("signal", ctypes.c_int),
        ("notify", ctypes.c_int),
        ("function", ctypes.c_void_p),
        ("attributes", ctypes.c_void_p),
        ("reserved", ctypes.c_char * 32),
    )


class _Times(ctypes.Structure):
    """struct itimerspec: interval, then remaining time."""

    _fields_ = tuple((name, ctypes.c_long) for name in ("every_s", "every_ns", "left_s", "left_ns"))


class Backstop:
    """Within its `with` block, SIGALRM ends the process unless `reset` is called in time. Only on Linux."""

    def __init__(self) -> None:
        self._c = ctypes.CDLL(None, use_errno=True) if sys.platform == "linux" else None
        self._timer: ctypes.c_void_p | None = None

    def __enter__(self) -> Self:
        # If SIGALRM has a handler, of pytest for example, do nothing.
        free = signal.getsignal(signal.SIGALRM) is signal.SIG_DFL and sys.__stderr__ is not None
        if self._c is None or not free or not hasattr(self._c, "timer_create"):
            return self
        function = ctypes.cast(self._c.alarm, ctypes.c_void_p)
        event, timer = _Event(value=GRACE_SECONDS, notify=_CALL_IN_THREAD, function=function), ctypes.c_void_p()
        if self._c.timer_create(_MONOTONIC, ctypes.byref(event), ctypes.byref(timer)) == 0:
            self._timer = timer
            faulthandler.register(signal.SIGALRM, file=2, all_threads=True, chain=True)
        return self

    def __exit__(self, *error: object) -> None:
        if self._c is not None and self._timer is not None:
            self.reset(0.0)
            self._c.timer_delete(self._timer)
            faulthandler.unregister(signal.SIGALRM)
            self._timer = None

    def reset(self, seconds: float) -> None:
        """Reset the timer; 0 turns it off.

        Call it more often than every GRACE_SECONDS: a timer that expired while the process was stopped may set the
        alarm just after a call.
        """
        if self._c is None or self._timer is None:
            return
        times = _Times(left_s=int(min(seconds, LONGEST_SECONDS)))
        self._c.timer_settime(self._timer, 0, ctypes.byref(times), None)
        signal.alarm(0)
