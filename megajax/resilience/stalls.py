"""How long this process did not run at all: stopped by a signal, starved of processors, or swapped out."""

import threading
import time
from typing import Self

TICK_SECONDS = 0.05
"""How often the thread wants to run."""
PATIENCE = 0.05
"""Seconds late that count as nothing: other threads hold the interpreter for a while."""


class Stalls:
    """A thread that sleeps briefly again and again and adds up by how much it woke too late."""

    def __init__(self) -> None:
        self._over, self._seconds = threading.Event(), 0.0
        self._thread = threading.Thread(target=self._tick, name="stalls", daemon=True)

    @property
    def seconds(self) -> float:
        """Seconds so far."""
        return self._seconds

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._over.set()
        self._thread.join()

    def _tick(self) -> None:
        before = time.monotonic()
        while not self._over.wait(TICK_SECONDS):
            now = time.monotonic()
            late = now - before - TICK_SECONDS
            self._seconds += late if late > PATIENCE else 0.0
            before = now
