"""Charts: lines, stacked bars and timelines as SVG for HTML pages; lines, timelines and matrices as PNG by matplotlib.

Colours in SVG are CSS classes of the page, so that charts follow the page's light or dark scheme. P: points.
"""

import importlib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from html import escape
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol


class Values(Protocol):
    """Numbers [P]: a sequence or a numpy array; this module does not import numpy."""

    def __len__(self) -> int: ...
    def __iter__(self) -> Iterator[Any]: ...
    def __getitem__(self, place: int, /) -> Any: ...


LEFT, RIGHT, TOP, BOTTOM = 70, 14, 12, 26
"""Margins around a line chart, in units of its viewBox."""

LOG_RATIO = 50.0
"""With scale="auto", an axis is logarithmic if the ratio of the largest to the smallest value exceeds this."""

LOG_RANGE = 1e6
"""Maximum ratio of values on a logarithmic axis; smaller values are drawn at its lower edge."""

MAX_DOTS = 60
"""Curves with at most this number of points show each as a dot."""

PNG_COLORS = ("tab:blue", "tab:orange", "tab:green", "tab:purple", "tab:red", "tab:olive")


# Lines


@dataclass(frozen=True, slots=True)
class Series:
    """One curve."""

    name: str
    x: Values
    """[P], ascending."""
    y: Values
    """[P]; nan leaves a gap."""
    color: int = 0
    """Index in the palette."""
    style: Literal["line", "faint", "dots"] = "line"
    """faint: raw values behind their running mean. dots: a line with a dot at every point."""


@dataclass(frozen=True, slots=True)
class EventMark:
    """An event at some x: a vertical line, or a short tick at the lower edge."""

    x: float
    kind: str
    """CSS class: resume, good, warning, bad, plain, save or evaluate."""
    text: str
    line: bool = True


@dataclass(frozen=True, kw_only=True, slots=True)
class LineChart:
    """Curves over a common x axis, from `first` to `last`."""

    title: str
    series: Sequence[Series]
    unit: str = ""
    x_label: str = ""
    width: int = 560
    height: int = 230
    marks: Sequence[EventMark] = ()
    crosses: Sequence[tuple[float, str]] = ()
    """x and text of values that can't be drawn, such as a non-finite loss: crosses at the upper edge."""
    level: tuple[float, str] | None = None
    """A horizontal reference line and its name (PNG only)."""
    percent: bool = False
    """Whether values are fractions that are shown as percentages."""
    scale: Literal["auto", "linear", "log"] = "auto"
    log_x: bool = False
    """Whether the x axis is logarithmic with ticks at the points, such as for numbers of devices."""
    first: float = 0.0
    last: float = 1.0

    @property
    def logarithmic(self) -> bool:
        """Whether the y axis is logarithmic."""
        values = [value for series in self.series for value in _finite(series.y)]
        if self.scale != "auto" or not values:
            return self.scale == "log"
        return max(values) > LOG_RATIO * min(values) > 0

    def svg(self) -> str:
        """The chart as an <svg>, of the thinned series; every dot, mark and cross has a tooltip."""
        if any(len(series.x) > 4 * self.width for series in self.series):
            return self.thinned().svg()
        right_edge, lower = self.width - RIGHT, self.height - BOTTOM
        x, y = self._x_axis(), self._y_axis()
        label = escape(f"{self.title}{f', {self.unit}' if self.unit else ''}")
        parts = [
            f'<svg class="chart" viewBox="0 0 {self.width} {self.height}" role="img" aria-label="{label}">',
            *self._grid(x, y, lower, right_edge),
            *_marks(self.marks, x, lower),
            *(piece for series in self.series for piece in self._curve(series, x, y)),
            *_crosses(self.crosses, x),
            f'<line class="cursor" x1="0" x2="0" y1="{TOP}" y2="{lower}"/>',
            "</svg>",
        ]
        return "".join(parts)

    def data(self) -> dict[str, Any]:
        """The drawn values as JSON values, for a page's script."""
        x = self._x_axis()
        return {
            **{"left": LEFT, "right": self.width - RIGHT, "width": self.width, "first": x.low, "last": x.high},
            "percent": self.percent,
            "series": [
                {"name": line.name, "color": line.color, "x": [*map(_short, line.x)], "y": [*map(_short, line.y)]}
                for line in self.series
                if len(line.x)
            ],
            "crosses": [[int(at), text] for at, text in self.crosses[:1000]],
            "marks": [[mark.x, mark.text] for mark in self.marks if mark.line][:1000],
        }

    def plot(self, axes: Any) -> None:
        """Draw on matplotlib axes."""
        for series in self.series:
            faint, dots = series.style == "faint", series.style == "dots"
            axes.plot(
                series.x,
                series.y,
                color=PNG_COLORS[series.color % len(PNG_COLORS)],
                linewidth=0.7 if faint else 1.2 if dots else 1.8,
                alpha=0.45 if faint else 1.0,
                marker="o" if dots else "." if len(series.x) < MAX_DOTS // 2 else None,
                markersize=4 if dots else None,
                label=series.name,
            )
        if self.level is not None:
            axes.axhline(self.level[0], color="gray", linestyle=":", linewidth=1.2, label=self.level[1])
        axes.set_title(self.title)
        axes.set_xlabel(self.x_label)
        axes.set_ylabel(self.unit)
        axes.margins(x=0.01)
        axes.grid(alpha=0.25)
        axes.legend(frameon=False)

    def thinned(self) -> "LineChart":
        """A copy with at most four points per pixel."""
        x = self._x_axis()
        return replace(self, series=[thin(series, x.low, x.high, int(x.end - x.begin)) for series in self.series])

    def _x_axis(self) -> "_Axis":
        high = self.last if self.log_x and self.last > self.first else max(self.last, self.first + 1)
        return _Axis(self.first, high, LEFT, self.width - RIGHT, self.log_x)

    def _y_axis(self) -> "_Axis":
        lower = self.height - BOTTOM
        values = [value for series in self.series for value in _finite(series.y)] or [0.0, 1.0]
        low, high = min(values), max(values)
        if self.logarithmic:
            return _Axis(max(low / 1.15, high / LOG_RANGE), high * 1.15, lower, TOP, True)
        margin = 0.06 * (high - low) or abs(low) * 0.1 or 1.0
        if 0 <= low < 0.1 * high:
            return _Axis(0.0, high + margin, lower, TOP)
        return _Axis(low - margin, high + margin, lower, TOP)

    def _grid(self, x: "_Axis", y: "_Axis", lower: int, right_edge: int) -> Iterator[str]:
        for value in ticks(y.low, y.high, logarithmic=y.logarithmic, most=max(self.height // 45, 3)):
            at = y(value)
            yield f'<line class="grid" x1="{LEFT}" x2="{right_edge}" y1="{at:.1f}" y2="{at:.1f}"/>'
            yield _text(tick_text(value, percent=self.percent), LEFT - 7, at + 3.5, "end")
        for value in self._x_ticks(x):
            at = x(value)
            yield f'<line class="grid axis" x1="{at:.1f}" x2="{at:.1f}" y1="{lower}" y2="{lower + 4}"/>'
            yield _text(tick_text(value), at, lower + 16)
        yield f'<line class="grid axis" x1="{LEFT}" x2="{right_edge}" y1="{lower}" y2="{lower}"/>'

    def _x_ticks(self, x: "_Axis") -> list[float]:
        if self.log_x:
            points = sorted({value for series in self.series for value in series.x})
            return points[:: max(1, len(points) // 9)]
        return [value for value in ticks(x.low, x.high, most=max(self.width // 95, 3)) if value == int(value)]

    def _curve(self, series: Series, x: "_Axis", y: "_Axis") -> Iterator[str]:
        drawable = [math.isfinite(value) and (value > 0 or not y.logarithmic) for value in series.y]
        shows_dots = sum(drawable) <= MAX_DOTS and series.style != "faint"
        path, dots = [], []
        for place, (at, value) in enumerate(zip(series.x, series.y, strict=True)):
            if not drawable[place]:
                continue
            starts_segment = place == 0 or not drawable[place - 1]
            ends_segment = place + 1 == len(drawable) or not drawable[place + 1]
            path.append(f"{'M' if starts_segment else 'L'}{x(at):.1f} {y(value):.1f}")
            if shows_dots or (starts_segment and ends_segment):
                text = escape(f"{series.name}, {at:,.0f}: {f'{value:.1%}' if self.percent else f'{value:,.5g}'}")
                radius = 3 if series.style == "dots" else 2
                circle = f'<circle class="dot c{series.color}" cx="{x(at):.1f}" cy="{y(value):.1f}" r="{radius}">'
                dots.append(f"{circle}<title>{text}</title></circle>")
        if len(path) > 1:
            yield f'<path class="curve {series.style} c{series.color}" d="{"".join(path)}"/>'
        yield from dots


class _Axis(NamedTuple):
    """Maps values to positions in the picture."""

    low: float
    high: float
    begin: float
    end: float
    logarithmic: bool = False

    def __call__(self, value: float) -> float:
        low, high = self.low, self.high
        if self.logarithmic:
            value, low, high = math.log10(max(value, low)), math.log10(low), math.log10(high)
        return self.begin + (value - low) / ((high - low) or 1.0) * (self.end - self.begin)


def thin(series: Series, first: float, last: float, pixels: int) -> Series:
    """Keep the first, smallest, largest and last point of each pixel column, so that no spike is lost.

    A column with only nan keeps one of them, and so remains a gap.
    """
    if len(series.x) <= 2 * pixels:
        return series
    np = importlib.import_module("numpy")
    x, y = np.asarray(series.x, np.float64), np.asarray(series.y, np.float64)
    column = np.minimum((x - first) / (last - first) * pixels, pixels - 1).astype(np.int64)
    keep = np.zeros(len(x), bool)
    for start, stop in pairwise([0, *(np.flatnonzero(np.diff(column)) + 1).tolist(), len(x)]):
        finite = start + np.flatnonzero(np.isfinite(y[start:stop]))
        if finite.size:
            keep[[finite[0], finite[np.argmin(y[finite])], finite[np.argmax(y[finite])], finite[-1]]] = True
        else:
            keep[start] = True
    return replace(series, x=x[keep].tolist(), y=y[keep].tolist())


def ticks(low: float, high: float, *, logarithmic: bool = False, most: int = 6) -> list[float]:
    """Round numbers within [low, high]: 1, 2, 5 times powers of ten; only the powers on a long logarithmic axis."""
    if not logarithmic:
        rough = (high - low) / most
        power = 10.0 ** math.floor(math.log10(rough))
        step = next(d * power for d in (1, 2, 5, 10) if d * power >= rough)
        return [round(k * step, 12) for k in range(math.ceil(low / step), math.floor(high / step) + 1)]
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    places: list[float] = []
    for digits in ((1, 2, 5), (1, 3), (1,)):
        places = [d * 10.0**power for power in powers for d in digits if low <= d * 10.0**power <= high]
        if len(places) <= most + 1:
            return places
    return places[:: math.ceil(len(places) / most)]


def tick_text(value: float, *, percent: bool = False) -> str:
    """A short text of a number: 0, 2.5, 40k, 3e-4, 12%."""
    if percent:
        return f"{value * 100:g}%"
    size = abs(value)
    if value == 0 or 0.01 <= size < 10_000:
        return f"{value:g}"
    for limit, suffix in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if limit <= size < 1e15:
            return f"{value / limit:g}{suffix}"
    digits, _, power = f"{value:.2e}".partition("e")
    return f"{digits.rstrip('0').rstrip('.')}e{int(power)}"


def _finite(values: Values) -> list[float]:
    return [value for value in map(float, values) if math.isfinite(value)]


def _short(value: float) -> float | int | None:
    if not math.isfinite(value):
        return None
    return float(f"{value:.6g}") if value % 1 else int(value)


def _text(text: str, x: float, y: float, anchor: str = "middle", kind: str = "tick") -> str:
    return f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'


def _marks(marks: Sequence[EventMark], x: _Axis, lower: int, upper: int = TOP) -> Iterator[str]:
    """At most one mark of a kind per pixel, because long runs save many times."""
    drawn_keys = set()
    for mark in marks:
        key = round(x(mark.x)), mark.kind, mark.line
        if key in drawn_keys or not x.low <= mark.x <= x.high:
            continue
        drawn_keys.add(key)
        at, top = f"{x(mark.x):.1f}", upper if mark.line else lower - 7
        line = (
            f'<line class="mark{" small" * (not mark.line)} {mark.kind}" x1="{at}" x2="{at}" y1="{top}" y2="{lower}">'
        )
        yield f"{line}<title>{escape(mark.text)}</title></line>"


def _crosses(crosses: Sequence[tuple[float, str]], x: _Axis) -> Iterator[str]:
    for at, (step, text) in {round(x(step)): (step, text) for step, text in reversed(crosses)}.items():
        path = f'<path class="cross" d="M{at - 4} {TOP}l8 8m0 -8l-8 8">'
        yield f"{path}<title>step {step:,.0f}: {escape(text)}</title></path>"


# Stacked bars


def legend(entries: Iterable[tuple[str, str, str]]) -> str:
    """A legend with one key per (CSS class, name, value as text or "")."""
    keys = "".join(
        f'<span><i class="key {color}"></i>{escape(name)}{f" <b>{escape(text)}</b>" if text else ""}</span>'
        for color, name, text in entries
    )
    return f'<div class="legend">{keys}</div>'


class BarSegment(NamedTuple):
    """A part of a stacked bar."""

    name: str
    size: float
    text: str
    """The size as text."""
    color: str
    """CSS class."""


def stacked_bar(segments: Sequence[BarSegment], *, limit: tuple[float, str] | None = None, width: int = 1180) -> str:
    """A stacked bar as <svg>, with a legend below it. limit: a size to mark, and its name."""
    total = max(sum(part.size for part in segments), limit[0] if limit else 0.0) or 1.0
    unit, at, parts = (width - 4) / total, 2.0, []
    for part in segments:
        wide = part.size * unit
        box = f'<rect class="{part.color}" x="{at:.1f}" y="26" width="{wide:.1f}" height="38">'
        parts.append(f"{box}<title>{escape(f'{part.name}: {part.text}')}</title></rect>")
        if wide > 8 * len(part.text) + 6:
            parts.append(_text(part.text, at + wide / 2, 50, kind=f"inside on-{part.color.split()[0]}"))
        at += wide
    if limit is not None:
        place = 2 + limit[0] * unit
        parts.append(f'<line class="limit" x1="{place:.1f}" x2="{place:.1f}" y1="18" y2="72"/>')
        parts.append(_text(limit[1], place, 13, "end" if place > width / 2 else "start"))
    svg = f'<svg viewBox="0 0 {width} 76" role="img" aria-label="bar">{"".join(parts)}</svg>'
    return svg + legend((part.color, part.name, part.text) for part in segments)


# Timelines


class Box(NamedTuple):
    """A piece of work from `start` to `start + length`."""

    row: int
    start: float
    length: float
    text: str = ""
    """The text on the box (PNG only)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TimelineChart:
    """The work of each row, such as a stage or a device, over time."""

    rows: Sequence[str]
    """Names of the rows."""
    boxes: Mapping[str, Sequence[Box]]
    """CSS class -> its boxes."""
    end: float
    names: Mapping[str, str] = field(default_factory=dict)
    """CSS class -> the tooltip of its boxes; in a PNG, the legend."""
    title: str = ""
    x_label: str = ""
    y_label: str = ""
    breaks: Sequence[tuple[float, str]] = ()
    """x and text of vertical lines, such as for omitted time."""
    marks: Sequence[EventMark] = ()
    """Events, with tooltips (SVG only)."""
    time_text: Callable[[float], str] = tick_text
    """Text of a tick of the time axis."""

    def svg(self, width: int = 1180) -> str:
        """The timeline as an <svg> with one path per class; rows are 26 units high, or 14 if there are many."""
        left_edge, top, is_dense = 74, 26, len(self.rows) > 24
        row = 14 if is_dense else 26
        lower, unit = top + len(self.rows) * row, (width - left_edge - 12) / (self.end or 1.0)
        parts = [
            f'<svg viewBox="0 0 {width} {lower + 30}" role="img" aria-label="{escape(self.title or "timeline")}">',
            f'<rect class="idle" x="{left_edge}" y="{top}" width="{self.end * unit:.1f}" height="{lower - top}"/>',
        ]
        labelled_rows = range(0, len(self.rows), 4 if is_dense else 1)
        parts += [_text(self.rows[place], left_edge - 8, top + (place + 0.62) * row, "end") for place in labelled_rows]
        for color, boxes in self.boxes.items():
            path = "".join(
                f"M{left_edge + box.start * unit:.2f} {top + box.row * row + 1}"
                f"h{box.length * unit:.2f}v{row - 2}h{-box.length * unit:.2f}z"
                for box in boxes
            )
            parts.append(
                f'<path class="{color}" d="{path}"><title>{escape(self.names.get(color, color))}</title></path>'
            )
        for time in ticks(0.0, self.end or 1.0, most=12):
            at = left_edge + time * unit
            parts.append(f'<line class="grid" x1="{at:.1f}" x2="{at:.1f}" y1="{lower}" y2="{lower + 5}"/>')
            parts.append(_text(self.time_text(time), at, lower + 19))
        for time, text in self.breaks:
            at = left_edge + time * unit
            parts.append(f'<line class="break" x1="{at:.1f}" x2="{at:.1f}" y1="{top - 6}" y2="{lower + 4}"/>')
            parts.append(_text(text, at, top - 10, kind="tick strong"))
        parts += _marks(self.marks, _Axis(0.0, self.end or 1.0, left_edge, width - 12), lower + 5, top - 7)
        return "".join([*parts, "</svg>"])

    def plot(self, axes: Any, colors: Mapping[str, Any]) -> None:
        """Draw on matplotlib axes. colors: CSS class -> matplotlib colour."""
        rows = len(self.rows)
        axes.broken_barh([(0, self.end)], (-0.5, rows), facecolor="#ececec", label="idle")
        for name, boxes in self.boxes.items():
            style = {"facecolor": colors[name], "edgecolor": "white", "linewidth": 0.5, "label": self.names.get(name)}
            for row in sorted({box.row for box in boxes}):
                spans = [(box.start, box.length) for box in boxes if box.row == row]
                axes.broken_barh(spans, (row - 0.45, 0.9), **style)
            for box in boxes:
                if box.text:
                    center = box.start + box.length / 2
                    axes.text(center, box.row, box.text, ha="center", va="center", fontsize=6, clip_on=True)
        for time, text in self.breaks:
            axes.axvline(time, color="black", linewidth=0.8, linestyle=":", label=text)
        handles, labels = axes.get_legend_handles_labels()
        keys = dict(zip(labels, handles, strict=True))  # rows and breaks repeat their names
        axes.figure.legend(keys.values(), keys, loc="outside lower center", ncols=4, fontsize=8, frameon=False)
        axes.set_title(self.title, fontsize=9)
        axes.set_xlabel(self.x_label)
        axes.set_ylabel(self.y_label)
        axes.set_xlim(0, self.end)
        axes.set_ylim(rows - 0.5, -0.5)
        axes.set_yticks(labelled_rows := range(0, rows, max(1, rows // 32)), [self.rows[row] for row in labelled_rows])


def save_png(
    draw: Callable[[Any], None], path: Path, *, inches: tuple[float, float], dpi: int, panels: int = 1
) -> None:
    """Let `draw` fill matplotlib axes of this size, and write them to `path`, under a temporary name first.

    panels: number of axes, one below the other; `draw` gets a list of axes if there are several.

    Raises ModuleNotFoundError, with a message for the user, without matplotlib; OSError if the file can't be written.
    """
    try:
        figures = importlib.import_module("matplotlib.figure")
    except ModuleNotFoundError as error:
        if error.name != "matplotlib":
            raise
        message = "matplotlib is not installed (pip install 'megajax[plot]')"
        raise ModuleNotFoundError(message, name=error.name) from error
    # A bare Figure: pyplot would keep a reference to it, and look for a display.
    figure = figures.Figure(figsize=inches, dpi=dpi, layout="constrained")
    draw(figure.subplots(panels))
    temporary = path.with_name(f".{path.name}.tmp")
    figure.savefig(temporary, format="png")
    temporary.replace(path)
