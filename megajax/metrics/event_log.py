"""events.jsonl from the first event of an attempt on, also from processes other than 0."""

import os
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

from megajax.metrics.line_file import line_break
from megajax.metrics.record import to_json


class Clock:
    """What lines of events.jsonl begin with: `time`, and `clock` for durations.

    `time` is in seconds since 1970, by a clock that may be set at any moment. `clock` names the boot of the machine and
    has the seconds of its monotonic clock, which all its processes share: lines of the same boot are as far apart as
    these say. It is left out where the system does not name its boot.
    """

    def __init__(
        self,
        wall: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
        boot: str | None = None,
    ):
        """boot: None for that of this machine."""
        self._wall, self._monotonic, self._boot = wall, monotonic, _boot() if boot is None else boot

    def now(self) -> dict[str, Any]:
        """The fields."""
        clock = {"clock": [self._boot, round(self._monotonic(), 3)]} if self._boot else {}
        return {"time": self._wall(), **clock}


@cache
def _boot() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii")[:8]
    except OSError:
        return ""


def process_start() -> float:
    """When this process began, by the monotonic clock; now, where the system does not say."""
    try:
        ticks = int(Path("/proc/self/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[19])
        age = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError, AttributeError):
        age = 0.0
    return time.monotonic() - max(age, 0.0)


class EventLog:
    """Takes events at any time; those before `open` wait for it, with the time they happened at."""

    def __init__(self, clock: Clock | None = None):
        self._clock = clock or Clock()
        self._write: Callable[..., None] | None = None
        self._early: list[tuple[str, dict[str, Any]]] = []

    def event(self, name: str, /, **fields: Any) -> None:
        """Take an event; `time` among the fields if it did not happen now."""
        if self._write is None:
            self._early.append((name, {**self._clock.now(), **fields}))
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
    line = to_json({**Clock().now(), "event": name, **fields})
    descriptor = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        os.write(descriptor, (line_break(descriptor) + line).encode())
    finally:
        os.close(descriptor)
