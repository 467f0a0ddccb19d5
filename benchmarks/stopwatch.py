"""Times repeated work on a device, with its spread; for jax and torch, so it imports neither.

Also runs on Python 3.11, which the Python with torch may be.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

WARM_UP = 5
"""Steps of a train step that are not timed; their losses are told, so that trainers can be compared by them."""
LEAST = 0.5
"""Seconds of a group of timed train steps, where there are enough of them."""


@dataclass(frozen=True, slots=True)
class Spread:
    """What is told of several readings of one thing."""

    median: float
    p10: float
    """A tenth of the readings is below."""
    p90: float
    """A tenth of the readings is above."""
    readings: int

    @classmethod
    def of(cls, values: Sequence[float]) -> "Spread":
        """At least one value; shares between two readings are interpolated."""
        p10, median, p90 = (float(value) for value in np.quantile(values, (0.1, 0.5, 0.9)))
        return cls(median, p10, p90, len(values))

    def times(self, factor: float) -> "Spread":
        """Of the readings times a factor above 0."""
        return Spread(self.median * factor, self.p10 * factor, self.p90 * factor, self.readings)

    def into(self, amount: float) -> "Spread":
        """amount / reading: seconds into rates; what was slow is low."""
        return Spread(amount / self.median, amount / self.p90, amount / self.p10, self.readings)

    def to_dict(self) -> dict[str, float]:
        return asdict(self)


def group_sizes(count: int, seconds: float, least: float) -> list[int]:
    """How `count` calls of about `seconds` each are timed: in groups of at least `least` seconds, ten groups at least.

    A group ends with a wait for the device, which leaves it idle for a moment; the longer the group, the less of that
    is in the reading. Fewer than ten calls are timed one by one.
    """
    calls = max(1, -int(-least // max(seconds, 1e-9)))
    size = max(1, min(calls, count // 10))
    sizes = [size] * (count // size)
    return [*sizes, count % size] if count % size else sizes


Wait = Callable[[Any], Any]
"""Waits until what a call returned is there: `jax.block_until_ready`."""


def timed(call: Callable[[], Any], size: int, wait: Wait) -> float:
    """Seconds of one of `size` calls that are dispatched one after another and then waited for."""
    start = time.perf_counter()
    for _ in range(size):
        out = call()
    wait(out)
    return (time.perf_counter() - start) / size


def readings(call: Callable[[], Any], count: int, wait: Wait, *, least: float) -> Spread:
    """Of `count` calls, after one that tells about how long they take; groups of `least` seconds where that can be."""
    estimate = timed(call, 1, wait)
    return Spread.of([timed(call, size, wait) for size in group_sizes(count, estimate, least)])


def readings_in(call: Callable[[], Any], wait: Wait, *, seconds: float, groups: int = 10) -> Spread:
    """Of as many calls as take about `seconds` in all, in `groups` groups; one call before them does not count."""
    estimate = timed(call, 1, wait)
    size = max(1, round(seconds / groups / max(estimate, 1e-9)))
    return Spread.of([timed(call, size, wait) for _ in range(groups)])
