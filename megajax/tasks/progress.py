"""A line on standard error: how much of a task is done, and the time that is left."""

import sys
import time

from megajax.text import duration

QUIET_SECONDS, INTERVAL_SECONDS = 2.0, 10.0
"""No line before the first; seconds between lines where they cannot be updated in place."""


class Progress:
    """An updated line on a terminal, elsewhere a new one now and then. shown: False prints nothing."""

    def __init__(self, *, shown: bool = True):
        self._shown, self._live = shown, sys.stderr.isatty()
        self.start("")

    def start(self, name: str) -> None:
        """Begin a task."""
        self._name, self._started = name, time.monotonic()
        self._next, self._before = self._started + QUIET_SECONDS, None

    def __call__(self, done: int, total: int) -> None:
        """So much is done. The time left is that of what is done since the first call, which compiles."""
        now = time.monotonic()
        if self._before is None or done < self._before[1]:
            self._before = now, done
        if not self._shown or now < self._next:
            return
        self._next = now + (0.1 if self._live else INTERVAL_SECONDS)
        since, first = self._before
        left = f", {duration((now - since) / (done - first) * (total - done))} left" if done > first else ""
        line = f"{self._name}: {done:,} of {total:,}{left}"
        sys.stderr.write(f"\r{line}\x1b[K" if self._live else f"{line}\n")
        sys.stderr.flush()

    def clear(self) -> None:
        """Remove an updated line."""
        if self._shown and self._live:
            sys.stderr.write("\r\x1b[K")
            sys.stderr.flush()
