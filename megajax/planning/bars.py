"""Stacked bars and curves as SVG, in the classes of the plan page's style."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape


@dataclass(frozen=True, slots=True)
class Part:
    """Of a bar."""

    name: str
    size: float
    text: str
    """How its size is written."""
    color: str
    """Class of the style."""


def bar(parts: Sequence[Part], *, limit: tuple[float, str] | None = None, width: int = 1180) -> str:
    """A stacked bar with a legend below it. limit: a place to mark, and what it is called."""
    whole = sum(part.size for part in parts)
    if limit is not None:
        whole = max(whole, limit[0])
    unit, x, drawn, made = (width - 4) / whole, 2.0, 26, []
    for part in parts:
        wide = part.size * unit
        made.append(f'<rect class="{part.color}" x="{x:.1f}" y="{drawn}" width="{wide:.1f}" height="38">'
                    f"<title>{escape(f'{part.name}: {part.text}')}</title></rect>")  # fmt: skip
        if wide > 8 * len(part.text) + 6:
            where = f'x="{x + wide / 2:.1f}" y="{drawn + 24}" text-anchor="middle"'
            made.append(f'<text class="inside on-{part.color.split()[0]}" {where}>{escape(part.text)}</text>')
        x += wide
    if limit is not None:
        place = 2 + limit[0] * unit
        made.append(f'<line class="limit" x1="{place:.1f}" x2="{place:.1f}" y1="18" y2="72"/>')
        anchor = "end" if place > width / 2 else "start"
        made.append(f'<text class="tick" x="{place:.1f}" y="13" text-anchor="{anchor}">{escape(limit[1])}</text>')
    svg = f'<svg viewBox="0 0 {width} 76" role="img" aria-label="bar">{"".join(made)}</svg>'
    return svg + legend(parts)


def legend(parts: Sequence[Part]) -> str:
    """Names, sizes and colours."""
    entries = "".join(
        f'<span><i class="key {part.color}"></i>{escape(part.name)} <b>{escape(part.text)}</b></span>' for part in parts
    )
    return f'<div class="legend">{entries}</div>'


@dataclass(frozen=True, slots=True)
class Curve:
    """Points over a logarithmic x axis."""

    name: str
    x: tuple[float, ...]
    y: tuple[float, ...]


def curves(given: Sequence[Curve], *, unit: str, percent: bool = False, width: int = 580, height: int = 260) -> str:
    """Curves over powers of two; y is logarithmic unless it is in percent, and then from 0."""
    left, right, top, bottom = 70, 28, 12, 34
    xs = sorted({x for curve in given for x in curve.x})
    ys = [y for curve in given for y in curve.y]
    low, high = (0.0, max(ys) * 1.1) if percent else (math.log10(min(ys)) - 0.1, math.log10(max(ys)) + 0.1)
    first, last = math.log2(xs[0]), math.log2(xs[-1])

    def at(x: float, y: float) -> tuple[float, float]:
        value = y if percent else math.log10(y)
        across = (math.log2(x) - first) / ((last - first) or 1)
        up = (value - low) / ((high - low) or 1)
        return left + across * (width - left - right), height - bottom - up * (height - top - bottom)

    made = [f'<svg viewBox="0 0 {width} {height}" role="img" aria-label="{escape(unit)}">']
    marks = [n * 0.1 for n in range(10) if n * 0.1 <= high] if percent else [
        10.0**n for n in range(math.ceil(low), math.floor(high) + 1)
    ]  # fmt: skip
    for mark in marks:
        _, y = at(xs[0], mark)
        text = f"{mark:.0%}" if percent else f"{mark:,.0f}"
        made.append(f'<line class="grid" x1="{left}" x2="{width - right}" y1="{y:.1f}" y2="{y:.1f}"/>')
        made.append(f'<text class="tick" x="{left - 6}" y="{y + 4:.1f}" text-anchor="end">{text}</text>')
    for x in xs[:: max(1, len(xs) // 9)]:
        place, _ = at(x, ys[0])
        made.append(f'<text class="tick" x="{place:.1f}" y="{height - 14}" text-anchor="middle">{x:,.0f}</text>')
    for place, curve in enumerate(given):
        points = " ".join("{:.1f},{:.1f}".format(*at(x, y)) for x, y in zip(curve.x, curve.y, strict=True))
        made.append(f'<polyline class="curve k{place}" points="{points}"/>')
        for x, y in zip(curve.x, curve.y, strict=True):
            across, down = at(x, y)
            told = escape(f"{curve.name}, {x:,.0f}: {f'{y:.1%}' if percent else f'{y:,.0f}'}")
            made.append(
                f'<circle class="k{place}" cx="{across:.1f}" cy="{down:.1f}" r="3"><title>{told}</title></circle>'
            )
    keys = [Part(curve.name, 0, "", f"k{place}") for place, curve in enumerate(given)]
    return "".join([*made, "</svg>"]) + legend(keys)
