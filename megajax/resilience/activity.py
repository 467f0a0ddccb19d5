"""What the threads of this process are doing: for the watchdog, the launcher, and messages about failures."""

import threading
import time
from collections.abc import Generator
from contextlib import contextmanager
from typing import NamedTuple

SETUP, COMPILE, STEP, BACKGROUND_SAVE = "setup", "compile", "step", "background_save"
"""Phases beside those of `megajax.training.timing`, which are also timed: data_wait, evaluation, save."""


class Doing(NamedTuple):
    """A phase that a thread is in."""

    phase: str
    step: int | None
    """The step that it belongs to; None: no step."""
    since: float
    """When it began, by the monotonic clock."""
    thread: int
    """Identifier of the thread."""


class Activity:
    """The phases that threads are in, nested: each thread enters and leaves its own, any thread reads all."""

    def __init__(self) -> None:
        self._threads: dict[int, tuple[Doing, ...]] = {}
        self._lock = threading.Lock()
        self.step = 0
        """The last step whose numbers have arrived."""
        self.committed: int | None = None
        """The last step with a whole checkpoint; None: none so far."""

    @contextmanager
    def phase(self, name: str, step: int | None = None) -> Generator[None]:
        """Within the block, this thread is in phase `name`."""
        thread = threading.get_ident()
        before = self._threads.get(thread, ())
        self._set(thread, (*before, Doing(name, step, time.monotonic(), thread)))
        try:
            yield
        finally:
            self._set(thread, before)

    def now(self) -> tuple[Doing, ...]:
        """The innermost phase of each thread that is in one."""
        with self._lock:
            return tuple(phases[-1] for phases in self._threads.values())

    def _set(self, thread: int, phases: tuple[Doing, ...]) -> None:
        with self._lock:
            if phases:
                self._threads[thread] = phases
            else:
                self._threads.pop(thread, None)
