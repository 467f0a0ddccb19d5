"""A search's result on the terminal."""

import sys
from collections.abc import Sequence
from io import StringIO
from typing import TextIO

import rich.console
from rich.table import Table

from megajax.metrics.text import duration
from megajax.planning.search.ranking import Result, Row
from megajax.planning.search.reasons import digits

LEFT_OUT = (
    "context and expert parallelism are left out: the config's rules refuse them in this version; batch.global_size "
    "and all that changes results stay"
)


def show(found: Result, lines: Sequence[str], file: TextIO | None = None) -> None:
    """Print it. lines: what to say at the end, of commands and files."""
    file = file or sys.stdout
    drawn = StringIO()
    rich.console.Console(file=drawn, width=170, highlight=False, color_system=None).print(table(found))
    print(heading(found), file=file)
    print("\n".join(line.rstrip() for line in drawn.getvalue().splitlines()), file=file)
    for name, told in (("why", reasons(found)), ("not chosen", rejections(found)), ("to use it", lines)):
        print(f"\n  {name}", *(f"    {line}" for line in told), sep="\n", file=file)


def heading(found: Result) -> str:
    """What was searched, how much of it, how long."""
    task, tally = found.task, found.tally
    fixed = ", ".join(f"{name}={value}" for name, value in task.space.fixed.items())
    compiled = sum(row.compiled is not None for row in found.rows) + len(found.refuted)
    told = (
        f"{tally.total:,} layouts in {found.seconds:.1f} s: {tally.refused:,} against the config's rules, "
        f"{tally.too_large:,} too large, {tally.estimated:,} timed"
    )
    told += f"; {compiled} compiled in {duration(found.compile_seconds)}" if compiled else "; none compiled"
    lines = [f"search for {task.space.devices} x {task.device.name}", f"  {told}"]
    lines += [f"  given and kept: {fixed}"] if fixed else []
    return "\n".join([*lines, f"  {LEFT_OUT}", ""])


COLUMNS = (
    "layout",
    "data sharding",
    "sequence",
    "micro",
    "recompute",
    "step, s",
    "tokens/s/GPU",
    "MFU",
    "peak GiB",
    "bubble",
    "exposed",
    "by",
)


def cells(row: Row) -> list[str]:
    """Of a row, by COLUMNS."""
    choice = row.entry.choice
    offload = f", {choice.offload:.0%} of moments in host memory" if choice.offload else ""
    return [
        choice.layout,
        choice.data_sharding + offload,
        "yes" if choice.sequence else "no",
        str(choice.micro_size),
        choice.recomputing,
        f"{row.step_seconds:.{digits(row.step_seconds)}f}",
        f"{row.tokens:,.0f}",
        f"{row.mfu:.1%}",
        f"{row.peak_gib:.1f}",
        f"{row.bubble:.1%}",
        f"{row.exposed:.1%}",
        "compiler" if row.compiled else "formula",
    ]


def table(found: Result) -> Table:
    """The best, one line each."""
    made = Table(box=None, pad_edge=False)
    made.add_column("   ", justify="right")
    for place, name in enumerate(COLUMNS):
        made.add_column(name, justify="right" if 5 <= place <= 10 or name == "micro" else "left")
    for place, row in enumerate(found.rows, 1):
        made.add_row(str(place), *cells(row))
    return made


def reasons(found: Result) -> list[str]:
    """A line for each row."""
    return [f"{place}  {row.why}" for place, row in enumerate(found.rows, 1)]


def rejections(found: Result) -> list[str]:
    """Well-known choices, and what the compiler refuted."""
    lines = [f"{verdict.name}: {verdict.text}" for verdict in found.verdicts]
    usable = found.task.device.usable_gib
    for choice, one in found.refuted:
        why = one.error or f"does not fit: {one.peak_gib:.1f} GiB by the compiler, usable are {usable:.1f}"
        lines.append(f"{choice.layout}, {choice.details}: {why}")
    return lines
