"""Progress of long operations on files: a line on a stream, updated in place on a terminal."""

import sys
import time
from typing import TextIO

QUIET_SECONDS = 2.0
"""No line before this."""
INTERVAL_SECONDS = 10.0
"""Time between lines if they cannot be updated in place."""


class ProgressLine:
    """A line that is updated in place on a terminal; elsewhere a new line every `interval` seconds.

    Args:
        quiet: seconds before the first line.
    """

    def __init__(self, stream: TextIO, interval: float = INTERVAL_SECONDS, quiet: float = 0.0):
        self._stream, self._live, self._is_shown = stream, stream.isatty(), False
        self._interval, self._started = 0.1 if self._live else interval, time.monotonic()
        self._next = self._started + (quiet or self._interval)

    def seconds(self) -> float | None:
        """Seconds since the start if a line is due, else None."""
        now = time.monotonic()
        if now < self._next:
            return None
        self._next = now + self._interval
        return now - self._started

    def show(self, line: str) -> None:
        """Shows a line that is due."""
        self._stream.write(f"\r{line}\x1b[K" if self._live else f"{line}\n")
        self._stream.flush()
        self._is_shown = True

    def clear(self) -> None:
        """Removes a line that is updated in place."""
        if self._is_shown and self._live:
            self._stream.write("\r\x1b[K")
            self._stream.flush()


class FileProgress(ProgressLine):
    """Progress of listing or indexing files, on standard error; nothing for what takes less than two seconds.

    Args:
        unit: the counted items, such as "images".
        activity: the beginning of the line, such as "indexing shards".
    """

    def __init__(self, unit: str, activity: str):
        super().__init__(sys.stderr, quiet=QUIET_SECONDS)
        self._unit, self._activity = unit, activity

    def __call__(self, count: int, share: float) -> None:
        """Reports the number of finished items and their share of the whole."""
        if seconds := self.seconds():
            self.show(
                f"{self._activity}: {count:,} {self._unit}, {100 * share:.0f} %, {count / seconds:,.0f} {self._unit}/s"
            )
