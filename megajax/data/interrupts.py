"""Deferral of interrupts until the program can handle them."""

import signal
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from types import FrameType
from typing import Any

_DEFERRED = (signal.SIGINT, signal.SIGTERM)


@contextmanager
def deferred_interrupts() -> Generator[Callable[[], None]]:
    """Defers SIGINT and SIGTERM until the yielded function is called, or the block is left.

    The pools of the standard library do not survive an exception raised by a signal handler inside them: after an
    interrupt at the last instruction of `Condition.__enter__`, a Python function, its lock is never released, and
    everything that waits for the pool hangs. So the former handlers are called only where no lock is held.

    A signal without a Python handler still ends the process at once. Outside the main thread, which does not receive
    signals, this does nothing.
    """
    pending: list[int] = []
    former: dict[int, Callable[[int, FrameType | None], Any]]
    former = {number: handler for number in _DEFERRED if callable(handler := signal.getsignal(number))}
    if threading.current_thread() is not threading.main_thread():
        former = {}

    def defer(number: int, frame: FrameType | None) -> None:
        pending.append(number)

    def handle_pending() -> None:
        if pending:
            number = pending[0]
            pending.clear()
            former[number](number, None)

    for number in former:
        signal.signal(number, defer)
    try:
        yield handle_pending
    finally:
        for number, handler in former.items():
            signal.signal(number, handler)
    handle_pending()
