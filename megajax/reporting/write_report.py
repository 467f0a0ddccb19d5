"""The report of a run folder, as a self-contained HTML page or as text."""

import json
import sys
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from html import escape
from pathlib import Path

from rich.console import Console
from rich.table import Table as Grid
from rich.text import Text

from megajax.config.errors import UserError
from megajax.display.charts import LineChart, Segment, legend, stacked_bar
from megajax.display.pages import figures, header, page, section, table
from megajax.display.text import duration
from megajax.metrics.runfolder import RunFolder, write_atomically
from megajax.metrics.throughput import Goodput
from megajax.reporting.attempts import attempts
from megajax.reporting.curves import curves
from megajax.reporting.history import History, read_history
from megajax.reporting.run_summary import TIME, RunSummary, Table, summarize
from megajax.reporting.wall_time import goodput
from megajax.storage.write_errors import write_fault

WIDTH = 160
"""Columns of the text if standard output is not a terminal."""

PAGE_EVENTS, TEXT_EVENTS = 400, 12
"""Maximum number of routine events in a list: saves, evaluations and the like."""

STYLES = {"good": "green", "warning": "yellow", "bad": "red", "plain": "default"}

MARKS = {
    "resume": "resumed",
    "warning": "stopped, skipped, retried or a transient fault",
    "bad": "failure",
    "save": "saved",
    "evaluate": "evaluated",
}

TIMELINE_MARKS = {
    "resume": "next attempt",
    "bad": "failure",
    "warning": "signal, retry, fallback, straggler",
    "save": "saved",
}


def report(run_dir: Path, output: Path | None, *, as_text: bool) -> None:
    """Write the page of the run in `run_dir` to `output`, print the report as text, or both.

    output: None for report.html in the run folder, or for no page with `as_text`. Raises UserError if there is no run,
    or if the page can't be written.
    """
    history = read_history(run_dir)
    console = Console(width=None if sys.stdout.isatty() else WIDTH, highlight=False)
    summary = summarize(history, routine=TEXT_EVENTS)
    headline = Text.assemble((summary.name, "bold"), "  ", (summary.verdict, STYLES[summary.status]))
    console.print(headline, soft_wrap=not as_text)
    if as_text:
        _print(summary, console)
        if output is None:
            return
    try:
        print(_write_page(history, None if output is None else output.expanduser()))
    except OSError as error:
        raise UserError(
            f"the page can't be written to {output or history.folder}: {write_fault(error)}. "
            "Choose another file with --output=FILE."
        ) from error


def close_run(run_dir: Path, page: bool) -> tuple[str | None, Goodput | None]:
    """At the end of a run, write report.html into its folder if `page` -> a line for the terminal, and the goodput."""
    history = read_history(run_dir)
    run_goodput = goodput(history, attempts(history))
    return _write_page(history, None) if page else None, run_goodput


def _print(summary: RunSummary, console: Console) -> None:
    for fault in summary.faults:
        console.print(Text(f"! {fault}", style="yellow"))
    for block in (Table("Figures", (), summary.figures), *summary.tables):
        if not block.rows:
            continue
        grid = Grid(box=None, pad_edge=False, padding=(0, 2), header_style="dim", show_header=bool(block.headings))
        for column, heading in enumerate(block.headings or [""] * len(block.rows[0])):
            justify = "right" if column in block.numbers else "left"
            grid.add_column(heading, justify=justify, overflow="fold", no_wrap=column == 0, style="dim" * (column == 0))
        for index, row in enumerate(block.rows):
            grid.add_row(*map(Text, row), style=STYLES[block.row_status[index] if block.row_status else "plain"])
        console.print(Text(f"\n{block.title}", style="bold cyan"))
        console.print(grid)
        if block.note:
            console.print(Text(f"  {block.note}", style="dim"))
        if block.title == TIME and summary.timeline is not None:
            console.print(Text(f"\n{summary.timeline.text()}"), soft_wrap=True)


def _write_page(history: History, path: Path | None) -> str:
    path = path or RunFolder(history.folder).report
    summary = summarize(history, routine=PAGE_EVENTS)
    now = f"{datetime.now(UTC):%Y-%m-%d %H:%M UTC}"
    footer = f"Written {now} from {history.folder.resolve()} by python -m megajax.report."
    style, script = (Path(__file__).with_name(name).read_text(encoding="utf-8") for name in ("page.css", "page.js"))
    faults = "".join(f"<li>{escape(fault)}</li>" for fault in summary.faults)
    body = [
        header(summary.name, verdict=(summary.status, summary.verdict)),
        f'<ul class="faults">{faults}</ul>' if faults else "",
        figures(summary.figures),
        *_timeline(summary),
        *_charts([chart.thinned() for chart in curves(history, summary.attempts)]),
        *(section(heat_map.title, heat_map.svg()) for heat_map in history.layers.heat_maps()),
        *_tables(summary),
        f"<footer>{escape(footer)}</footer>",
    ]
    write_atomically(path, page(f"{summary.name}: report", body, style=style, script=script))
    return f"report: {path}"


def _timeline(summary: RunSummary) -> Iterator[str]:
    """The bar of the run, in the colours of the table of time by cause."""
    if summary.timeline is None:
        return
    kinds = {mark.kind for mark in summary.timeline.marks}
    keys = [(f"mark {kind}", text, "") for kind, text in TIMELINE_MARKS.items() if kind in kinds]
    causes = {span.cause: None for span in summary.timeline.spans}
    keys = [(cause.replace(" ", "-"), cause, "") for cause in causes] + keys
    body = f'<div class="timeline">{summary.timeline.svg()}</div>{legend(keys)}'
    yield section("Timeline", body, "wall time, with the numbers of attempts")


def _charts(charts: Sequence[LineChart]) -> Iterator[str]:
    if not charts:
        yield '<p class="note">No step has been logged yet: there are no curves.</p>'
        return
    yield _chart(charts[0], with_marks=True)
    yield f'<div class="two">{"".join(_chart(chart) for chart in charts[1:])}</div>'


def _chart(chart: LineChart, *, with_marks: bool = False) -> str:
    curves = [series for series in chart.series if with_marks or series.style != "faint"]
    keys = [(f"{curve.style} c{curve.color}", curve.name, "") for curve in curves if len(chart.series) > 1]
    if chart.crosses:
        keys.append(("cross", "not finite" if chart.title == "Loss" else "update skipped", ""))
    if with_marks:
        kinds = {mark.kind for mark in chart.marks}
        keys += [(f"mark {kind}", text, "") for kind, text in MARKS.items() if kind in kinds]
    data = json.dumps(chart.data()).replace("<", "&lt;")
    plot = f'<div class="plot">{chart.svg()}<script type="application/json">{data}</script></div>'
    remarks = ", ".join(filter(None, (chart.unit, "logarithmic" * chart.logarithmic)))
    return section(chart.title, plot + (legend(keys) if keys else ""), remarks)


def _tables(summary: RunSummary) -> Iterator[str]:
    for block in summary.tables:
        bar = ""
        if block is summary.tables[0] and summary.shares:
            bar = stacked_bar(
                [
                    Segment(share.cause, share.seconds, duration(share.seconds), share.cause.replace(" ", "-"))
                    for share in summary.shares
                ]
            )
        kinds = [status if status != "plain" else "" for status in block.row_status]
        body = table(block.headings, block.rows, block.numbers, kinds)
        note = f'<p class="note">{escape(block.note)}</p>' if block.note else ""
        yield section(block.title, bar + body + note)
