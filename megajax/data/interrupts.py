"""Interrupts that wait until the program can take one."""

import signal
import threading
from types import FrameType, TracebackType
from typing import Any, Self

_ASKED = (signal.SIGINT, signal.SIGTERM)


class Interrupts:
    """Within its `with` block SIGINT and SIGTERM wait for the next `raise_waiting()`, or for the block's end.

    The pools of the standard library don't survive an exception that a signal raises inside them: `Condition.__enter__`
    is a Python function, an interrupt at its last instruction leaves the lock taken, and whoever waits for the pool
    then waits for ever. With this, the former handlers are called only where nothing is held.

    A signal nobody handles in Python keeps ending the process at once. Outside the main thread, where signals don't
    arrive, this does nothing.
    """

    def __init__(self):
        self._former: dict[int, Any] = {}
        self._waiting: int | None = None

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            handlers = {number: signal.getsignal(number) for number in _ASKED}
            self._former = {number: handler for number, handler in handlers.items() if callable(handler)}
            for number in self._former:
                signal.signal(number, self._wait)
        return self

    def _wait(self, number: int, frame: FrameType | None) -> None:
        if self._waiting is None:
            self._waiting = number

    def raise_waiting(self) -> None:
        """Do what the first signal that came would have done: for SIGINT, unless changed, raise KeyboardInterrupt."""
        if self._waiting is not None:
            number, self._waiting = self._waiting, None
            self._former[number](number, None)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._former.items():
            signal.signal(number, handler)
        if error is None:
            self.raise_waiting()
