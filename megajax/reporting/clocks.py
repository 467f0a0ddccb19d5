"""Times of events on one axis, whatever the clocks of machines did: set back, set forward, or different on each.

The wall clock of a line may be set at any moment. The monotonic clock of one boot of a machine is not: lines of the
same boot are as far apart as it says.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, NamedTuple

LATEST = 253_402_300_800.0
"""Seconds from 1970 to the year 10000: later times are damage, and no calendar has them."""


class Stamp(NamedTuple):
    """When a line says that it was written."""

    time: float
    """By the wall clock, in seconds since 1970."""
    boot: str | None = None
    """The boot of the machine whose monotonic clock `seconds` is of; None: not known."""
    seconds: float = 0.0

    @classmethod
    def of(cls, line: dict[str, Any]) -> "Stamp":
        """Of a line of events.jsonl. Raises ValueError, TypeError or KeyError if it has no time."""
        time = float(line["time"])
        if not 0 <= time < LATEST:
            raise ValueError(f"time {time}")
        match line.get("clock"):
            case [str() as boot, int() | float() as seconds] if math.isfinite(seconds):
                return cls(time, boot, float(seconds))
        return cls(time)


@dataclass
class _Machine:
    """A line of a boot, and where it lies on the common axis."""

    seconds: float
    at: float
    sure: bool
    """Whether it is known how this axis and the machine's clock go together."""


def common_times(stamps: Sequence[Stamp], begins: Sequence[bool]) -> list[float]:
    """Seconds since 1970 by the clock of the first line, one for each line in the order of the file.

    begins: whether a line begins an attempt, which may be on another machine than the one before.
    """
    machines: dict[str, _Machine] = {}
    times: list[float] = []
    sure: list[bool] = []
    latest, offset = -math.inf, 0.0
    for stamp, first in zip(stamps, begins, strict=True):
        known = machines.get(stamp.boot or "")
        if known is not None:
            at, certain = known.at + (stamp.seconds - known.seconds), known.sure
        else:
            at, certain = max(stamp.time + (0.0 if first else offset), latest), first
        if stamp.boot is not None:
            machines.setdefault(stamp.boot, _Machine(stamp.seconds, at, first))
        if certain or stamp.boot is None:
            latest, offset = max(latest, at), at - stamp.time
        times.append(at)
        sure.append(certain)
    # A line of another machine is no later than the next line of one whose clock is known.
    known_times = [at if certain else math.inf for at, certain in zip(times, sure, strict=True)]
    bounds = reversed(list(accumulate(reversed(known_times), min)))
    return [at if certain else min(at, bound) for at, certain, bound in zip(times, sure, bounds, strict=True)]
