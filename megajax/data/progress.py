"""A line on standard error while files are listed or indexed, where that takes long."""

import sys
import time

QUIET_SECONDS = 2.0
"""No line before this."""
INTERVAL_SECONDS = 10.0
"""Between lines where they cannot be updated in place."""


class Progress:
    """An updated line on a terminal, elsewhere a new one now and then; nothing for what is done at once.

    Args:
        what: the things that are counted, such as "images".
        doing: the rest of the line's beginning, such as "indexing shards".
    """

    def __init__(self, what: str, doing: str):
        self._what, self._doing = what, doing
        self._live = sys.stderr.isatty()
        self._started = time.monotonic()
        self._next = self._started + QUIET_SECONDS
        self._shown = False

    def __call__(self, count: int, share: float) -> None:
        """So many things are done, which is this share of the whole."""
        now = time.monotonic()
        if now < self._next:
            return
        self._next = now + (0.1 if self._live else INTERVAL_SECONDS)
        speed = count / (now - self._started)
        line = f"{self._doing}: {count:,} {self._what}, {100 * share:.0f} %, {speed:,.0f} {self._what}/s"
        sys.stderr.write(f"\r{line}\x1b[K" if self._live else f"{line}\n")
        sys.stderr.flush()
        self._shown = True

    def clear(self) -> None:
        """Remove an updated line."""
        if self._shown and self._live:
            sys.stderr.write("\r\x1b[K")
            sys.stderr.flush()
