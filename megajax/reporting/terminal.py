"""The report as text for a terminal or a file."""

from collections.abc import Iterator, Sequence

import numpy as np
from rich.console import Console
from rich.table import Table as Grid
from rich.text import Text

from megajax.charts import LineChart, tick_text
from megajax.reporting.run_summary import RunSummary, Table

STYLES = {"good": "green", "warning": "yellow", "bad": "red", "plain": "default"}
BLOCKS = " ▁▂▃▄▅▆▇█"
WIDTH = 60
"""Characters of a curve."""


def show(summary: RunSummary, charts: Sequence[LineChart], console: Console) -> None:
    """Print everything."""
    console.print(headline(summary))
    for fault in summary.faults:
        console.print(Text(f"! {fault}", style="yellow"))
    for table in (Table("Figures", (), summary.figures), _curves(charts), *summary.tables):
        if table.rows:
            _print(table, console)


def headline(summary: RunSummary) -> Text:
    """Name and verdict in one line."""
    return Text.assemble((summary.name, "bold"), "  ", (summary.verdict, STYLES[summary.mood]))


def _print(table: Table, console: Console) -> None:
    named = bool(table.headings)
    grid = Grid(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim", show_header=named)
    grid.add_column("")
    for place, heading in enumerate(table.headings or [""] * len(table.rows[0])):
        justify = "right" if place in table.numbers else "left"
        first = place == 0
        grid.add_column(heading, justify=justify, overflow="fold", no_wrap=first, style="dim" if first else "")
    for place, row in enumerate(table.rows):
        mood = table.moods[place] if table.moods else "plain"
        grid.add_row("", *map(Text, row), style=STYLES[mood])
    console.print(Text(f"\n{table.title}", style="bold cyan"))
    console.print(grid)
    if table.note:
        console.print(Text(f"  {table.note}", style="dim"))


def _curves(charts: Sequence[LineChart]) -> Table:
    rows = list(_curve_rows(charts))
    headings = ("", "min", "max", f"step 1 to {charts[0].last:,.0f}" if charts else "")
    return Table("Curves", headings, rows, frozenset({1, 2}))


def _curve_rows(charts: Sequence[LineChart]) -> Iterator[tuple[str, str, str, str]]:
    for chart in charts:
        for series in chart.series:
            x, y = np.asarray(series.x), np.asarray(series.y)
            finite = y[np.isfinite(y)]
            if series.style != "faint" and finite.size:
                ends = (float(f"{value:.4g}") for value in (finite.min(), finite.max()))
                low, high = (tick_text(value, percent=chart.percent) for value in ends)
                name = chart.title if len(chart.series) == 1 else f"{chart.title}: {series.name}"
                yield name, low, high, sparkline(x, y, chart.first, chart.last)


def sparkline(x: np.ndarray, y: np.ndarray, first: float, last: float) -> str:
    """The mean of each column as a block; x where a column has no finite value, blank where it has none at all."""
    column = np.clip(((x - first) / max(last - first, 1) * WIDTH).astype(int), 0, WIDTH - 1)
    finite = np.isfinite(y)
    low, high = float(y[finite].min()), float(y[finite].max())
    text = []
    for place in range(WIDTH):
        values = y[(column == place) & finite]
        if values.size:
            height = (float(values.mean()) - low) / (high - low) if high > low else 0.5
            text.append(BLOCKS[1 + round(height * (len(BLOCKS) - 2))])
        else:
            text.append("x" if (column == place).any() else " ")
    return "".join(text)
