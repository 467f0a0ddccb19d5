"""Sections of facts, as aligned text or as a table on a terminal."""

from collections.abc import Sequence

from rich.console import RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

type Section = tuple[str, Sequence[tuple[str, str]]]
"""A title and its (name, value) rows; a value may have several lines."""


def plain(title: str, sections: Sequence[Section]) -> str:
    """Aligned text without colours or box characters, for log files."""
    width = max((len(name) for _, rows in sections for name, _ in rows), default=0)
    lines = [title]
    for heading, rows in sections:
        lines.append(f"  {heading}")
        for name, value in rows:
            first, *others = str(value).splitlines() or [""]
            lines.append(f"    {name:<{width}}  {first}".rstrip())
            lines += [f"    {'':<{width}}  {other}".rstrip() for other in others]
    return "\n".join(lines)


def box(title: str, sections: Sequence[Section]) -> RenderableType:
    """For a terminal: a frame with a column of names and one of values."""
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    for index, (heading, rows) in enumerate(sections):
        if index:
            table.add_row()
        table.add_row(Text(heading, style="bold cyan"))
        for name, value in rows:
            table.add_row(Text(f"  {name}"), Text(str(value)))
    return Panel(table, title=Text(title, style="bold"), title_align="left", expand=False, border_style="cyan")
