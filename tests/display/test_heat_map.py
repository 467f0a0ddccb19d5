"""Heat maps: colours, and PNG files."""

import re
import struct
import xml.etree.ElementTree as ElementTree
import zlib
from base64 import b64decode

from megajax.display.heat_map import DIVERGING, SEQUENTIAL, UNKNOWN, HeatMap, png


def heat_map(values: list[list[float]], **changes: object) -> HeatMap:
    names = [str(row) for row in range(len(values))]
    return HeatMap(
        **{"title": "load", "rows": names, "values": values, "x_label": "expert", "y_label": "layer", **changes}
    )


def colors(map_: HeatMap, *values: float) -> list[tuple[int, ...]]:
    return [map_.color(value, map_.limits()) for value in values]


def pixels(data: bytes) -> list[list[tuple[int, ...]]]:
    """The cells of a file of `png`."""
    width, height = struct.unpack(">II", data[16:24])
    start = data.index(b"IDAT")
    size = struct.unpack(">I", data[start - 4 : start])[0]
    raw = zlib.decompress(data[start + 4 : start + 4 + size])
    rows = [raw[row * (1 + 3 * width) + 1 : (row + 1) * (1 + 3 * width)] for row in range(height)]
    return [[tuple(row[3 * place : 3 * place + 3]) for place in range(width)] for row in rows]


def test_a_picture_has_the_colours_it_was_given() -> None:
    rows = [[(1, 2, 3), (4, 5, 6), (7, 8, 9)], [(250, 0, 0), (0, 250, 0), (0, 0, 250)]]
    assert pixels(png(rows)) == rows


def test_colours_go_from_low_to_high_and_from_the_middle_both_ways() -> None:
    low_to_high = heat_map([[1.0, 2.0, float("nan")]])
    assert colors(low_to_high, 1.0, 2.0, float("nan")) == [SEQUENTIAL[0], SEQUENTIAL[-1], UNKNOWN]
    from_one = heat_map([[0.5, 1.0, 3.0]], middle=1.0)
    assert colors(from_one, -1.0, 1.0, 3.0) == [DIVERGING[0], DIVERGING[2], DIVERGING[-1]]
    assert colors(heat_map([[1.0, 1.0]], middle=1.0), 1.0) == [DIVERGING[2]]


def test_cells_with_room_show_numbers_and_rows_their_range() -> None:
    small = ElementTree.fromstring(heat_map([[0.5, 1.5], [1.0, float("nan")]], middle=1.0).svg())
    assert [text.text for text in small.findall(".//text[@class='number']")] == ["0.5", "1.5", "1", "?"]
    assert [title.text for title in small.findall(".//title")] == [
        "layer 0: 0.5 to 1.5, last 1.5",
        "layer 1: 1 to 1, last nan",
    ]
    large = heat_map([[row * column + 1.0 for column in range(256)] for row in range(58)], middle=1.0).svg()
    assert 'class="number"' not in large and len(large) < 200_000
    cells = pixels(b64decode(re.findall(r"base64,([^\"]*)", large)[0]))
    assert (len(cells), len(cells[0])) == (58, 256) and cells[57][255] == DIVERGING[-1]
