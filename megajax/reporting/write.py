"""From a run folder to its report: read, summarize, write."""

import sys
from datetime import UTC, datetime
from pathlib import Path

from rich.console import Console

from megajax.config.errors import UserError
from megajax.metrics.runfolder import RunFolder, write_atomically
from megajax.reporting.curves import curves
from megajax.reporting.history import History, read_history
from megajax.reporting.page import report_page
from megajax.reporting.run_summary import summarize
from megajax.reporting.terminal import headline, show

WIDTH = 160
"""Columns of the text where it does not go to a terminal."""

PAGE_EVENTS, TEXT_EVENTS = 400, 12
"""Routine events that are listed: saves, evaluations and the like."""


def report(run_dir: Path, output: Path | None, *, as_text: bool) -> None:
    """Write the page of the run in `run_dir` to `output`, print the report as text, or both.

    output: None for report.html in the run folder, or for no page with `as_text`. Raises UserError if there is no run,
    or if the page can't be written.
    """
    history = read_history(run_dir)
    console = Console(width=None if sys.stdout.isatty() else WIDTH, highlight=False)
    summary = summarize(history, routine=TEXT_EVENTS)
    if as_text:
        show(summary, curves(history, summary.attempts), console)
        if output is None:
            return
    path = RunFolder(history.folder).report if output is None else output.expanduser()
    try:
        _write(history, path)
    except OSError as error:
        raise UserError(
            f"the page can't be written to {path}: {error.strerror or error}. Choose another place with --output=FILE."
        ) from error
    if not as_text:
        console.print(headline(summary), soft_wrap=True)
    print(f"report: {path}")


def leave_page(run_dir: Path) -> str:
    """Write report.html into a run's folder -> a line that says so."""
    history = read_history(run_dir)
    path = RunFolder(history.folder).report
    _write(history, path)
    return f"report: {path}"


def _write(history: History, path: Path) -> None:
    summary = summarize(history, routine=PAGE_EVENTS)
    now = f"{datetime.now(UTC):%Y-%m-%d %H:%M UTC}"
    footer = f"Written {now} from {history.folder.resolve()} by python -m megajax.report."
    write_atomically(path, report_page(summary, curves(history, summary.attempts), footer=footer))
