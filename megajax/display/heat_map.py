"""Heat maps: numbers as coloured cells, as SVG for HTML pages and by matplotlib. R rows, C columns."""

import base64
import math
import struct
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from itertools import pairwise
from typing import Any

from megajax.display.charts import tick_text, ticks

type Color = tuple[int, int, int]

SEQUENTIAL: tuple[Color, ...] = ((68, 1, 84), (59, 82, 139), (33, 145, 140), (94, 201, 98), (253, 231, 37))
"""Colours from low to high: viridis."""
DIVERGING: tuple[Color, ...] = ((33, 102, 172), (146, 197, 222), (247, 247, 247), (244, 165, 130), (178, 24, 43))
"""Colours from below the middle to above it: blue to red."""
UNKNOWN: Color = (140, 140, 140)

LEFT, TOP, BOTTOM = 110, 26, 26
"""Margins in units of the viewBox."""
HEIGHT, LOWEST, HIGHEST = 420, 6.0, 34.0
"""Height of all rows together, and the limits for one row."""
LABEL_WIDTH = 46.0
"""Cells of at least this width, and of height 16, show their numbers."""


@dataclass(frozen=True, kw_only=True, slots=True)
class HeatMap:
    """Numbers of R rows in C columns."""

    title: str
    rows: Sequence[str]
    """Names of the rows."""
    values: Sequence[Sequence[float]]
    """[R][C]; nan if unknown."""
    x_label: str
    y_label: str
    first: float = 0.0
    """x of the first column's left edge."""
    last: float | None = None
    """x of the last column's right edge; None: columns are numbered, and ticks are at their centres."""
    middle: float | None = None
    """Colours show whether values are above or below it. None: colours show low to high."""

    @property
    def range(self) -> tuple[float, float]:
        """The smallest and largest value."""
        finite = [value for row in self.values for value in row if math.isfinite(value)]
        return (min(finite), max(finite)) if finite else (0.0, 0.0)

    def color(self, value: float, limits: tuple[float, float]) -> Color:
        """The colour of a cell. limits: of `limits()`, computed once for all cells."""
        if not math.isfinite(value):
            return UNKNOWN
        low, high = limits
        return mixed(SEQUENTIAL if self.middle is None else DIVERGING, (value - low) / ((high - low) or 1.0))

    def limits(self) -> tuple[float, float]:
        """The values of the first and the last colour."""
        low, high = self.range
        if self.middle is None:
            return low, high
        # The darkest colours are at least half of the middle away from it, so that small differences stay pale.
        distance = max(high - self.middle, self.middle - low, abs(self.middle) / 2)
        return self.middle - distance, self.middle + distance

    def svg(self, width: int = 1180) -> str:
        """The heat map as an <svg>; each row has a tooltip with its range, and large cells show their numbers."""
        count, columns = len(self.rows), len(self.values[0])
        height = min(max(HEIGHT / count, LOWEST), HIGHEST)
        wide, lower = (width - LEFT - 14) / columns, TOP + height * count
        label = escape(f"{self.title}, {self.y_label} by {self.x_label}")
        limits = self.limits()
        pixels = [[self.color(value, limits) for value in row] for row in self.values]
        parts = [
            f'<svg viewBox="0 0 {width} {lower + BOTTOM:.0f}" role="img" aria-label="{label}">',
            _picture(pixels, LEFT, TOP, width - LEFT - 14, lower - TOP),
            *self._scale(width),
            *self._row_names(height, width),
            *self._column_ticks(width, lower),
        ]
        if wide >= LABEL_WIDTH and height >= 16:
            parts += self._numbers(pixels, wide, height)
        return "".join([*parts, "</svg>"])

    def plot(self, axes: Any) -> None:
        """Draw on matplotlib axes."""
        count, columns = len(self.rows), len(self.values[0])
        low, high = self.limits()
        extent = (-0.5, columns - 0.5) if self.last is None else (self.first, self.last)
        picture = axes.imshow(
            self.values,
            aspect="auto",
            interpolation="nearest",
            cmap="viridis" if self.middle is None else "RdBu_r",
            vmin=low,
            vmax=high if high > low else low + 1,
            extent=(*extent, count - 0.5, -0.5),
        )
        axes.figure.colorbar(picture, ax=axes, pad=0.01)
        axes.set_title(self.title)
        axes.set_xlabel(self.x_label)
        axes.set_ylabel(self.y_label)
        labelled_rows = range(0, count, -(-count // 20))
        axes.set_yticks(labelled_rows, [self.rows[place] for place in labelled_rows])
        if self.last is None:
            axes.xaxis.get_major_locator().set_params(integer=True)
        if self.last is None and columns <= 16 and count <= 12:
            for row, values in enumerate(self.values):
                for column, value in enumerate(values):
                    color = "white" if _dark(self.color(value, (low, high))) else "black"
                    axes.text(column, row, f"{value:.3g}", ha="center", va="center", color=color, fontsize=8)

    def _scale(self, width: int) -> Iterator[str]:
        """The colour scale from the smallest to the largest value, at the upper right."""
        (low, high), limits = self.range, self.limits()
        colors = [self.color(low + (high - low) * place / 63, limits) for place in range(64)]
        yield _picture([colors], width - 14 - 220, 6, 160, 10)
        yield f'<text class="tick" x="{width - 14 - 226}" y="15" text-anchor="end">{tick_text(_short(low))}</text>'
        yield f'<text class="tick" x="{width - 14 - 54}" y="15">{tick_text(_short(high))}</text>'

    def _row_names(self, height: float, width: int) -> Iterator[str]:
        every = math.ceil(13 / height)
        yield f'<text class="tick" x="{LEFT - 8}" y="15" text-anchor="end">{escape(self.y_label)}</text>'
        for place, (name, values) in enumerate(zip(self.rows, self.values, strict=True)):
            top, finite = TOP + place * height, [value for value in values if math.isfinite(value)]
            if place % every == 0:
                middle = top + height / 2 + 4
                yield f'<text class="tick" x="{LEFT - 8}" y="{middle:.1f}" text-anchor="end">{escape(name)}</text>'
            summary = f"{min(finite):.4g} to {max(finite):.4g}, last {values[-1]:.4g}" if finite else "unknown"
            box = f"M{LEFT} {top:.1f}h{width - LEFT - 14}v{height:.1f}H{LEFT}z"
            yield f'<path fill="none" pointer-events="all" d="{box}">'
            yield f"<title>{escape(f'{self.y_label} {name}: {summary}')}</title></path>"

    def _column_ticks(self, width: int, lower: float) -> Iterator[str]:
        columns, room = len(self.values[0]), width - LEFT - 14
        first, last = (-0.5, columns - 0.5) if self.last is None else (self.first, self.last)
        places = [value for value in ticks(first, last, most=12) if value == int(value)]
        for value in places:
            at = LEFT + (value - first) / (last - first) * room
            yield f'<line class="grid axis" x1="{at:.1f}" x2="{at:.1f}" y1="{lower:.1f}" y2="{lower + 4:.1f}"/>'
            yield f'<text class="tick" x="{at:.1f}" y="{lower + 16:.1f}" text-anchor="middle">{tick_text(value)}</text>'
        yield f'<text class="tick" x="{LEFT - 8}" y="{lower + 16:.1f}" text-anchor="end">{escape(self.x_label)}</text>'

    def _numbers(self, pixels: Sequence[Sequence[Color]], wide: float, height: float) -> Iterator[str]:
        for row, values in enumerate(self.values):
            for column, value in enumerate(values):
                x, y = LEFT + (column + 0.5) * wide, TOP + (row + 0.5) * height + 4
                fill = "#fff" if _dark(pixels[row][column]) else "#111"
                yield f'<text class="number" fill="{fill}" font-size="11" x="{x:.1f}" y="{y:.1f}" '
                yield f'text-anchor="middle">{tick_text(_short(value)) if math.isfinite(value) else "?"}</text>'


def mixed(stops: Sequence[Color], place: float) -> Color:
    """The colour at `place` in [0, 1], interpolated between equidistant stops."""
    place = min(max(place, 0.0), 1.0) * (len(stops) - 1)
    before, after = [*pairwise(stops)][min(int(place), len(stops) - 2)]
    part = place - min(int(place), len(stops) - 2)
    red, green, blue = (round(a + (b - a) * part) for a, b in zip(before, after, strict=True))
    return red, green, blue


def _dark(color: Color) -> bool:
    return 0.299 * color[0] + 0.587 * color[1] + 0.114 * color[2] < 140


def _short(value: float) -> float:
    return float(f"{value:.3g}")


def _picture(pixels: Sequence[Sequence[Color]], x: float, y: float, width: float, height: float) -> str:
    """Coloured cells as an <image> with embedded data."""
    data = base64.b64encode(png(pixels)).decode()
    box = f'x="{x}" y="{y}" width="{width:.1f}" height="{height:.1f}" preserveAspectRatio="none"'
    return f'<image {box} style="image-rendering:pixelated" href="data:image/png;base64,{data}"></image>'


def png(pixels: Sequence[Sequence[Color]]) -> bytes:
    """[R][C] colours -> a PNG file with one pixel each (ISO/IEC 15948), 8 bits per channel."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", len(pixels[0]), len(pixels), 8, 2, 0, 0, 0)
    rows = b"".join(b"\0" + bytes(value for pixel in row for value in pixel) for row in pixels)
    body = chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(rows, 9)) + chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + body
