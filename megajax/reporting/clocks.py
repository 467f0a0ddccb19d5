"""Times of events on a common axis, although clocks of machines differ or are set back or forward.

A wall clock may be set at any moment, a monotonic clock cannot: it gives exact durations between lines of the same boot
of a machine.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, NamedTuple

LATEST = 253_402_300_800.0
"""Seconds from 1970 to the year 10000: later times are invalid."""


class Stamp(NamedTuple):
    """The time of a line."""

    time: float
    """Wall-clock time, in seconds since 1970."""
    boot: str | None = None
    """ID of the machine's boot; None if unknown."""
    seconds: float = 0.0
    """Time of that boot's monotonic clock, in seconds."""

    @classmethod
    def of(cls, line: dict[str, Any]) -> "Stamp":
        """The stamp of a line of events.jsonl. Raises ValueError, TypeError or KeyError without a valid time."""
        time = float(line["time"])
        if not 0 <= time < LATEST:
            raise ValueError(f"time {time}")
        match line.get("clock"):
            case [str() as boot, int() | float() as seconds] if math.isfinite(seconds):
                return cls(time, boot, float(seconds))
        return cls(time)


@dataclass
class _Reference:
    """A line of a boot, and its time on the common axis."""

    seconds: float
    at: float
    certain: bool
    """Whether the offset of the machine's clock to the axis is known."""


def common_times(stamps: Sequence[Stamp], attempt_starts: Sequence[bool]) -> list[float]:
    """Seconds since 1970 by the clock of the first line, for each line in file order.

    attempt_starts: whether a line starts an attempt, possibly on another machine.
    """
    references: dict[str, _Reference] = {}
    times: list[float] = []
    certainties: list[bool] = []
    latest, offset = -math.inf, 0.0
    for stamp, first in zip(stamps, attempt_starts, strict=True):
        reference = references.get(stamp.boot or "")
        if reference is not None:
            at, certain = reference.at + (stamp.seconds - reference.seconds), reference.certain
        else:
            at, certain = max(stamp.time + (0.0 if first else offset), latest), first
        if stamp.boot is not None:
            references.setdefault(stamp.boot, _Reference(stamp.seconds, at, first))
        if certain or stamp.boot is None:
            latest, offset = max(latest, at), at - stamp.time
        times.append(at)
        certainties.append(certain)
    # An uncertain line is no later than the next line with a certain time.
    known_times = [at if certain else math.inf for at, certain in zip(times, certainties, strict=True)]
    bounds = reversed(list(accumulate(reversed(known_times), min)))
    return [at if certain else min(at, bound) for at, certain, bound in zip(times, certainties, bounds, strict=True)]
