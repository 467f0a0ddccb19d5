"""The progress of a task and its remaining time."""

import sys
import time

from megajax.data.progress_line import QUIET_SECONDS, ProgressLine
from megajax.display.text import duration


class Progress:
    """A line on standard error, as of `megajax.data.progress_line`. visible: False prints nothing."""

    def __init__(self, *, visible: bool = True):
        self._visible = visible
        self.start("")

    def start(self, name: str) -> None:
        """Begin a task."""
        self._name, self._line, self._before = name, ProgressLine(sys.stderr, quiet=QUIET_SECONDS), None

    def __call__(self, count: int, total: int) -> None:
        """Show `count` of `total`. The remaining time is estimated from the first call on, after compilation."""
        now = time.monotonic()
        if self._before is None or count < self._before[1]:
            self._before = now, count
        if self._visible and self._line.seconds() is not None:
            since, first = self._before
            remaining = f", {duration((now - since) / (count - first) * (total - count))} left" if count > first else ""
            self._line.show(f"{self._name}: {count:,} of {total:,}{remaining}")

    def clear(self) -> None:
        """Remove an updated line."""
        self._line.clear()
