"""Goodput: the share of a run's wall time, over all attempts, in which it made progress, and what took the rest."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megajax.text import duration

SMALLEST, MOST = 0.005, 4
"""Losses that are named: those of at least this share of the wall time, and no more than this many."""


@dataclass(frozen=True, slots=True)
class Goodput:
    """Seconds of a run, over all its attempts."""

    elapsed: float
    """Wall time from the beginning of the first attempt."""
    effective: float
    """Of it, in steps that counted."""
    attempts: int
    lost: Mapping[str, float]
    """Cause -> seconds of the rest."""

    @property
    def share(self) -> float:
        """Effective of elapsed time, 0 to 1."""
        return self.effective / self.elapsed if self.elapsed > 0 else 0.0

    def summary(self) -> str:
        """For example "93.1% of 2h14m in 3 attempts; lost: 3.0% between attempts, 2.0% saving"."""
        plural = "" if self.attempts == 1 else "s"
        text = f"{self.share:.1%} of {duration(self.elapsed)} in {self.attempts} attempt{plural}"
        shares = {cause: seconds / self.elapsed for cause, seconds in self.lost.items()} if self.elapsed > 0 else {}
        named = sorted(shares.items(), key=lambda item: -item[1])[:MOST]
        parts = [f"{share:.1%} {cause}" for cause, share in named if share >= SMALLEST]
        return text + ("; lost: " + ", ".join(parts) if parts else "")

    def fields(self) -> dict[str, Any]:
        """Fields of the event `goodput`."""
        return {
            "effective": round(self.share, 5),
            "elapsed_seconds": round(self.elapsed, 3),
            "effective_seconds": round(self.effective, 3),
            "attempts": self.attempts,
            "lost_seconds": {cause: round(seconds, 3) for cause, seconds in self.lost.items()},
        }
