"""The exit codes of training runs and of the launcher: one table, which docs/launch.md shows."""

from typing import NamedTuple

SUCCESS, CRASH, INVALID, TRANSIENT_FAULT, NUMERIC_FAULT = 0, 1, 2, 16, 17
REQUEUE, NO_PROGRESS, HANG, INTERRUPTED, ALARM, TERMINATED = 75, 93, 124, 130, 142, 143


class ExitCode(NamedTuple):
    """The meaning of a code, and whether a supervisor starts the same command again after it."""

    code: int
    meaning: str
    restart: bool


EXIT_CODES = {
    row.code: row
    for row in (
        ExitCode(SUCCESS, "done, or asked to stop and saved", False),
        ExitCode(CRASH, "crash; failed saves; a process killed by a signal (from `megajax.launch`)", True),
        ExitCode(INVALID, "config, data or checkpoint invalid; processes that do not match; a port in use", False),
        ExitCode(TRANSIENT_FAULT, "numeric fault, not reproducible: resume, preferably on other hosts", True),
        ExitCode(NUMERIC_FAULT, "numeric fault, reproducible: loss or gradients not finite", False),
        ExitCode(REQUEUE, "asked to stop and saved, with `resilience.exit_code_on_signal=75`: requeue", False),
        ExitCode(NO_PROGRESS, "no new checkpoint in three attempts (from `megajax.launch`)", False),
        ExitCode(HANG, "hang: ended by a watchdog", True),
        ExitCode(INTERRUPTED, "a second SIGINT, or one before training began: ended at once, not saved", False),
        ExitCode(ALARM, "hang in C code that holds the interpreter's lock: ended by SIGALRM", True),
        ExitCode(TERMINATED, "a second SIGTERM, or one before training began: ended at once, not saved", False),
    )
}
"""Exit codes by number."""

STOP_ASKED = frozenset({SUCCESS, REQUEUE, INTERRUPTED, TERMINATED})
"""Codes of runs that were asked to stop, or are done."""


def worth_a_restart(code: int) -> bool:
    """Whether the same command may succeed after this code, negative for a signal. Unknown codes are crashes."""
    row = EXIT_CODES.get(code)
    return row is None or row.restart
