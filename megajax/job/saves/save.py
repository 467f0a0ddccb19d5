"""Saves of a job: when they are due, and how failed saves are retried.

A failed save is retried between two later steps, with the state at that time: steps donate the state that was not
saved. All processes retry, count and give up together. Background threads agree on whether an attempt failed; all
processes then act after the same step, either a step whose checkpoint is due or one that a StepBoundary agrees on.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from megajax.checkpoint.agree_on_boundary import DelayedAgreement, StepBoundary
from megajax.checkpoint.background_saves import CheckpointError, SaveReport
from megajax.checkpoint.checkpoint_manager import CheckpointManager
from megajax.config.errors import UserError
from megajax.faults.activity import Activity
from megajax.faults.attempt_end import ATTEMPT_END, failed_saves_end
from megajax.training.guarded.phase_timers import SAVE
from megajax.training.session import Run


class SavesFailed(UserError):
    """Too many saves failed: the run ends."""

    code = 1


@dataclass
class Save:
    """Saves a checkpoint when the policy or the job requests it, and retries failed saves."""

    manager: CheckpointManager
    boundary: StepBoundary
    event: Callable[..., None]
    say: Callable[[str], None]
    """Prints a line."""
    activity: Activity
    meta: Callable[[], dict[str, Any]]
    total: int
    saved: int | None = None
    """Step of the last save that was started and is not known to have failed."""
    failed: CheckpointError | None = None
    """Error of the last save; None: it did not fail, or is under way."""
    failures: int = 0
    """Failed saves in a row."""
    phase: str = SAVE
    _committed: int | None = None
    """Last step that was saved."""
    _retries: int = 0
    """Retries of the current save."""
    _agreement: DelayedAgreement | None = None
    _agreed: bool = False
    """Whether this is the boundary of the agreement."""
    _finishing: bool = False
    """Whether no step follows."""
    _end: SavesFailed | None = field(default=None, repr=False)

    def due(self, step: int) -> bool:
        self._agreed = self.boundary.reached(step)
        if self._agreement is not None and self._agreement.error is not None:
            raise self._agreement.error
        return self._agreed or self.manager.due(step, self.total)

    def __call__(self, run: Run, step: int) -> None:
        """Save, unless a retry is scheduled. Raises SavesFailed if too many saves failed."""
        self._wait()
        if self._agreed:
            self._complete_agreement(hurry=True)
        # All processes schedule the same retries: each knows whether the last save failed, and none is past the
        # boundary that they agree on.
        if self._agreement is None:
            self._begin(run, step)

    def committed(self) -> None:
        """Log the saves that have finished or failed since the last call, without waiting."""
        try:
            self._note_reports()
        except CheckpointError as error:
            self._note_failure(error)

    def finish(self, run: Run, step: int, *, save: bool, retry: bool = True) -> None:
        """The end of training: with `save`, save and wait for it; with `retry`, retry a failed save.

        Raises SavesFailed if the last save failed and is not retried.
        """
        more = save and self.saved != step
        self._finishing = not more
        self._settle(hurry=not retry)
        if more:
            self._finishing = True
            self._begin(run, step)
            self._settle(hurry=False)
        while self.failed is not None:
            if not retry:
                raise SavesFailed(f"{self.failed}\n{self._remedy()}")
            self._begin(run, step)
            self._settle(hurry=False)

    def abandon(self) -> None:
        """The run ends for another reason: wait for the current save, and only print its error."""
        try:
            self._settle(hurry=True)
        except UserError as error:
            self.say(str(error))

    def _begin(self, run: Run, step: int) -> None:
        self.event("save_begun", step=step)
        self.saved = step
        try:
            started = self.manager.save(step, run.state, self.meta())
        except CheckpointError as error:
            self._note_failure(error)
            return
        if not started:
            self._note_success(step)

    def _settle(self, *, hurry: bool) -> None:
        """Wait for the current save and, if it failed, until its retry. hurry: don't wait until the retry."""
        self._wait()
        if self._agreement is not None:
            self._complete_agreement(hurry=hurry or self._end is not None)

    def _wait(self) -> None:
        try:
            self.manager.wait()
        except CheckpointError as error:
            self._note_failure(error)
        self.committed()

    def _complete_agreement(self, *, hurry: bool) -> None:
        """Called at the agreed boundary, or at the end of training, which is the same for all processes."""
        agreement, self._agreement, self._agreed = self._agreement, None, False
        if agreement is not None:
            agreement.wait(skip_delay=hurry)
            self.boundary.cancel()
        if self._end is not None:
            raise self._end

    def _note_reports(self) -> None:
        for report in self.manager.poll():
            self._committed = report.step
            self._note_success(report.step)
            note_committed(report, self.event, self.activity)

    def _note_success(self, step: int) -> None:
        if self.failed is not None or self.failures or self._retries:
            self.say(f"checkpoint step {step} saved; saves work again")
        self.failed, self.failures, self._retries = None, 0, 0

    def _note_failure(self, error: CheckpointError) -> None:
        """Retry, continue or end: the same on all processes, which know of the same failures."""
        cfg = self.manager.cfg
        self.failed, self.saved = error, self._committed
        if self._retries < cfg.retries:
            wait = cfg.retry_seconds * 2**self._retries
            self._retries += 1
            self.event("save_retried", step=error.step, why=error.reason, retry=self._retries, wait_seconds=wait)
            self.say(f"{error}; retry {self._retries} of {cfg.retries} in {wait:g} s, with the state at that time")
            self._agreement = DelayedAgreement(self.boundary, wait)
            return
        self._retries = 0
        self.failures += 1
        last = self._finishing or (cfg.failed_saves is not None and self.failures >= cfg.failed_saves)
        times = "1 failed save" if self.failures == 1 else f"{self.failures} failed saves in a row"
        following = "the run ends with exit code 1" if last else "training continues until the next save"
        code = {"exit_code": 1} if last else {}
        self.event("save_failed", step=error.step, why=error.reason, failures=self.failures, next=following, **code)
        if last:
            self.event(ATTEMPT_END, **failed_saves_end(error.step, self.failures, error.reason))
            why = "at the end of training" if self._finishing else f"checkpoint.failed_saves={cfg.failed_saves}"
            self._end = SavesFailed(f"{error}\n{times} ({why}). {self._remedy()}")
            self._agreement = DelayedAgreement(self.boundary, 0.0)
        else:
            self.say(f"WARNING: {error}; {times}, {following}. {self._remedy()}")

    def _remedy(self) -> str:
        newest = self.manager.newest()
        since = "Nothing has been saved yet" if newest is None else f"Nothing has been saved since step {newest}"
        return f"{since}. Free space or repair the folder; the same command resumes the run."


def note_committed(report: SaveReport, event: Callable[..., None], activity: Activity, **fields: str) -> None:
    """Log a committed save. The activity keeps the newest step, whether its checkpoint is shared or local."""
    activity.committed = max(report.step, activity.committed or 0)
    event(
        "save_committed",
        step=report.step,
        blocking_seconds=round(report.blocking_seconds, 4),
        seconds=round(report.total_seconds, 4),
        bytes=report.bytes,
        **fields,
    )
