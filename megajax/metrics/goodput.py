"""Goodput: the share of a run's wall time, over all attempts, spent on progress, and the causes of lost time."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megajax.display.text import duration

SMALLEST, MOST = 0.005, 4
"""A summary lists causes with at least this share of the wall time, and at most this many."""


@dataclass(frozen=True, slots=True)
class Goodput:
    """Wall time of a run over all its attempts, in seconds."""

    elapsed: float
    """Wall time from the beginning of the first attempt."""
    effective: float
    """Time in steps whose result was kept."""
    attempts: int
    lost_seconds: Mapping[str, float]
    """Cause -> seconds; together the difference of `elapsed` and `effective`."""

    @property
    def share(self) -> float:
        """effective / elapsed, 0 to 1."""
        return self.effective / self.elapsed if self.elapsed > 0 else 0.0

    def summary(self) -> str:
        """For example "93.1% of 2h14m in 3 attempts; lost: 3.0% between attempts, 2.0% saving"."""
        plural = "" if self.attempts == 1 else "s"
        text = f"{self.share:.1%} of {duration(self.elapsed)} in {self.attempts} attempt{plural}"
        shares = (
            {cause: seconds / self.elapsed for cause, seconds in self.lost_seconds.items()} if self.elapsed > 0 else {}
        )
        largest = sorted(shares.items(), key=lambda item: -item[1])[:MOST]
        parts = [f"{share:.1%} {cause}" for cause, share in largest if share >= SMALLEST]
        return text + ("; lost: " + ", ".join(parts) if parts else "")

    def fields(self) -> dict[str, Any]:
        """Fields of the event `goodput`."""
        return {
            "effective": round(self.share, 5),
            "elapsed_seconds": round(self.elapsed, 3),
            "effective_seconds": round(self.effective, 3),
            "attempts": self.attempts,
            "lost_seconds": {cause: round(seconds, 3) for cause, seconds in self.lost_seconds.items()},
        }
