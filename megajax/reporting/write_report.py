"""The report of a run folder, as a self-contained HTML page or as text, with marks for the run's events in curves."""

import json
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from html import escape
from itertools import zip_longest
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table
from rich.text import Text

from megajax.config.errors import UserError
from megajax.display.charts import BarSegment, EventMark, LineChart, Series, legend, stacked_bar
from megajax.display.text import duration
from megajax.metrics.plots import running_mean
from megajax.metrics.run_folder import RunFolder, write_atomically
from megajax.metrics.throughput import Goodput
from megajax.reporting.attempts import PastAttempt, attempts
from megajax.reporting.history import ROUTINE, STATUS, History, read_history
from megajax.reporting.run_summary import TIME, RunSummary, SummaryTable, details, summarize
from megajax.reporting.wall_time import goodput
from megajax.storage.write_errors import write_fault

LOSS_SIZE = {"width": 1160, "height": 380}

MEANS = 200
"""A running mean covers 1/MEANS of the run's steps."""

MEAN_FROM, ZIGZAG = 10, 20.0
"""Curves other than the loss get a running mean if it covers MEAN_FROM steps, and if their total variation exceeds
ZIGZAG times their range."""

WITHOUT_COMPILATION = "without steps that compile"

PLOTTED = frozenset(
    {
        *("loss", "grad_norm", "lr", "loss_scale", "skipped", "consumed_samples", "consumed_tokens", "step_seconds"),
        *("tokens_per_second", "tokens_per_second_per_device", "tflops_per_device_causal", "tflops_per_device_full"),
        *("mfu_causal", "mfu_full", "memory_device", "memory_device_peak", "memory_host", "save_failed"),
    }
)
"""Columns with a dedicated chart or without one. The others, except seconds of phases, are metrics of the model."""

UNMARKED = ROUTINE - {"save_committed", "evaluate"} | {"start", "end", "restart"}
"""Events without a mark."""


def curves(history: History, runs: Sequence[PastAttempt]) -> list[LineChart]:
    """The loss, then all other metrics with finite values."""
    marks = list(_marks(runs))
    lines = [mark for mark in marks if mark.line]
    last = float(history.steps.step[-1]) if len(history.steps) else 1.0
    charts = [_loss(history)] if len(history.steps) else []
    charts += _other_charts(history, {run.first_step + 1 for run in runs})
    return [
        replace(chart, last=last, **(LOSS_SIZE | {"marks": marks} if chart.title == "Loss" else {"marks": lines}))
        for chart in charts
        if any(np.isfinite(np.asarray(series.y)).any() for series in chart.series) or chart.crosses
    ]


def _loss(history: History) -> LineChart:
    steps = history.steps
    series = _with_mean(Series("train", steps.step, steps.column("loss")), always=True)
    for index, (split, (at, losses)) in enumerate(history.evaluations.items()):
        series.append(Series(split, at, losses, 1 + index % 5, "dots"))
    crosses = tuple(sorted(steps.nonfinite.items()))
    return LineChart(title="Loss", unit="nats per token", series=series, crosses=crosses)


def _with_mean(series: Series, *, always: bool = False) -> list[Series]:
    """The curve; a long, jittering curve is drawn faintly behind its running mean."""
    window = len(series.x) // MEANS
    y = np.asarray(series.y)
    finite = y[np.isfinite(y)]
    jitters = window >= MEAN_FROM and float(np.abs(np.diff(finite)).sum()) > ZIGZAG * float(np.ptp(finite))
    if window < 2 or not (always or jitters):
        return [series]
    name = f"{series.name}, mean of {window:,} steps"
    return [replace(series, style="faint"), replace(series, name=name, y=running_mean(y, window))]


def _other_charts(history: History, compiling: Collection[int]) -> Iterator[LineChart]:
    """All charts except the loss. compiling: steps whose time includes a compilation, omitted from curves of speed."""
    steps, layers = history.steps, history.layers.values
    compiles = np.isin(steps.step, list(compiling)) if len(steps) > len(compiling) else np.zeros(len(steps), bool)

    def chart(
        title: str, unit: str, columns: Mapping[str, str], *, factor: float = 1.0, speed: bool = False, **options: Any
    ) -> LineChart:
        """columns: name of the curve -> column, multiplied by `factor`."""
        series: list[Series] = []
        for index, (name, column) in enumerate(columns.items()):
            y = np.where(compiles & speed, np.nan, steps.column(column) * factor)
            if np.isfinite(y).any():
                series += _with_mean(Series(name, steps.step, y, index))
        return LineChart(title=title, unit=unit + WITHOUT_COMPILATION * speed, series=series, **options)

    skipped = tuple((int(step), "update skipped") for step in steps.step[steps.column("skipped") == 1])
    yield chart("Gradient norm", "before clipping", {"gradient norm": "grad_norm"}, crosses=skipped)
    yield chart("Learning rate", "", {"learning rate": "lr"}, scale="linear")
    total, per_device = "tokens_per_second", "tokens_per_second_per_device"
    yield chart("Tokens per second", "all devices; ", {"tokens per second": total}, speed=True)
    if not np.array_equal(steps.column(total), steps.column(per_device), equal_nan=True):
        yield chart("Tokens per second and device", "", {"tokens per second": per_device}, speed=True)
    if steps.median("mfu_causal") is not None:
        mfu = {"causal": "mfu_causal", "full (no mask)": "mfu_full"}
        yield chart("MFU", "model FLOP/s over the peak; ", mfu, percent=True, speed=True)
    elif history.shows_flops:
        tflops = {"causal": "tflops_per_device_causal", "full (no mask)": "tflops_per_device_full"}
        yield chart("TFLOP/s per device", "of the model; ", tflops, speed=True)
    yield chart("Step time", "s", {"step": "step_seconds", "waiting for data": "seconds_data_wait"})
    device = {"in use after the step": "memory_device", "peak so far": "memory_device_peak"}
    yield chart("Device memory", "GiB", device, factor=2**-30, scale="linear")
    yield chart("Host memory", "GiB", {"process 0": "memory_host"}, factor=2**-30, scale="linear")
    scales = steps.column("loss_scale")
    if np.isfinite(scales).any() and np.nanmin(scales) != np.nanmax(scales):
        yield chart("Loss scale", "", {"loss scale": "loss_scale"})
    for name in sorted(steps.columns.keys() - PLOTTED):
        # Metrics of layers that are always 0, for example dropped tokens, are omitted.
        if not name.startswith("seconds_") and not (name in layers and not np.nan_to_num(steps.column(name)).any()):
            scale = "linear" if name.startswith("reward") else "auto"
            yield chart(name.replace("_", " "), "", {name.replace("_", " "): name}, scale=scale)


def _marks(runs: Sequence[PastAttempt]) -> Iterator[EventMark]:
    for run in runs:
        if run.number > 1:
            yield EventMark(run.first_step, "resume", f"attempt {run.number} resumes after step {run.first_step:,}")
        for event in run.events:
            if event.step is not None and event.name not in UNMARKED:
                text = f"step {event.step:,}: {event.name.replace('_', ' ')} ({details(event)})"
                routine = {"save_committed": "save", "evaluate": "evaluate"}.get(event.name)
                yield EventMark(event.step, routine or STATUS.get(event.name, "plain"), text, line=routine is None)


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
    for block in (SummaryTable("Figures", (), summary.figures), *summary.tables):
        if not block.rows:
            continue
        grid = Table(box=None, pad_edge=False, padding=(0, 2), header_style="dim", show_header=bool(block.headings))
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
    faults = "".join(f"<li>{escape(fault)}</li>" for fault in summary.faults)
    body = [
        _header(summary.name, verdict=(summary.status, summary.verdict)),
        f'<ul class="faults">{faults}</ul>' if faults else "",
        _figures(summary.figures),
        *_timeline(summary),
        *_charts([chart.thinned() for chart in curves(history, summary.attempts)]),
        *(_section(heat_map.title, heat_map.svg()) for heat_map in history.layers.heat_maps()),
        *_tables(summary),
        f"<footer>{escape(footer)}</footer>",
    ]
    write_atomically(path, _page(f"{summary.name}: report", body))
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
    yield _section("Timeline", body, "wall time, with the numbers of attempts")


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
    return _section(chart.title, plot + (legend(keys) if keys else ""), remarks)


def _tables(summary: RunSummary) -> Iterator[str]:
    for block in summary.tables:
        bar = ""
        if block is summary.tables[0] and summary.shares:
            bar = stacked_bar(
                [
                    BarSegment(share.cause, share.seconds, duration(share.seconds), share.cause.replace(" ", "-"))
                    for share in summary.shares
                ]
            )
        kinds = [status if status != "plain" else "" for status in block.row_status]
        body = _table(block.headings, block.rows, block.numbers, kinds)
        note = f'<p class="note">{escape(block.note)}</p>' if block.note else ""
        yield _section(block.title, bar + body + note)


def _page(title: str, body: Iterable[str]) -> str:
    """A self-contained HTML page: no network, no other files."""
    style, script = (Path(__file__).with_name(name).read_text(encoding="utf-8") for name in ("page.css", "page.js"))
    parts = [
        '<!doctype html><html lang="en"><head><meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        '<meta name="color-scheme" content="light dark">',
        f"<title>{escape(title)}</title><style>{style}</style></head><body><main>",
        *body,
        f"</main><script>{script}</script></body></html>\n",
    ]
    return "\n".join(parts)


def _header(title: str, remark: str = "", verdict: tuple[str, str] | None = None) -> str:
    """The title of a page. verdict: its status (good, warning or bad) and text."""
    frame = "" if verdict is None else f'<span class="verdict {verdict[0]}">{escape(verdict[1])}</span> '
    return f"<header><h1>{escape(title)}</h1><p>{frame}{escape(remark)}</p></header>"


def _figures(rows: Sequence[tuple[str, str, str]]) -> str:
    """Cards with name, value and remark of the most important numbers."""
    cards = (f"<div><span>{escape(n)}</span><b>{escape(v)}</b><span>{escape(r)}</span></div>" for n, v, r in rows)
    return f'<div class="figures">{"".join(cards)}</div>' if rows else ""


def _section(title: str, body: str, remark: str = "") -> str:
    """A card with a heading. body: HTML."""
    small = f"<small>{escape(remark)}</small>" if remark else ""
    return f"<section><h2>{escape(title)}{small}</h2>{body}</section>"


def _table(
    headings: Sequence[str], rows: Iterable[Sequence[str]], numbers: Collection[int] = (), kinds: Sequence[str] = ()
) -> str:
    """A table. numbers: right-aligned columns; kinds: CSS class of each row. Without headings, no head."""
    rows = [*rows]
    flush = [' class="n"' if place in numbers else "" for place in range(max(map(len, rows), default=0))]
    head = "".join(f"<th{kind}>{escape(text)}</th>" for kind, text in zip(flush, headings, strict=False))
    lines = []
    for row, kind in zip_longest(rows, kinds, fillvalue=""):
        cells = "".join(f"<td{side}>{escape(text)}</td>" for side, text in zip(flush, row, strict=True))
        lines.append(f"<tr{f' class="{kind}"' if kind else ''}>{cells}</tr>")
    header_row = f"<thead><tr>{head}</tr></thead>" if head else ""
    return f'<div class="scroll"><table>{header_row}<tbody>{"".join(lines)}</tbody></table></div>'
