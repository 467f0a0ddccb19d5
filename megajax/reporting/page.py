"""The report as one HTML page that needs nothing beside itself."""

from collections.abc import Iterator, Sequence
from html import escape
from pathlib import Path

from megajax.charts import Chart, draw, logarithmic
from megajax.metrics.text import duration, moment
from megajax.reporting.facts import Facts, Table, details, event_rows

ROUTINE_ROWS = 400
"""Of saves, evaluations and the like: the last ones."""


def page(facts: Facts, charts: Sequence[Chart], *, made: str) -> str:
    """HTML of the report; `made` says when and by what it was written."""
    parts = [
        "<!doctype html>",
        '<html lang="en"><head><meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        '<meta name="color-scheme" content="light dark">',
        f"<title>{escape(facts.name)}: report</title><style>{_beside('page.css')}</style></head><body><main>",
        f"<header><h1>{escape(facts.name)}</h1>",
        f'<p class="verdict {facts.mood}">{escape(facts.verdict)}</p></header>',
        *_faults(facts),
        *_figures(facts),
        *_charts(charts),
        *_time(facts),
        *(piece for table in facts.tables for piece in _table(table)),
        *_events(facts),
        *_summary(facts),
        *_config(facts),
        f"<footer>{escape(made)}</footer>",
        f"</main><script>{_beside('page.js')}</script></body></html>\n",
    ]
    return "\n".join(parts)


def _beside(name: str) -> str:
    return Path(__file__).with_name(name).read_text(encoding="utf-8")


def _faults(facts: Facts) -> Iterator[str]:
    if facts.faults:
        yield f'<ul class="faults">{"".join(f"<li>{escape(fault)}</li>" for fault in facts.faults)}</ul>'


def _figures(facts: Facts) -> Iterator[str]:
    if not facts.figures:
        return
    yield '<section class="figures">'
    for name, value, remark in facts.figures:
        yield f'<div><span class="name">{escape(name)}</span><span class="value">{escape(value)}</span>'
        yield f'<span class="remark">{escape(remark)}</span></div>'
    yield "</section>"


def _charts(charts: Sequence[Chart]) -> Iterator[str]:
    if not charts:
        yield '<p class="none">No step has been logged yet: there are no curves.</p>'
        return
    yield '<section class="charts">'
    for index, chart in enumerate(charts):
        remarks = ", ".join([*[chart.unit] * bool(chart.unit), *["logarithmic"] * logarithmic(chart)])
        unit = f' <span class="unit">{escape(remarks)}</span>' if remarks else ""
        yield f'<figure class="{"wide" if index == 0 else ""}"><figcaption><h2>{escape(chart.title)}{unit}</h2>'
        yield f'<span class="legend">{"".join(_legend(chart, index == 0))}</span></figcaption>'
        yield f'<div class="plot">{draw(chart)}</div></figure>'
    yield "</section>"


def _legend(chart: Chart, whole: bool) -> Iterator[str]:
    if len(chart.series) > 1:
        for one in chart.series if whole else [one for one in chart.series if one.style != "faint"]:
            yield f'<span><i class="key {one.style} c{one.color}"></i>{escape(one.name)}</span>'
    if chart.broken:
        yield f'<span><b class="crosskey">×</b>{"not finite" if chart.title == "Loss" else "update not made"}</span>'
    if whole:
        names = {
            "resume": "resumed",
            "warning": "stopped, skipped or passing fault",
            "bad": "fault",
            "save": "saved",
            "evaluate": "evaluated",
        }
        there = {mark.mood for mark in chart.marks}
        for mood, text in names.items():
            if mood in there:
                yield f'<span><i class="key mark {mood}"></i>{text}</span>'


def _time(facts: Facts) -> Iterator[str]:
    if not facts.shares:
        return
    yield '<section><h2>Where the time went</h2><div class="bar">'
    for share in facts.shares:
        slug = share.cause.replace(" ", "-")
        tip = f"{share.cause}: {duration(share.seconds)}, {share.part:.1%}"
        yield f'<i class="t-{slug}" style="flex-grow:{share.part:.5f}" title="{escape(tip)}"></i>'
    yield "</div><table><tbody>"
    for share in facts.shares:
        slug = share.cause.replace(" ", "-")
        yield f'<tr><td><i class="swatch t-{slug}"></i>{escape(share.cause)}</td>'
        yield f'<td class="n">{duration(share.seconds)}</td>'
        yield f'<td class="n">{share.part:.1%}</td><td class="note">{escape(share.note)}</td></tr>'
    yield "</tbody></table>"
    if facts.shares_note:
        yield f'<p class="note">{escape(facts.shares_note)}</p>'
    yield "</section>"


def _table(table: Table) -> Iterator[str]:
    yield f'<section><h2>{escape(table.title)}</h2><div class="scroll"><table class="tight"><thead><tr>'
    kinds = ['class="n"' if place in table.numbers else "" for place in range(len(table.headings))]
    yield "".join(f"<th {kind}>{escape(text)}</th>" for kind, text in zip(kinds, table.headings, strict=True))
    yield "</tr></thead><tbody>"
    for row in table.rows:
        cells = "".join(f"<td {kind}>{escape(text)}</td>" for kind, text in zip(kinds, row, strict=True))
        yield f"<tr>{cells}</tr>"
    yield "</tbody></table></div>"
    if table.note:
        yield f'<p class="note">{escape(table.note)}</p>'
    yield "</section>"


def _events(facts: Facts) -> Iterator[str]:
    rows, left_out = event_rows(facts.attempts, routine=ROUTINE_ROWS)
    if not rows:
        return
    yield '<section><h2>Events</h2><div class="scroll tall"><table><thead><tr>'
    yield '<th>time</th><th class="n">step</th><th>event</th><th>details</th></tr></thead><tbody>'
    for mood, event in rows:
        step = "" if event.step is None else f"{event.step:,}"
        yield f'<tr class="{mood}"><td class="when">{moment(event.time)}</td><td class="n">{step}</td>'
        yield f"<td>{escape(event.name.replace('_', ' '))}</td><td>{escape(details(event))}</td></tr>"
    yield "</tbody></table></div>"
    if left_out:
        yield f'<p class="note">{left_out:,} earlier saves, evaluations and the like left out.</p>'
    yield "</section>"


def _summary(facts: Facts) -> Iterator[str]:
    yield "<section><h2>The run</h2><table><tbody>"
    for name, value in facts.summary:
        yield f'<tr><td class="label">{escape(name)}</td><td>{escape(value)}</td></tr>'
    if facts.versions:
        listed = ", ".join(f"{name} {version}" for name, version in facts.versions.items())
        yield f'<tr><td class="label">versions</td><td>{escape(listed)} (at the newest checkpoint)</td></tr>'
    else:
        yield '<tr><td class="label">versions</td><td>unknown: checkpoints remember them, and there is none</td></tr>'
    yield "</tbody></table></section>"


def _config(facts: Facts) -> Iterator[str]:
    if not facts.differences:
        return
    yield '<section><h2>Config <span class="unit">what differs from the defaults</span></h2><div class="scroll"><table>'
    yield "<thead><tr><th>setting</th><th>value</th><th>default</th></tr></thead><tbody>"
    for name, default, value in facts.differences:
        yield f"<tr><td><code>{escape(name)}</code></td><td><code>{escape(value)}</code></td>"
        yield f'<td class="note"><code>{escape(default)}</code></td></tr>'
    yield "</tbody></table></div></section>"
