"""Decides whether, when and with which processes a failed gang is started again."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from megajax.config.errors import Problem
from megajax.faults.exit_codes import INVALID, NO_PROGRESS, worth_a_restart
from megajax.launcher.first_failure import Cause

FRUITLESS_ATTEMPTS = 3
"""The launcher gives up after this many attempts in a row without a new checkpoint."""


@dataclass(frozen=True, kw_only=True)
class RestartConfig:
    """Number, delays and conditions of restarts."""

    max_restarts: int = 0
    backoff: float = 1.0
    """Seconds before the first restart; doubled for each further one, until an attempt has saved a new checkpoint."""
    max_backoff: float = 60.0
    min_processes: int | None = None
    """A process that keeps failing is dropped as long as at least this many remain; None: never."""

    def problems(self, processes: int) -> list[Problem]:
        """Problems of the flags."""
        if self.min_processes is None or 1 <= self.min_processes <= processes:
            return []
        return [Problem("--min-processes", f"must be from 1 to --processes={processes}, got {self.min_processes}")]


class Restart(NamedTuple):
    """Start the gang again."""

    wait: float
    """Seconds to wait first."""
    slots: tuple[int, ...]
    """Places on the machine, one for each process."""
    dropped: int | None = None
    """The place that is dropped from now on."""


class Stop(NamedTuple):
    """Do not start the gang again."""

    code: int
    """Exit code of the launcher."""
    why: str = ""


class Restarts:
    """Decides after each failed attempt."""

    def __init__(self, cfg: RestartConfig, slots: Sequence[int]):
        self.cfg, self.slots = cfg, tuple(slots)
        self.restarts = 0
        self._all = len(self.slots)
        self.newest: int | None = None
        """The newest step with a checkpoint, as far as is known."""
        self._fruitless = 0
        self._wait = cfg.backoff
        self._last_slot: int | None = None
        self._has_beats = False

    def after(self, cause: Cause, *, baseline: int | None, committed: int | None, has_beats: bool) -> Restart | Stop:
        """The decision after an attempt that failed.

        baseline, committed: the newest step with a checkpoint when it began and when it ended. has_beats: whether its
        processes wrote heartbeats; for a program that never does, only the number of restarts is limited.
        """
        fewer = len(self.slots) < self._all
        slot = None if cause.process is None or cause.process >= len(self.slots) else self.slots[cause.process]
        progressed = self._note(baseline, committed, has_beats)
        repeated = slot is not None and slot == self._last_slot and not progressed
        self._last_slot = slot
        if self.cfg.max_restarts == 0:
            return Stop(cause.code)
        if cause.code == INVALID and fewer and not progressed and self._may_drop():
            return self._restart(self.slots[-1])
        if not worth_a_restart(cause.code):
            on = f" on {len(self.slots)} of {self._all} processes" if fewer else ""
            return Stop(cause.code, f"exit code {cause.code}{on} is never retried")
        if self.restarts >= self.cfg.max_restarts:
            return Stop(cause.code, f"all --max-restarts={self.cfg.max_restarts} restarts are used up")
        if repeated and self._may_drop():
            return self._restart(slot)
        if self._has_beats and self._fruitless >= FRUITLESS_ATTEMPTS:
            return Stop(NO_PROGRESS, f"no progress past step {self.newest or 0} in {FRUITLESS_ATTEMPTS} attempts")
        return self._restart()

    def unable_to_start(self, process: int) -> Restart | Stop:
        """The decision when a process of a restart can't be started."""
        self._last_slot = self.slots[process] if self._may_drop() else None
        return self.after(Cause(process, 1, "cannot be started"), baseline=None, committed=None, has_beats=False)

    def _note(self, baseline: int | None, committed: int | None, has_beats: bool) -> bool:
        """Whether the attempt has saved a new checkpoint."""
        self._has_beats = self._has_beats or has_beats
        if baseline is not None and (self.newest is None or baseline > self.newest):
            self.newest = baseline
        progressed = committed is not None and (self.newest is None or committed > self.newest)
        if progressed:
            self.newest, self._fruitless, self._wait = committed, 0, self.cfg.backoff
        else:
            self._fruitless += 1
        return progressed

    def _may_drop(self) -> bool:
        return self.cfg.min_processes is not None and len(self.slots) > self.cfg.min_processes

    def _restart(self, dropped: int | None = None) -> Restart:
        if dropped is not None:
            self.slots = tuple(slot for slot in self.slots if slot != dropped)
            self._fruitless, self._last_slot = 0, None
        self.restarts += 1
        wait, self._wait = self._wait, min(2 * self._wait, self.cfg.max_backoff)
        return Restart(min(wait, self.cfg.max_backoff), self.slots, dropped)
