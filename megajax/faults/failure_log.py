"""Crashes and signals of any process as lines of events.jsonl."""

import contextlib
from collections.abc import Callable

from megajax.config.errors import UserError
from megajax.faults.activity import SETUP, ActivePhase, Activity
from megajax.faults.attempt_end import record_failure
from megajax.faults.beats import exit_code
from megajax.faults.peer_status import causes

MAX_ERROR_LENGTH = 400
"""Characters of an error in the log."""


class FailureLog:
    """Appends to events.jsonl directly: the process may end before buffered lines are written.

    Until `open`, the run folder may belong to another run that is still going, and nothing is written.
    """

    def __init__(self, activity: Activity, started: Callable[[], bool]):
        """activity: of this process. started: whether the event `start` is written."""
        self._activity, self._started = activity, started
        self._record: Callable[..., None] | None = None
        self._process, self._several = 0, False

    def open(self, record: Callable[..., None], process: int, processes: int) -> None:
        """Write events with `record` from now on, as those of one process of several."""
        self._record, self._process, self._several = record, process, processes > 1

    def crash(self, error: BaseException, raised: BaseException) -> None:
        """`error` ends this process; `raised` is the error that it explains, or itself.

        A start refused with code 2 is not part of the run and leaves its folder unchanged.
        """
        if exit_code(error) == 2 and not self._started():
            return
        phase, step = self._phase_and_step(_doing(raised))
        self._append("crash", ends=True, error=one_line(error), phase=phase, step=step, exit_code=exit_code(error))

    def signal(self, name: str, exit_code: int | None) -> None:
        """A signal arrived. exit_code: of this process, if the signal ends it now."""
        phase, step = self._phase_and_step(self._activity.of_main_thread())
        code_field = {} if exit_code is None else {"exit_code": exit_code}
        self._append("signal", ends=exit_code is not None, signal=name, phase=phase, step=step, **code_field)

    def _phase_and_step(self, doing: ActivePhase | None) -> tuple[str | None, int | None]:
        if doing is None:
            return None if self._started() else SETUP, None
        return doing.phase, doing.step

    def _append(self, event: str, *, ends: bool, **fields: object) -> None:
        # A full or missing disk must not hide the failure itself.
        with contextlib.suppress(OSError):
            if self._record is not None and ends:
                record_failure(self._record, event, several=self._several, process=self._process, **fields)
            elif self._record is not None:
                self._record(event, process=self._process, **fields)


def one_line(error: BaseException) -> str:
    """Type and message of an error; only the first line of the message unless it is a UserError."""
    lines = [line.strip() for line in str(error).strip().splitlines()] or [""]
    if isinstance(error, UserError):
        text = " ".join(lines)
    else:
        text = f"{type(error).__name__}{': ' * bool(lines[0])}{lines[0]}"
    return text if len(text) <= MAX_ERROR_LENGTH else f"{text[: MAX_ERROR_LENGTH - 1]}…"


def _doing(error: BaseException) -> ActivePhase | None:
    """The phase in which an error was raised; None outside of phases."""
    return next(filter(None, (getattr(cause, "doing", None) for cause in causes(error))), None)
