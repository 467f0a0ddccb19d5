"""From a run folder to its report: read, summarize, and write it as a self-contained HTML page or as text."""

import json
import sys
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from html import escape
from pathlib import Path

from rich.console import Console
from rich.table import Table as Grid
from rich.text import Text

from megajax.charts import LineChart, Segment, legend, stacked_bar
from megajax.config.errors import UserError
from megajax.metrics.goodput import Goodput
from megajax.metrics.runfolder import RunFolder, write_atomically
from megajax.pages import figures, header, page, section, table
from megajax.reporting.attempts import attempts
from megajax.reporting.curves import curves
from megajax.reporting.history import History, read_history
from megajax.reporting.run_summary import TIME, RunSummary, Table, summarize
from megajax.reporting.shares import goodput
from megajax.text import duration

WIDTH = 160
"""Columns of the text where it does not go to a terminal."""

PAGE_EVENTS, TEXT_EVENTS = 400, 12
"""Routine events that are listed: saves, evaluations and the like."""

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
    headline = Text.assemble((summary.name, "bold"), "  ", (summary.verdict, STYLES[summary.mood]))
    console.print(headline, soft_wrap=not as_text)
    if as_text:
        _print(summary, console)
        if output is None:
            return
    try:
        print(_write_page(history, None if output is None else output.expanduser()))
    except OSError as error:
        raise UserError(
            f"the page can't be written to {output or history.folder}: {error.strerror or error}. "
            "Choose another place with --output=FILE."
        ) from error


def close_run(run_dir: Path, page: bool) -> tuple[str | None, Goodput | None]:
    """At the end of a run, write report.html into its folder if `page` -> a line that says so, and the goodput."""
    history = read_history(run_dir)
    good = goodput(history, attempts(history))
    return _write_page(history, None) if page else None, good


def _print(summary: RunSummary, console: Console) -> None:
    for fault in summary.faults:
        console.print(Text(f"! {fault}", style="yellow"))
    for given in (Table("Figures", (), summary.figures), *summary.tables):
        if not given.rows:
            continue
        grid = Grid(box=None, pad_edge=False, padding=(0, 2), header_style="dim", show_header=bool(given.headings))
        for place, heading in enumerate(given.headings or [""] * len(given.rows[0])):
            justify = "right" if place in given.numbers else "left"
            grid.add_column(heading, justify=justify, overflow="fold", no_wrap=place == 0, style="dim" * (place == 0))
        for place, row in enumerate(given.rows):
            grid.add_row(*map(Text, row), style=STYLES[given.moods[place] if given.moods else "plain"])
        console.print(Text(f"\n{given.title}", style="bold cyan"))
        console.print(grid)
        if given.note:
            console.print(Text(f"  {given.note}", style="dim"))
        if given.title == TIME and summary.timeline is not None:
            console.print(Text(f"\n{summary.timeline.text()}"), soft_wrap=True)


def _write_page(history: History, path: Path | None) -> str:
    path = path or RunFolder(history.folder).report
    summary = summarize(history, routine=PAGE_EVENTS)
    now = f"{datetime.now(UTC):%Y-%m-%d %H:%M UTC}"
    footer = f"Written {now} from {history.folder.resolve()} by python -m megajax.report."
    style, script = (Path(__file__).with_name(name).read_text(encoding="utf-8") for name in ("page.css", "page.js"))
    faults = "".join(f"<li>{escape(fault)}</li>" for fault in summary.faults)
    body = [
        header(summary.name, verdict=(summary.mood, summary.verdict)),
        f'<ul class="faults">{faults}</ul>' if faults else "",
        figures(summary.figures),
        *_timeline(summary),
        *_charts([chart.thinned() for chart in curves(history, summary.attempts)]),
        *(section(one.title, one.svg()) for one in history.layers.heat_maps()),
        *_tables(summary),
        f"<footer>{escape(footer)}</footer>",
    ]
    write_atomically(path, page(f"{summary.name}: report", body, style=style, script=script))
    return f"report: {path}"


def _timeline(summary: RunSummary) -> Iterator[str]:
    """The bar of the run; its colours are those of the table on time."""
    if summary.timeline is None:
        return
    shown = {mark.kind for mark in summary.timeline.marks}
    keys = [(f"mark {kind}", text, "") for kind, text in TIMELINE_MARKS.items() if kind in shown]
    causes = {span.cause: None for span in summary.timeline.spans}
    keys = [(cause.replace(" ", "-"), cause, "") for cause in causes] + keys
    body = f'<div class="timeline">{summary.timeline.svg()}</div>{legend(keys)}'
    yield section("Timeline", body, "wall time; the numbers are attempts")


def _charts(charts: Sequence[LineChart]) -> Iterator[str]:
    if not charts:
        yield '<p class="note">No step has been logged yet: there are no curves.</p>'
        return
    yield _chart(charts[0], with_marks=True)
    yield f'<div class="two">{"".join(_chart(chart) for chart in charts[1:])}</div>'


def _chart(chart: LineChart, *, with_marks: bool = False) -> str:
    series = [one for one in chart.series if with_marks or one.style != "faint"] if len(chart.series) > 1 else []
    keys = [(f"{one.style} c{one.color}", one.name, "") for one in series]
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
    for given in summary.tables:
        bar = ""
        if given is summary.tables[0] and summary.shares:
            bar = stacked_bar(
                [
                    Segment(share.cause, share.seconds, duration(share.seconds), share.cause.replace(" ", "-"))
                    for share in summary.shares
                ]
            )
        moods = [mood if mood != "plain" else "" for mood in given.moods]
        body = table(given.headings, given.rows, given.numbers, moods)
        note = f'<p class="note">{escape(given.note)}</p>' if given.note else ""
        yield section(given.title, bar + body + note)
