"""Crashes and signals of any process as lines of events.jsonl."""

import contextlib
import sys
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

from megajax.config.errors import UserError
from megajax.faults.activity import SETUP, ActivePhase, Activity
from megajax.faults.beats import exit_code
from megajax.faults.peer_status import causes
from megajax.metrics.event_log import EventLog, append_event
from megajax.metrics.line_file import FileDeleted, LinesLost

MAX_ERROR_LENGTH = 400
"""Characters of an error in the log."""


class FailureLog:
    """Appends to events.jsonl directly: the process may end before buffered lines are written.

    Until `open`, the run folder may belong to another run that is still going, and nothing is written.
    """

    def __init__(self) -> None:
        self._path: Path | None = None
        self._activity, self._events, self._process = Activity(), EventLog(), 0

    def open(self, path: Path, activity: Activity, events: EventLog, process: int) -> None:
        """Write to `path` from now on. activity, events: of this process, whose index is `process`."""
        self._path, self._activity, self._events, self._process = path, activity, events, process

    def crash(self, error: BaseException, raised: BaseException) -> None:
        """`error` ends this process; `raised` is the error that it explains, or itself.

        A start refused with code 2 is not part of the run and leaves its folder unchanged; a deleted folder stays so.
        """
        deleted = isinstance(raised, FileDeleted) and self._path is not None and not self._path.exists()
        if deleted or (exit_code(error) == 2 and not self._events.opened):
            return
        phase, step = self._phase_and_step(_doing(raised))
        self._append("crash", error=one_line(error), phase=phase, step=step, exit_code=exit_code(error))

    def signal(self, name: str, exit_code: int | None) -> None:
        """A signal arrived. exit_code: of this process, if the signal ends it now."""
        phase, step = self._phase_and_step(self._activity.of_main_thread())
        code_field = {} if exit_code is None else {"exit_code": exit_code}
        self._append("signal", signal=name, phase=phase, step=step, **code_field)

    def _phase_and_step(self, doing: ActivePhase | None) -> tuple[str | None, int | None]:
        if doing is None:
            return None if self._events.opened else SETUP, None
        return doing.phase, doing.step

    def _append(self, event: str, **fields: Any) -> None:
        # A full or missing disk must not hide the failure itself.
        with contextlib.suppress(OSError):
            if self._path is not None:
                append_event(self._path, event, process=self._process, **fields)


@contextlib.contextmanager
def report_lost_lines(code: Callable[[], int]) -> Generator[None]:
    """Around a job: lines lost on a full disk are an error if the job ends with code 0, and else a message.

    code: the exit code of the job, by which a launcher decides about a restart.
    """
    try:
        yield
    except LinesLost as lost:
        if code() == 0:
            raise
        print(f"megajax: {lost}", file=sys.stderr, flush=True)


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
