"""Interrupts that wait until the program can take one."""

import signal
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from types import FrameType

_HELD = (signal.SIGINT, signal.SIGTERM)


@contextmanager
def interrupts_held() -> Generator[Callable[[], None]]:
    """Hold SIGINT and SIGTERM back; calling the yielded function, or leaving, does what the held one would have done.

    The pools of the standard library do not survive an exception that a signal raises inside them: after an interrupt
    at the last instruction of `Condition.__enter__`, which is a Python function, its lock stays taken and whoever waits
    for the pool waits forever. So the former handlers are called only where no lock is held.

    A signal without a handler in Python still ends the process at once. Outside the main thread, where signals do not
    arrive, this does nothing.
    """
    held: list[int] = []
    former = {number: handler for number in _HELD if callable(handler := signal.getsignal(number))}
    if threading.current_thread() is not threading.main_thread():
        former = {}

    def hold(number: int, frame: FrameType | None) -> None:
        held.append(number)

    def release() -> None:
        if held:
            number = held[0]
            held.clear()
            former[number](number, None)

    for number in former:
        signal.signal(number, hold)
    try:
        yield release
    finally:
        for number, handler in former.items():
            signal.signal(number, handler)
    release()
