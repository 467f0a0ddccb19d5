"""A window of steps traced, its summary, and what is refused."""

import pytest

from megajax.metrics.config import ProfileConfig
from megajax.metrics.trace import _Event, length, summary, union


def event(name: str, begin: float, end: float, talks: bool = False) -> _Event:
    return _Event(name, begin * 1e6, end * 1e6, talks)


def test_what_is_exposed_is_communication_beside_which_nothing_runs():
    first = [event("dot", 0, 4), event("nccl", 3, 6, True), event("dot", 7, 9), event("add", 8, 10)]
    second = [event("dot", 0, 10), event("nccl", 2, 4, True)]
    found = summary([first, second], steps=1, top=2)
    assert (found.busy, found.idle) == pytest.approx((9.5, 0.5))
    assert (found.communication, found.exposed) == pytest.approx((2.5, 1.0))
    assert [(kernel.name, kernel.milliseconds) for kernel in found.kernels] == [("dot", 8.0), ("nccl", 2.5)]
    assert found.kernels[0].share == pytest.approx(16 / 23)
    half = summary([first, second], steps=2, top=2)
    assert half.busy == pytest.approx(found.busy / 2)


def test_intervals():
    assert union([(5, 6), (0, 2), (1, 3), (3, 4)]) == [(0, 4), (5, 6)]
    assert length(union([])) == 0


@pytest.mark.parametrize("text", ["3", "0:2", "5:4", "x", "1:2:3", ""])
def test_windows(text):
    config = ProfileConfig(steps=text)
    if text == "3":
        assert config.window() == (3, 3) and config.problems() == []
    else:
        assert [problem.where for problem in config.problems()] == ["steps"]
