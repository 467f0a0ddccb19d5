"""A window of steps traced, its summary, and what is refused."""

from pathlib import Path
from types import SimpleNamespace

import jax
import pytest

from megajax.metrics.config import ProfileConfig
from megajax.metrics.profile import Profile
from megajax.metrics.trace import Event, length, summary, union
from megajax.metrics.xplane import summarize


def event(name: str, begin: float, end: float, talks: bool = False) -> Event:
    return Event(name, begin * 1e6, end * 1e6, talks)


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


def told(name: str, start: float, duration: float, **stats: object) -> SimpleNamespace:
    return SimpleNamespace(name=name, start_ns=start, duration_ns=duration, stats=stats.items())


def lane(name: str, *events: SimpleNamespace) -> SimpleNamespace:
    return SimpleNamespace(name=name, events=events)


HOST = SimpleNamespace(
    name="/host:CPU",
    lines=[lane("worker", told("dot", 0, 4e6, hlo_op="dot.1", device_ordinal=0), told("python", 0, 9e6))],
)
GPU = SimpleNamespace(
    name="/device:GPU:0",
    lines=[
        lane("Stream #1(Compute)", told("gemm", 0, 3e6, hlo_op="dot.1")),
        lane("Stream #2(NCCL)", told("ncclDevKernel_AllGather", 2e6, 3e6, hlo_op="all-gather.1")),
        lane("XLA Ops", told("dot.1", 0, 9e6, hlo_op="dot.1")),
    ],
)


@pytest.mark.parametrize(
    ("planes", "kernels", "numbers"),
    [
        ([HOST, GPU], ["gemm", "ncclDevKernel_AllGather"], (5.0, 3.0, 2.0)),
        ([HOST], ["dot.1"], (4.0, 0.0, 0.0)),
        ([SimpleNamespace(name="/device:GPU:0", lines=[]), HOST], ["dot.1"], (4.0, 0.0, 0.0)),
    ],
    ids=["gpu", "cpu", "a GPU that did nothing"],
)
def test_kernels_of_gpus_come_before_operations_of_the_host(planes, kernels, numbers, tmp_path, monkeypatch):
    (tmp_path / "one.xplane.pb").touch()
    data = SimpleNamespace(from_file=lambda file: SimpleNamespace(planes=planes))
    monkeypatch.setattr(jax.profiler, "ProfileData", data)
    found = summarize(tmp_path, steps=1, top=3)
    assert found is not None and found.devices == 1
    assert [kernel.name for kernel in found.kernels] == kernels
    assert (found.busy, found.communication, found.exposed) == pytest.approx(numbers)


@pytest.mark.parametrize(("index", "traces"), [(0, False), (1, True)])
def test_only_the_processes_asked_for_trace(index, traces, tmp_path: Path, monkeypatch):
    monkeypatch.setattr(jax, "process_index", lambda: index)
    profile = Profile(ProfileConfig(steps="3:4", processes=(1,)), tmp_path, 0, lambda summary: None)
    assert (profile.window is not None) == traces
