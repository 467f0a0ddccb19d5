"""From a run folder to its report: read, gather, write."""

import sys
from datetime import UTC, datetime
from pathlib import Path

from rich.console import Console

from megajax.config.errors import UserError
from megajax.metrics.runfolder import write_atomically
from megajax.reporting.curves import curves
from megajax.reporting.facts import gather
from megajax.reporting.history import read_history
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
    path = history.folder / "report.html" if output is None else output.expanduser()
    made = f"Made {datetime.now(UTC):%Y-%m-%d %H:%M UTC} from {history.folder.resolve()} by python -m megajax.report."
    try:
        write_atomically(path, page(facts, charts, made=made))
    except OSError as error:
        raise UserError(
            f"the page cannot be written to {path}: {error.strerror or error}. Give another place with --output=FILE."
        ) from error
    if not as_text:
        console.print(headline(facts), soft_wrap=True)
    print(f"report: {path}")
