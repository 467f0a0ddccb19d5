"""Line charts as SVG: small, self-contained, faithful to spikes and gaps however long the run.

Colours are CSS variables of the page, so that a chart is light or dark with it. P: points of a series.
"""

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape

import numpy as np

LEFT, RIGHT, TOP, BOTTOM = 62, 14, 12, 26
"""Room around the plot for ticks, in units of the picture."""

LOG_FROM = 50.0
"""Largest over smallest value above which an axis is logarithmic."""

LOG_REACH = 1e6
"""Largest over smallest value of a logarithmic axis; what is smaller is drawn at its lower edge."""

MOST_DOTS = 60
"""Points of a curve that are drawn as dots."""


@dataclass(frozen=True, slots=True)
class Series:
    """A curve."""

    name: str
    x: np.ndarray
    """[P], ascending."""
    y: np.ndarray
    """float64 [P]; nan leaves a gap."""
    color: int = 0
    """Of the page's palette."""
    style: str = "line"
    """line; faint, for raw values under a mean; dots, joined by a line."""


@dataclass(frozen=True, slots=True)
class Mark:
    """Something that happened at a step: a vertical line or, for what happens often, a tick at the lower edge."""

    x: float
    mood: str
    """resume, good, warning, bad or plain."""
    text: str
    line: bool = True


@dataclass(frozen=True, kw_only=True, slots=True)
class Chart:
    """What `draw` draws."""

    title: str
    series: Sequence[Series]
    unit: str = ""
    width: int = 560
    height: int = 230
    marks: Sequence[Mark] = ()
    broken: Sequence[tuple[int, str]] = ()
    """Steps whose value was not finite, and what it was: crosses at the upper edge."""
    percent: bool = False
    """Values are shares."""
    linear: bool = False
    """Never logarithmic."""
    first: float = 0.0
    last: float = 1.0
    """Ends of the x axis."""


@dataclass(frozen=True, slots=True)
class _Scale:
    """Values to places on the picture."""

    low: float
    high: float
    begin: float
    end: float
    logarithmic: bool = False

    def __call__(self, value: np.ndarray | float) -> np.ndarray:
        value, low, high = (
            np.log10(np.maximum(v, self.low)) if self.logarithmic else np.asarray(v, np.float64)
            for v in (value, self.low, self.high)
        )
        return self.begin + (value - low) / (high - low) * (self.end - self.begin)


def draw(chart: Chart) -> str:
    """The chart as an <svg> with its points as JSON for the page's script."""
    right, lower = chart.width - RIGHT, chart.height - BOTTOM
    x = _Scale(chart.first, max(chart.last, chart.first + 1), LEFT, right)
    series = [thin(one, chart.first, x.high, right - LEFT) for one in chart.series]
    y = _vertical(chart, lower)
    label = escape(f"{chart.title}{f', {chart.unit}' if chart.unit else ''}")
    parts = [
        f'<svg class="chart" viewBox="0 0 {chart.width} {chart.height}" role="img" aria-label="{label}">',
        *_grid(chart, x, y, lower, right),
        *_marks(chart.marks, x, lower),
        *(piece for one in series for piece in _curve(one, x, y)),
        *_crosses(chart.broken, x),
        f'<line class="cursor" x1="0" x2="0" y1="{TOP}" y2="{lower}"/>',
        "</svg>",
    ]
    data = {
        "left": LEFT,
        "right": right,
        "width": chart.width,
        "first": x.low,
        "last": x.high,
        "percent": chart.percent,
        "series": [
            {"name": one.name, "color": one.color, "x": _short(one.x), "y": _short(one.y)}
            for one in series
            if len(one.x)
        ],
        "broken": [[int(step), kind] for step, kind in chart.broken[:1000]],
        "marks": [[mark.x, mark.text] for mark in chart.marks if mark.line][:1000],
    }
    return "".join(parts) + f'<script type="application/json">{json.dumps(data).replace("<", "&lt;")}</script>'


def thin(series: Series, first: float, last: float, pixels: int) -> Series:
    """At most four points for each pixel column: its first, smallest, largest and last, so that no spike is lost.

    A column of nothing but nan keeps one of them, and so stays a gap.
    """
    if len(series.x) <= 2 * pixels:
        return series
    column = np.minimum((series.x - first) / (last - first) * pixels, pixels - 1).astype(np.int64)
    starts = np.flatnonzero(np.append(True, np.diff(column) > 0))
    finite = np.isfinite(series.y)
    low, high = np.where(finite, series.y, np.inf), np.where(finite, series.y, -np.inf)
    group = np.cumsum(np.append(True, np.diff(column) > 0)) - 1
    least, most = np.minimum.reduceat(low, starts), np.maximum.reduceat(high, starts)
    counts = np.bincount(group[finite], minlength=len(starts))
    extremes = finite & ((series.y == least[group]) | (series.y == most[group]))
    # Of equal extremes the first of each column is enough.
    keep = np.zeros(len(series.x), bool)
    for value in (least, most):
        places = np.flatnonzero(extremes & (series.y == value[group]))
        keep[places[np.unique(group[places], return_index=True)[1]]] = True
    for order in (np.arange(len(group)), np.arange(len(group))[::-1]):
        places = order[finite[order]]
        keep[places[np.unique(group[places], return_index=True)[1]]] = True
    keep[starts[counts == 0]] = True
    return Series(series.name, series.x[keep], series.y[keep], series.color, series.style)


def logarithmic(chart: Chart) -> bool:
    """Whether its y axis is: where values are above 0 and far apart."""
    values = _values(chart)
    return not chart.linear and values.size > 0 and float(values.max()) > LOG_FROM * float(values.min()) > 0


def _values(chart: Chart) -> np.ndarray:
    return np.concatenate([one.y[np.isfinite(one.y)] for one in chart.series] or [np.zeros(0)])


def _vertical(chart: Chart, lower: int) -> _Scale:
    values = _values(chart)
    if not values.size:
        return _Scale(0.0, 1.0, lower, TOP)
    low, high = float(values.min()), float(values.max())
    if logarithmic(chart):
        return _Scale(max(low / 1.15, high / LOG_REACH), high * 1.15, lower, TOP, True)
    if low == high:
        room = abs(low) * 0.1 or 1.0
        return _Scale(low - room, high + room, lower, TOP)
    if 0 <= low < 0.1 * high:
        low = 0.0
    room = 0.06 * (high - low)
    return _Scale(low if low == 0 else low - room, high + room, lower, TOP)


def ticks(low: float, high: float, *, logarithmic: bool = False, most: int = 6) -> list[float]:
    """Round numbers within [low, high]: 1, 2, 5 times powers of ten; for a long logarithmic axis the powers alone."""
    if logarithmic:
        powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
        for digits in ((1, 2, 5), (1, 3), (1,)):
            found = [d * 10.0**power for power in powers for d in digits if low <= d * 10.0**power <= high]
            if len(found) <= most + 1:
                return found
        return found[:: math.ceil(len(found) / most)]
    rough = (high - low) / most
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(d * power for d in (1, 2, 5, 10) if d * power >= rough)
    return [round(k * step, 12) for k in range(math.ceil(low / step), math.floor(high / step) + 1)]


def tick_text(value: float, *, percent: bool = False) -> str:
    """As short as it stays clear: 0, 2.5, 40k, 3e-4, 12%."""
    if percent:
        return f"{value * 100:g}%"
    size = abs(value)
    if value == 0 or 0.01 <= size < 10_000:
        return f"{value:g}"
    for limit, suffix in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if size >= limit and size < 1e15:
            return f"{value / limit:g}{suffix}"
    digits, _, power = f"{value:.2e}".partition("e")
    return f"{digits.rstrip('0').rstrip('.')}e{int(power)}"


def _grid(chart: Chart, x: _Scale, y: _Scale, lower: int, right: int) -> Iterator[str]:
    for value in ticks(y.low, y.high, logarithmic=y.logarithmic, most=max(chart.height // 45, 3)):
        at = float(y(value))
        yield f'<line class="grid" x1="{LEFT}" x2="{right}" y1="{at:.1f}" y2="{at:.1f}"/>'
        text = tick_text(value, percent=chart.percent)
        yield f'<text class="tick" x="{LEFT - 7}" y="{at + 3.5:.1f}" text-anchor="end">{text}</text>'
    for value in ticks(x.low, x.high, most=max(chart.width // 95, 3)):
        if value == int(value):
            at = float(x(value))
            yield f'<line class="grid axis" x1="{at:.1f}" x2="{at:.1f}" y1="{lower}" y2="{lower + 4}"/>'
            yield f'<text class="tick" x="{at:.1f}" y="{lower + 16}" text-anchor="middle">{tick_text(value)}</text>'
    yield f'<line class="grid axis" x1="{LEFT}" x2="{right}" y1="{lower}" y2="{lower}"/>'


def _marks(marks: Sequence[Mark], x: _Scale, lower: int) -> Iterator[str]:
    """One of a kind for each pixel: the many saves of a long run make no longer a file."""
    seen = set()
    for mark in marks:
        at = float(x(mark.x))
        key = round(at), mark.mood, mark.line
        if key in seen or not x.low <= mark.x <= x.high:
            continue
        seen.add(key)
        top = TOP if mark.line else lower - 7
        kind = "mark" if mark.line else "mark small"
        line = f'<line class="{kind} {mark.mood}" x1="{at:.1f}" x2="{at:.1f}" y1="{top}" y2="{lower}">'
        yield f"{line}<title>{escape(mark.text)}</title></line>"


def _curve(series: Series, x: _Scale, y: _Scale) -> Iterator[str]:
    places, finite = np.asarray(x(series.x), np.float64), np.isfinite(series.y)
    if y.logarithmic:
        finite &= series.y > 0
    heights = np.asarray(y(np.where(finite, series.y, 1.0)), np.float64)
    words, alone = [], []
    for index in np.flatnonzero(finite):
        first = index == 0 or not finite[index - 1]
        words.append(f"{'M' if first else 'L'}{places[index]:.1f} {heights[index]:.1f}")
        if first and (index + 1 == len(finite) or not finite[index + 1]):
            alone.append(index)
    color = f"c{series.color}"
    if len(words) > 1:
        yield f'<path class="curve {series.style} {color}" d="{"".join(words)}"/>'
    few = len(words) <= MOST_DOTS and series.style != "faint"
    for index in np.flatnonzero(finite) if few else alone:
        radius = 3 if series.style == "dots" else 2
        yield f'<circle class="dot {color}" cx="{places[index]:.1f}" cy="{heights[index]:.1f}" r="{radius}"/>'


def _crosses(broken: Sequence[tuple[int, str]], x: _Scale) -> Iterator[str]:
    seen = set()
    for step, kind in broken:
        at = float(x(step))
        if round(at) not in seen:
            seen.add(round(at))
            path = f'<path class="cross" d="M{at - 4:.1f} {TOP}l8 8m0 -8l-8 8">'
            yield f"{path}<title>step {step:,}: {escape(kind)}</title></path>"


def _short(values: np.ndarray) -> list[float | int | None]:
    return [
        None if value != value or abs(value) == math.inf else float(f"{value:.6g}") if value % 1 else int(value)
        for value in values.tolist()
    ]
