"""A line on standard error with the progress of a task and the remaining time."""

import sys
import time

from megajax.display.text import duration

QUIET_SECONDS, INTERVAL_SECONDS = 2.0, 10.0
"""Seconds before the first line, and between lines that cannot be updated in place."""


class Progress:
    """An updated line on a terminal, otherwise a new line every 10 seconds. visible: False prints nothing."""

    def __init__(self, *, visible: bool = True):
        self._visible, self._live = visible, sys.stderr.isatty()
        self.start("")

    def start(self, name: str) -> None:
        """Begin a task."""
        self._name, self._started = name, time.monotonic()
        self._next, self._before = self._started + QUIET_SECONDS, None

    def __call__(self, count: int, total: int) -> None:
        """Show `count` of `total`. The remaining time is estimated from the first call on, after compilation."""
        now = time.monotonic()
        if self._before is None or count < self._before[1]:
            self._before = now, count
        if not self._visible or now < self._next:
            return
        self._next = now + (0.1 if self._live else INTERVAL_SECONDS)
        since, first = self._before
        remaining = f", {duration((now - since) / (count - first) * (total - count))} left" if count > first else ""
        line = f"{self._name}: {count:,} of {total:,}{remaining}"
        sys.stderr.write(f"\r{line}\x1b[K" if self._live else f"{line}\n")
        sys.stderr.flush()

    def clear(self) -> None:
        """Remove an updated line."""
        if self._visible and self._live:
            sys.stderr.write("\r\x1b[K")
            sys.stderr.flush()
