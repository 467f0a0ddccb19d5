"""events.jsonl from the first event of an attempt on, also from processes other than 0."""

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from megajax.metrics.record import to_json


class EventLog:
    """Takes events at any time; those before `open` wait for it, with the time they happened at."""

    def __init__(self, clock: Callable[[], float] = time.time):
        self._clock = clock
        self._write: Callable[..., None] | None = None
        self._early: list[tuple[str, dict[str, Any]]] = []

    def event(self, name: str, /, **fields: Any) -> None:
        """Take an event; `time` among the fields if it did not happen now."""
        if self._write is None:
            self._early.append((name, {"time": self._clock(), **fields}))
        else:
            self._write(name, **fields)

    def open(self, write: Callable[..., None]) -> None:
        """Write events as they come from now on, and the early ones."""
        self._write = write
        early, self._early = self._early, []
        for name, fields in early:
            write(name, **fields)

    @property
    def opened(self) -> bool:
        """Whether events reach a file."""
        return self._write is not None


def append_event(path: Path, name: str, /, **fields: Any) -> None:
    """Append a line to events.jsonl from any process: for failures that process 0 may not know.

    One write of one line at the end of the file, so that lines of several processes do not mix on a local file system.
    Raises OSError if it can't be written.
    """
    line = to_json({"time": time.time(), "event": name, **fields})
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        os.write(descriptor, line.encode())
    finally:
        os.close(descriptor)
