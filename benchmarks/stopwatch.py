"""Times repeated work on a device, with its spread. Imports neither jax nor torch, since it serves both.

Must run on Python 3.11, which the Python with torch may be.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

WARM_UP = 5
"""Train steps before the timed ones. Their losses are reported, so that trainers can be compared by them."""
LEAST = 0.5
"""Minimum seconds of a group of timed train steps, if there are enough steps."""


@dataclass(frozen=True, slots=True)
class Spread:
    """Median and quantiles of several readings of one quantity."""

    median: float
    p10: float
    p90: float
    readings: int

    @classmethod
    def of(cls, values: Sequence[float]) -> "Spread":
        """At least one value; quantiles between two readings are interpolated."""
        p10, median, p90 = (float(value) for value in np.quantile(values, (0.1, 0.5, 0.9)))
        return cls(median, p10, p90, len(values))

    def into(self, amount: float) -> "Spread":
        """amount / reading, which turns seconds into rates: the slowest reading becomes the lowest rate."""
        return Spread(amount / self.median, amount / self.p90, amount / self.p10, self.readings)

    def to_dict(self) -> dict[str, float]:
        return asdict(self)


def group_sizes(count: int, seconds: float, least: float) -> list[int]:
    """Split `count` calls of about `seconds` each into at least ten groups, of at least `least` seconds if possible.

    The device is idle for a moment at the end of a group, while the host waits for it; long groups make this
    negligible. Fewer than ten calls are timed one by one.
    """
    calls = max(1, -int(-least // max(seconds, 1e-9)))
    size = max(1, min(calls, count // 10))
    sizes = [size] * (count // size)
    return [*sizes, count % size] if count % size else sizes


Wait = Callable[[Any], Any]
"""Waits until the result of a call is ready: `jax.block_until_ready`."""


def timed(call: Callable[[], Any], size: int, wait: Wait) -> float:
    """Seconds per call of `size` calls that are dispatched one after another and then waited for."""
    start = time.perf_counter()
    for _ in range(size):
        out = call()
    wait(out)
    return (time.perf_counter() - start) / size


def readings(call: Callable[[], Any], count: int, wait: Wait, *, least: float) -> Spread:
    """The spread of `count` calls in groups of `least` seconds, after one call that estimates the duration."""
    estimate = timed(call, 1, wait)
    return Spread.of([timed(call, size, wait) for size in group_sizes(count, estimate, least)])


def readings_in(call: Callable[[], Any], wait: Wait, *, seconds: float, groups: int = 10) -> Spread:
    """The spread of `groups` groups of calls that take about `seconds` in all, after one untimed call."""
    estimate = timed(call, 1, wait)
    size = max(1, round(seconds / groups / max(estimate, 1e-9)))
    return Spread.of([timed(call, size, wait) for _ in range(groups)])


def best(function: Callable[[], Any], repeats: int = 3, clock: Callable[[], float] = time.perf_counter) -> float:
    """The shortest time of a few calls, in seconds of `clock`."""
    times = []
    for _ in range(repeats):
        start = clock()
        function()
        times.append(clock() - start)
    return min(times)
