"""Sections of facts, as aligned text or as a table on a terminal; the totals of a run."""

from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from megajax.metrics import text

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


@dataclass(frozen=True, kw_only=True, slots=True)
class Totals:
    """Totals of a run; None where they don't apply."""

    steps: int
    """Steps done, including earlier attempts."""
    steps_here: int
    """Steps of this attempt."""
    tokens: int
    """Tokens of this attempt."""
    wall_seconds: float
    """Wall time of this attempt, including evaluation and saving."""
    train_loss: float | None = None
    """Loss of the last step."""
    validation_loss: float | None = None
    """Loss of the last evaluation."""
    peak_memory: str | None = None
    """Largest memory in use on a device, as text."""
    checkpoint: str | None = None
    """Folder of the last checkpoint."""
    files: Sequence[str] = ()
    """Other files to look at."""

    def sections(self) -> list[Section]:
        """The totals as sections for `plain` or `box`."""
        speed = text.count(self.tokens / self.wall_seconds) if self.wall_seconds > 0 else "?"
        here = "" if self.steps_here == self.steps else f" ({self.steps_here:,} in this attempt)"
        work = [
            ("steps", f"{self.steps:,}{here}"),
            ("tokens", text.count(self.tokens)),
            ("wall time", text.duration(self.wall_seconds)),
            ("tokens/s, all included", speed),
        ]
        if self.peak_memory:
            work.append(("peak memory of a device", self.peak_memory))
        losses = [
            (name, f"{loss:.4f}")
            for name, loss in (("train loss", self.train_loss), ("validation loss", self.validation_loss))
            if loss is not None
        ]
        kept = [("checkpoint", self.checkpoint)] if self.checkpoint else []
        files = [("files", "\n".join(self.files))] if self.files else []
        sections: list[Section] = [("work", work), ("loss", losses), ("kept", kept + files)]
        return [section for section in sections if section[1]]
