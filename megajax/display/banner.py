"""Sections of facts and tables as aligned text, or as a framed box on a terminal."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import groupby

from rich.console import RenderableType
from rich.panel import Panel
from rich.table import Table as Grid
from rich.text import Text

from megajax.display.text import aligned

type Section = tuple[str, Sequence[tuple[str, str]]]
"""A title and its (name, value) rows; a value may have several lines."""


@dataclass(frozen=True, slots=True)
class Table:
    """Rows of text below headings."""

    title: str
    headings: Sequence[str]
    rows: Sequence[Sequence[str]]
    text: Collection[int] = (0,)
    """Columns that are text; the others are numbers and flush right."""

    def lines(self) -> list[str]:
        """The title, unless it is empty, and all rows."""
        return [self.title] * bool(self.title) + [*aligned([self.headings, *self.rows], self.text)]


@dataclass(frozen=True, slots=True)
class Report:
    """Sections and tables below a title, to be printed."""

    title: str
    blocks: Sequence[Section | Table]

    def text(self) -> str:
        lines = [self.title]
        for _, group in groupby(self.blocks, lambda block: isinstance(block, Table)):
            blocks = list(group)
            lines += [line for block in blocks if isinstance(block, Table) for line in ("", *block.lines())]
            if sections := [block for block in blocks if not isinstance(block, Table)]:
                lines += [""] * (len(lines) > 1) + plain("", sections).splitlines()[1:]
        return "\n".join(lines)


def plain(title: str, sections: Sequence[Section]) -> str:
    """Aligned text without colours or box characters, for log files."""
    width = max((len(name) for _, rows in sections for name, _ in rows), default=0)
    lines = [title]
    for heading, rows in sections:
        lines.append(f"  {heading}")
        for name, value in rows:
            for index, line in enumerate(str(value).splitlines() or [""]):
                lines.append(f"    {'' if index else name:<{width}}  {line}".rstrip())
    return "\n".join(lines)


def box(title: str, sections: Sequence[Section]) -> RenderableType:
    """For a terminal: a frame with a column of names and one of values."""
    table = Grid.grid(padding=(0, 2))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    for index, (heading, rows) in enumerate(sections):
        if index:
            table.add_row()
        table.add_row(Text(heading, style="bold cyan"))
        for name, value in rows:
            table.add_row(Text(f"  {name}"), Text(str(value)))
    return Panel(table, title=Text(title, style="bold"), title_align="left", expand=False, border_style="cyan")
