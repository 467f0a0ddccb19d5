"""HTML pages that need neither the network nor other files: the frame, cards and tables, in the style of pages.css."""

from collections.abc import Collection, Iterable, Sequence
from html import escape
from itertools import zip_longest
from pathlib import Path


def page(title: str, body: Iterable[str], *, style: str = "", script: str = "") -> str:
    """A self-contained HTML page: no network, no other files. style: CSS in addition to pages.css."""
    common = Path(__file__).with_suffix(".css").read_text(encoding="utf-8")
    parts = [
        '<!doctype html><html lang="en"><head><meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        '<meta name="color-scheme" content="light dark">',
        f"<title>{escape(title)}</title><style>{common}{style}</style></head><body><main>",
        *body,
        f"</main>{f'<script>{script}</script>' if script else ''}</body></html>\n",
    ]
    return "\n".join(parts)


def header(title: str, remark: str = "", verdict: tuple[str, str] | None = None) -> str:
    """The title of a page. verdict: its status (good, warning or bad) and text."""
    frame = "" if verdict is None else f'<span class="verdict {verdict[0]}">{escape(verdict[1])}</span> '
    return f"<header><h1>{escape(title)}</h1><p>{frame}{escape(remark)}</p></header>"


def figures(rows: Sequence[tuple[str, str, str]]) -> str:
    """Cards with name, value and remark of the most important numbers."""
    cards = (f"<div><span>{escape(n)}</span><b>{escape(v)}</b><span>{escape(r)}</span></div>" for n, v, r in rows)
    return f'<div class="figures">{"".join(cards)}</div>' if rows else ""


def section(title: str, body: str, remark: str = "") -> str:
    """A card with a heading. body: HTML."""
    small = f"<small>{escape(remark)}</small>" if remark else ""
    return f"<section><h2>{escape(title)}{small}</h2>{body}</section>"


def table(
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
