"""Durations, counts, sizes, dates and rows of cells as text; escaping of untrusted text."""

import sys
import unicodedata
from collections.abc import Collection, Iterator, Mapping, Sequence
from datetime import UTC, datetime


def say(line: str) -> None:
    """Prints a line for the user, on stderr."""
    print(f"megajax: {line}", file=sys.stderr, flush=True)


def duration(seconds: float) -> str:
    """Seconds as "3.2 s", "40 s", "12m05s", "3h07m" or "2d04h"."""
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    total = round(seconds)
    if total < 60:
        return f"{total} s"
    if total < 3600:
        return f"{total // 60}m{total % 60:02d}s"
    if total < 86400:
        return f"{total // 3600}h{total % 3600 // 60:02d}m"
    return f"{total // 86400}d{total % 86400 // 3600:02d}h"


def count(number: float) -> str:
    """A count in at most six characters: "9,999", "124.4M", "1.30T"; three or four significant digits."""
    if abs(number) < 10_000:
        return f"{number:,.0f}"
    scaled = float(number)
    for suffix in "kMBTPE":
        scaled /= 1000
        if abs(scaled) < 999.95 or suffix == "E":
            break
    return f"{scaled:.2f}{suffix}" if abs(scaled) < 10 else f"{scaled:.1f}{suffix}"


def moment(time: float) -> str:
    """Seconds since 1970 as a date and time in UTC; "?" if out of range."""
    try:
        return datetime.fromtimestamp(time, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    except (OverflowError, ValueError, OSError):
        return "?"


def skipped_rows(splits: Mapping[str, Mapping[str, int]]) -> str:
    """Split -> reason -> skipped rows, as "train: 3 no answer, 1 unknown role; valid: 1 no answer"."""
    reasons_by_split = {
        split: ", ".join(f"{n:,} {reason}" for reason, n in why.items()) for split, why in splits.items()
    }
    return "; ".join(f"{split}: {reasons}" for split, reasons in reasons_by_split.items())


def byte_size(number: float) -> str:
    """Bytes as "512 B", "1.5 KiB", "12.0 MiB", "326.0 GiB"."""
    if number < 1024:
        return f"{number:.0f} B"
    for unit in ("KiB", "MiB", "GiB", "TiB"):
        number /= 1024
        if number < 1023.95 or unit == "TiB":
            break
    return f"{number:,.1f} {unit}"


def aligned(rows: Sequence[Sequence[str]], text: Collection[int] | None = None) -> Iterator[str]:
    """Rows as lines with aligned columns. text: columns that are flush left; None: all columns."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = (
            cell.ljust(width) if text is None or column in text else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        yield "  ".join(cells).rstrip()


_INVISIBLE = frozenset(("Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"))
"""Unicode categories: controls, formatting (with overrides of the direction), surrogates, unassigned, separators."""


def visible(text: str) -> str:
    """Text with control characters escaped, for example as "\\x1b": it can't move a cursor or end a line of a log.

    Newlines, tabs, and the joiners of scripts and emoji are kept.
    """
    allowed = "\n\t\N{ZERO WIDTH NON-JOINER}\N{ZERO WIDTH JOINER}"
    return "".join(
        character.encode("unicode_escape").decode("ascii")
        if unicodedata.category(character) in _INVISIBLE and character not in allowed
        else character
        for character in text
    )
