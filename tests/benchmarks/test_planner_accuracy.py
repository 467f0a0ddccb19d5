"""The cost model against published speeds, and its fitted constants."""

import pytest

from benchmarks.planning import accuracy as planner_accuracy
from megajax.planning.virtual_devices import GPUS


def test_published_speeds_are_predicted() -> None:
    actual = planner_accuracy.lines()
    text = planner_accuracy.summary(actual)
    assert text["predicted"] >= 16 and text["fitted"] == len(planner_accuracy.FITTED) <= 4
    assert text["median_error"] <= 0.10 and text["worst_error"] <= 0.20
    devices = {run.device for run in planner_accuracy.RUNS}
    assert devices == {"a100-80gb", "h100", "h200", "b200", "gb200"}
    table = planner_accuracy.table(actual)
    assert all(run.name in table for run in planner_accuracy.RUNS)


def test_constants_are_those_of_the_fit() -> None:
    actual = planner_accuracy.fitted_constants()
    assert actual["h100 matmul"] == pytest.approx(GPUS["h100"].matmul, abs=2e-3)
    assert actual["h100 matmul_fp8"] == pytest.approx(GPUS["h100"].matmul_fp8, abs=2e-3)
    assert actual["b200 matmul_fp8"] == pytest.approx(GPUS["b200"].matmul_fp8, abs=2e-3)
    assert actual["core r0.8 overhead"] == pytest.approx(planner_accuracy.MEGATRON_R08.overhead, abs=5e-3)


def test_lower_bounds_are_below() -> None:
    assert all(line["error"] > 0 for line in planner_accuracy.lines(planner_accuracy.BOUNDS))
