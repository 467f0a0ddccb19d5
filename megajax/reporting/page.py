"""The report as one self-contained HTML page."""

import json
from collections.abc import Iterator, Sequence
from html import escape
from pathlib import Path

from megajax.charts import LineChart, Segment, legend, stacked_bar
from megajax.metrics.text import duration
from megajax.pages import figures, header, page, section, table
from megajax.reporting.run_summary import RunSummary, Table

MARKS = {
    "resume": "resumed",
    "warning": "stopped, skipped or transient fault",
    "bad": "fault",
    "save": "saved",
    "evaluate": "evaluated",
}


def report_page(summary: RunSummary, charts: Sequence[LineChart], *, footer: str) -> str:
    """HTML of the report."""
    style, script = (Path(__file__).with_name(name).read_text(encoding="utf-8") for name in ("page.css", "page.js"))
    faults = "".join(f"<li>{escape(fault)}</li>" for fault in summary.faults)
    body = [
        header(summary.name, verdict=(summary.mood, summary.verdict)),
        f'<ul class="faults">{faults}</ul>' if faults else "",
        figures(summary.figures),
        *_charts([chart.thinned() for chart in charts]),
        *_tables(summary),
        f"<footer>{escape(footer)}</footer>",
    ]
    return page(f"{summary.name}: report", body, style=style, script=script)


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
        moods = [mood if mood != "plain" else "" for mood in given.moods]
        body = table(given.headings, given.rows, given.numbers, moods)
        note = f'<p class="note">{escape(given.note)}</p>' if given.note else ""
        yield section(given.title, _time_bar(summary, given) + body + note)


def _time_bar(summary: RunSummary, given: Table) -> str:
    if given is not summary.tables[0] or not summary.shares:
        return ""
    return stacked_bar(
        [
            Segment(share.cause, share.seconds, duration(share.seconds), share.cause.replace(" ", "-"))
            for share in summary.shares
        ]
    )
