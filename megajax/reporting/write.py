"""From a run folder to its report: read, gather, write."""

import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

from rich.console import Console

from megajax.charts import Chart
from megajax.config.errors import UserError
from megajax.metrics.runfolder import RunFolder, write_atomically
from megajax.reporting.curves import curves
from megajax.reporting.facts import Facts, gather
from megajax.reporting.history import History, read_history
from megajax.reporting.page import page
from megajax.reporting.terminal import headline, show

WIDTH = 160
"""Columns of the text form where it does not go to a terminal."""


def report(run_dir: Path, output: Path | None, *, as_text: bool) -> None:
    """Write the page of the run in `run_dir` to `output`, or print its text form, or both.

    output: None for report.html in the run folder, or for no page where `as_text`. Raises UserError where there is no
    run, or where the page cannot be written.
    """
    history = read_history(run_dir)
    facts = gather(history)
    charts = curves(history, facts.attempts)
    console = Console(width=None if sys.stdout.isatty() else WIDTH, highlight=False)
    if as_text:
        show(facts, charts, console)
        if output is None:
            return
    path = RunFolder(history.folder).report if output is None else output.expanduser()
    try:
        _write(path, history, facts, charts)
    except OSError as error:
        raise UserError(
            f"the page cannot be written to {path}: {error.strerror or error}. Give another place with --output=FILE."
        ) from error
    if not as_text:
        console.print(headline(facts), soft_wrap=True)
    print(f"report: {path}")


def leave_page(run_dir: Path) -> str:
    """Write the page of a run into its folder -> a line that says so."""
    history = read_history(run_dir)
    facts = gather(history)
    path = RunFolder(history.folder).report
    _write(path, history, facts, curves(history, facts.attempts))
    return f"report: {path}"


def _write(path: Path, history: History, facts: Facts, charts: Sequence[Chart]) -> None:
    made = f"Made {datetime.now(UTC):%Y-%m-%d %H:%M UTC} from {history.folder.resolve()} by python -m megajax.report."
    write_atomically(path, page(facts, charts, made=made))
