"""The line that `python -m megajax.convert` shows while it works."""

import time
from typing import TextIO

from megajax.text import duration


class Progress:
    """A line that is written anew on a terminal, else a line every few seconds: share, speed, seconds left."""

    def __init__(self, stream: TextIO, elements: int, what: str):
        self._stream, self._all, self._what, self._live = stream, max(1, elements), what, stream.isatty()
        self._done, self._started = 0, time.monotonic()
        self._shown = self._started

    def __call__(self, elements: int) -> None:
        """So many more elements are done."""
        self._done += elements
        now = time.monotonic()
        if now - self._shown >= (0.2 if self._live else 10.0):
            self._shown, seconds = now, now - self._started
            left = duration(seconds * (self._all - self._done) / max(1, self._done))
            line = f"{self._what}: {100 * self._done / self._all:.0f} %  {self._speed(seconds)}  {left} left"
            self._stream.write(f"\r{line}\x1b[K" if self._live else f"{line}\n")
            self._stream.flush()

    def total(self) -> str:
        """What it took."""
        seconds = self._shown - self._started
        return f"{self._what} took {duration(seconds)}, {self._speed(seconds)}"

    def _speed(self, seconds: float) -> str:
        return f"{4 * self._done / max(seconds, 1e-3) / 1e6:.0f} MB/s of float32"

    def __enter__(self) -> "Progress":
        return self

    def __exit__(self, *raised: object) -> None:
        self._shown = time.monotonic()
        if self._live:
            self._stream.write("\r\x1b[K")
            self._stream.flush()
