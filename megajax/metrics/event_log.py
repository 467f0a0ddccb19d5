"""Events of an attempt before events.jsonl is open, and events of processes other than 0."""

import os
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

from megajax.metrics.line_file import line_break
from megajax.metrics.record import EVENTS, read_lines, to_json
from megajax.storage.disk import open_regular


class Clock:
    """The first fields of a line of events.jsonl: `time`, and `clock` for durations.

    `time` is in seconds since 1970 by the system clock, which may be adjusted at any moment. `clock` has an ID of the
    machine's boot and the seconds of its monotonic clock, which all its processes share: durations between lines of the
    same boot are exact. It is omitted where the system has no boot ID.
    """

    def __init__(
        self,
        wall: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
        boot: str | None = None,
    ):
        """boot: None for the boot ID of this machine."""
        self._wall, self._monotonic, self._boot = wall, monotonic, _boot() if boot is None else boot

    def now(self) -> dict[str, Any]:
        """The fields of the current time."""
        clock = {"clock": [self._boot, round(self._monotonic(), 3)]} if self._boot else {}
        return {"time": self._wall(), **clock}


@cache
def _boot() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii")[:8]
    except OSError:
        return ""


def process_start() -> float:
    """Start time of this process by the monotonic clock; the current time where the system does not tell."""
    try:
        ticks = int(Path("/proc/self/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[19])
        age = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError, AttributeError):
        age = 0.0
    return time.monotonic() - max(age, 0.0)


class EventLog:
    """Accepts events at any time; events before `open` are buffered with their time.

    Attributes:
        attempt: number of the attempt, from 1, which every line of its events and metrics has.
    """

    def __init__(self, path: Path | None = None, clock: Clock | None = None):
        """path: events.jsonl, for `append`."""
        self.path, self.attempt = path, 1
        self._clock = clock or Clock()
        self._write: Callable[..., None] | None = None
        self._early: list[tuple[str, dict[str, Any]]] = []

    def event(self, name: str, /, **fields: object) -> None:
        """Log an event. Pass `time` if it happened earlier."""
        if self._write is None:
            self._early.append((name, {**self._clock.now(), **fields}))
        else:
            self._write(name, **fields)

    def append(self, name: str, /, **fields: object) -> None:
        """Append an event to the file directly: see `append_event`."""
        if self.path is not None:
            append_event(self.path, name, **{"attempt": self.attempt, **fields})

    def open(self, write: Callable[..., None]) -> None:
        """Write the buffered events, and later events immediately."""
        self._write = write
        early, self._early = self._early, []
        for name, fields in early:
            write(name, **fields)

    @property
    def opened(self) -> bool:
        """Whether events are written to a file."""
        return self._write is not None


def next_attempt(path: Path) -> int:
    """Number of an attempt that begins now, from 1: one more than the last one in events.jsonl.

    The launcher's event `restart` already has the number of the attempt that it starts.
    """
    last = 0
    for line in read_lines(path, EVENTS, faults=[]):
        attempt = line.get("attempt", 1)
        last = max(last, attempt - (line["event"] == "restart")) if isinstance(attempt, int) else last
    return last + 1


def append_event(path: Path, name: str, /, **fields: object) -> None:
    """Append a line to events.jsonl from any process, for failures that process 0 may not know of.

    A line is a single write in append mode, so that lines of several processes do not mix on a local file system.
    Raises OSError if it can't be written.
    """
    line = to_json({**Clock().now(), "event": name, **fields})
    descriptor = open_regular(path, append=True)
    try:
        os.write(descriptor, (line_break(descriptor) + line).encode())
    finally:
        os.close(descriptor)
