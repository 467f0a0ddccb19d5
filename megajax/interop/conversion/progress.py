"""The progress line of `python -m megajax.convert`."""

import time
from typing import TextIO

from megajax.display.text import duration


class Progress:
    """Share, speed and remaining time: one line that is rewritten on a terminal, else a new line every 10 seconds."""

    def __init__(self, stream: TextIO, elements: int, title: str):
        self._stream, self._elements, self._title, self._on_terminal = stream, max(1, elements), title, stream.isatty()
        self._count, self._started = 0, time.monotonic()
        self._last_update = self._started

    def __call__(self, elements: int) -> None:
        """Advance by this many elements."""
        self._count += elements
        now = time.monotonic()
        if now - self._last_update >= (0.2 if self._on_terminal else 10.0):
            self._last_update, seconds = now, now - self._started
            remaining = duration(seconds * (self._elements - self._count) / max(1, self._count))
            line = (
                f"{self._title}: {100 * self._count / self._elements:.0f} %  {self._speed(seconds)}  {remaining} left"
            )
            self._stream.write(f"\r{line}\x1b[K" if self._on_terminal else f"{line}\n")
            self._stream.flush()

    def total(self) -> str:
        """The total time and mean speed."""
        seconds = self._last_update - self._started
        return f"{self._title} took {duration(seconds)}, {self._speed(seconds)}"

    def _speed(self, seconds: float) -> str:
        return f"{4 * self._count / max(seconds, 1e-3) / 1e6:.0f} MB/s of float32"

    def __enter__(self) -> "Progress":
        return self

    def __exit__(self, *raised: object) -> None:
        self._last_update = time.monotonic()
        if self._on_terminal:
            self._stream.write("\r\x1b[K")
            self._stream.flush()
