"""The report as text for a terminal or a file."""

from collections.abc import Iterator, Sequence

import numpy as np
from rich.console import Console, Group, RenderableType
from rich.table import Table as Grid
from rich.text import Text

from megajax.charts import Chart, tick_text
from megajax.metrics.text import duration, moment
from megajax.reporting.facts import Facts, Table, details, event_rows

MOODS = {"good": "green", "warning": "yellow", "bad": "red", "plain": "default"}
BLOCKS = " ▁▂▃▄▅▆▇█"
CURVE = 60
"""Characters of a curve."""
ROUTINE_ROWS = 12


def show(facts: Facts, charts: Sequence[Chart], console: Console) -> None:
    """Print everything."""
    console.print(Group(*_parts(facts, charts)), soft_wrap=False)


def headline(facts: Facts) -> Text:
    """Name and verdict in a line."""
    return Text.assemble((facts.name, "bold"), "  ", (facts.verdict, MOODS[facts.mood]))


def _parts(facts: Facts, charts: Sequence[Chart]) -> Iterator[RenderableType]:
    yield headline(facts)
    for fault in facts.faults:
        yield Text(f"! {fault}", style="yellow")
    yield from _named(
        "Figures", [(name, f"{value}  ({remark})" if remark else value) for name, value, remark in facts.figures]
    )
    yield from _curves(charts)
    yield from _time(facts)
    for table in facts.tables:
        yield from _table(table)
    yield from _events(facts)
    versions = ", ".join(f"{name} {version}" for name, version in facts.versions.items())
    yield from _named("The run", [*facts.summary, ("versions", versions or "unknown: checkpoints remember them")])
    rows = [(name, value, default) for name, default, value in facts.differences]
    yield from _table(Table("Config: what differs from the defaults", ("setting", "value", "default"), rows))


def _heading(text: str) -> Text:
    return Text(f"\n{text}", style="bold cyan")


def _named(title: str, rows: Sequence[tuple[str, str]]) -> Iterator[RenderableType]:
    if rows:
        grid = Grid.grid(padding=(0, 2))
        grid.add_column(style="dim", no_wrap=True)
        grid.add_column(overflow="fold")
        for name, value in rows:
            grid.add_row(f"  {name}", Text(value))
        yield _heading(title)
        yield grid


def _table(table: Table) -> Iterator[RenderableType]:
    if not table.rows:
        return
    grid = Grid(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    grid.add_column("")
    for place, heading in enumerate(table.headings):
        grid.add_column(heading, justify="right" if place in table.numbers else "left", overflow="fold")
    for row in table.rows:
        grid.add_row("", *map(Text, row))
    yield _heading(table.title)
    yield grid
    if table.note:
        yield Text(f"  {table.note}", style="dim")


def _curves(charts: Sequence[Chart]) -> Iterator[RenderableType]:
    rows = []
    for chart in charts:
        for series in chart.series:
            finite = series.y[np.isfinite(series.y)]
            if series.style != "faint" and finite.size:
                low, high = (
                    tick_text(float(f"{value:.4g}"), percent=chart.percent) for value in (finite.min(), finite.max())
                )
                name = chart.title if len(chart.series) == 1 else f"{chart.title}: {series.name}"
                rows.append((name, low, high, curve(series.x, series.y, chart.first, chart.last)))
    table = Table(
        "Curves", ("", "least", "most", f"step 1 to {charts[0].last:,.0f}" if charts else ""), rows, frozenset({1, 2})
    )
    yield from _table(table)


def curve(x: np.ndarray, y: np.ndarray, first: float, last: float, width: int = CURVE) -> str:
    """A curve in blocks, the mean of each column; x where no value in it is finite, blank where there is none."""
    column = np.clip(((x - first) / max(last - first, 1) * width).astype(int), 0, width - 1)
    finite = np.isfinite(y)
    low, high = float(y[finite].min()), float(y[finite].max())
    text = []
    for place in range(width):
        here = column == place
        if not here.any():
            text.append(" ")
        elif not (here & finite).any():
            text.append("x")
        else:
            share = (float(y[here & finite].mean()) - low) / (high - low) if high > low else 0.5
            text.append(BLOCKS[1 + round(share * (len(BLOCKS) - 2))])
    return "".join(text)


def _time(facts: Facts) -> Iterator[RenderableType]:
    rows = [
        (share.cause, duration(share.seconds), f"{share.part:.1%}", "█" * round(share.part * 30), share.note)
        for share in facts.shares
    ]
    table = Table("Where the time went", ("", "", "", "", ""), rows, frozenset({1, 2}), facts.shares_note)
    yield from _table(table)


def _events(facts: Facts) -> Iterator[RenderableType]:
    found, left_out = event_rows(facts.attempts, routine=ROUTINE_ROWS)
    if not found:
        return
    grid = Grid(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    for heading in ("", "time", "step", "event", "details"):
        grid.add_column(
            heading, justify="right" if heading == "step" else "left", overflow="fold", no_wrap=heading == "time"
        )
    for mood, event in found:
        step = "" if event.step is None else f"{event.step:,}"
        name = Text(event.name.replace("_", " "), style=MOODS[mood])
        grid.add_row("", moment(event.time), step, name, Text(details(event)))
    yield _heading("Events")
    yield grid
    if left_out:
        yield Text(f"  {left_out:,} earlier saves, evaluations and the like left out.", style="dim")
