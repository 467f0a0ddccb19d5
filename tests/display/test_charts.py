"""Charts: every spike and gap is drawn, axes are readable, bars and timelines are to scale."""

import re

import numpy as np
import pytest

from megajax.display.charts import (
    BarSegment,
    Box,
    EventMark,
    LineChart,
    Series,
    TimelineChart,
    stacked_bar,
    thin,
    tick_text,
    ticks,
)


def test_thinning_loses_no_spike_and_no_gap() -> None:
    x = np.arange(1, 200_001)
    y = np.sin(x / 3000) + np.random.default_rng(0).normal(0, 0.01, len(x))
    y[77_776], y[123_455] = 50.0, -40.0
    y[150_000:150_800] = np.nan
    thinned = thin(Series("a", x, y), 0, 200_000, 1000)
    thinned = Series("a", np.asarray(thinned.x), np.asarray(thinned.y))
    assert len(thinned.x) <= 4 * 1000 and np.all(np.diff(thinned.x) > 0)
    assert 77_777 in thinned.x and 123_456 in thinned.x
    assert np.nanmax(thinned.y) == 50.0 and np.nanmin(thinned.y) == -40.0
    inside = (thinned.x > 150_001) & (thinned.x < 150_800)
    assert inside.any() and np.isnan(thinned.y[inside]).all(), "the gap is still one"
    column = (x / 200_000 * 1000).astype(int)
    columns = np.minimum(column, 999), np.minimum((thinned.x / 200_000 * 1000).astype(int), 999)
    for place in (0, 400, 999):
        original, few = y[columns[0] == place], thinned.y[columns[1] == place]
        assert (original.min(), original.max()) == (few.min(), few.max())
        assert (original[0], original[-1]) == (few[0], few[-1])


def test_gaps_and_lone_points() -> None:
    y = np.array([1.0, 2.0, np.nan, 3.0, np.nan, np.nan, 2.0, 1.0])
    chart = LineChart(title="t", series=[Series("a", np.arange(8), y)], last=7)
    picture = chart.svg()
    path = re.search(r'<path class="curve line c0" d="([^"]+)"', picture)
    assert path is not None and path[1].count("M") == 3 and path[1].count("L") == 2
    assert chart.data()["series"][0]["y"] == [1, 2, None, 3, None, None, 2, 1]
    gaps = np.tile([1.0, np.nan], 50)
    dots = LineChart(title="t", series=[Series("a", np.arange(100), gaps)], last=99).svg()
    assert dots.count("<circle") == 50, "a point between two gaps is a dot"


@pytest.mark.parametrize(
    ("values", "logarithmic"), [([1.0, 100.0], True), ([1.0, 10.0], False), ([0.0, 100.0], False), ([2.0, 2.0], False)]
)
def test_axes(values: list[float], logarithmic: bool) -> None:
    picture = LineChart(title="t", series=[Series("a", np.array([1, 2]), np.array(values))], last=2).svg()
    heights = [float(at) for at in re.findall(r'cy="([\d.]+)"', picture)]
    assert all(0 < at < 230 for at in heights)
    numbers = [float(text) for text in re.findall(r'text-anchor="end">([\d.e-]+)<', picture)]
    assert len(numbers) >= 2 and (10.0 in numbers and 50.0 not in numbers if logarithmic else True)


def test_charts_of_nothing_finite() -> None:
    empty = LineChart(title="t", series=[Series("a", np.arange(3), np.full(3, np.nan))], crosses=[(1, "nan")], last=3)
    assert 'class="cross"' in empty.svg()
    assert LineChart(title="t", series=[], marks=[EventMark(1, "bad", "x")]).svg()


def test_ticks() -> None:
    assert ticks(0, 10) == [0, 2, 4, 6, 8, 10]
    assert ticks(1.93, 2.31, most=5) == [2.0, 2.1, 2.2, 2.3]
    assert ticks(0.5, 2000, logarithmic=True) == [1, 3, 10, 30, 100, 300, 1000]
    assert ticks(0.5, 2000, logarithmic=True, most=4) == [1, 10, 100, 1000]
    assert [tick_text(v) for v in (0, 0.25, 3e-4, 40_000, 1.5e6, -2)] == ["0", "0.25", "3e-4", "40k", "1.5M", "-2"]
    assert tick_text(0.425, percent=True) == "42.5%"


def test_numbers_of_devices_are_ticks_of_a_logarithmic_axis() -> None:
    curve = Series("weak scaling", (8, 64, 512), (0.5, 0.4, 0.3))
    picture = LineChart(title="MFU", series=[curve], percent=True, log_x=True, first=8, last=512).svg()
    places = re.findall(r'<text class="tick" x="([\d.]+)" y="[\d.]+" text-anchor="middle">(\d+)<', picture)
    assert [text for _, text in places] == ["8", "64", "512"]
    first, second, third = (float(x) for x, _ in places)
    assert second - first == pytest.approx(third - second, abs=0.2)
    assert "weak scaling, 64: 40.0%" in picture


def test_a_stacked_bar_is_to_scale() -> None:
    segments = [BarSegment("weights", 30.0, "30 GiB", "weights"), BarSegment("a & b", 10.0, "10 GiB", "state")]
    picture = stacked_bar(segments, limit=(80.0, "limit"), width=804)
    assert [float(width) for width in re.findall(r'width="([\d.]+)" height="38"', picture)] == [300, 100]
    assert 'x1="802.0"' in picture and "a &amp; b <b>10 GiB</b>" in picture
    assert stacked_bar([BarSegment("nothing", 0.0, "0", "state")])


def test_a_timeline_is_to_scale() -> None:
    boxes = {"forward": [Box(0, 0.0, 1.0), Box(1, 1.0, 1.0)], "backward": [Box(1, 2.0, 2.0)]}
    names = {"forward": "forward", "backward": "backward"}
    timeline = TimelineChart(rows=["stage 0", "stage 1"], boxes=boxes, end=4.0, names=names, breaks=[(2.0, "3 more")])
    picture = timeline.svg(width=486)
    assert '<path class="forward" d="M74.00 27h100.00v24h-100.00zM174.00 53h100.00v24h-100.00z">' in picture
    assert '<path class="backward" d="M274.00 53h200.00v24h-200.00z">' in picture
    assert 'class="break" x1="274.0"' in picture and ">3 more<" in picture and ">stage 1<" in picture
