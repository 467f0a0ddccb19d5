"""The cost model against published speeds, and the constants it is fitted by."""

import planner_accuracy
import pytest

from megajax.planning.costs import DEVICES, FITTED


def test_published_speeds_are_predicted() -> None:
    found = planner_accuracy.lines()
    said = planner_accuracy.summary(found)
    assert said["predicted"] >= 16 and said["fitted"] == len(FITTED) <= 4
    assert said["median_error"] <= 0.10 and said["worst_error"] <= 0.20
    devices = {run.device for run in planner_accuracy.RUNS}
    assert devices == {"a100-80gb", "h100", "h200", "b200", "gb200"}
    table = planner_accuracy.table(found)
    assert all(run.name in table for run in planner_accuracy.RUNS)


def test_constants_are_those_of_the_fit() -> None:
    found = planner_accuracy.fit()
    assert found["h100 matmul"] == pytest.approx(DEVICES["h100"].matmul, abs=2e-3)
    assert found["h100 matmul_fp8"] == pytest.approx(DEVICES["h100"].matmul_fp8, abs=2e-3)
    assert found["b200 matmul_fp8"] == pytest.approx(DEVICES["b200"].matmul_fp8, abs=2e-3)
    assert found["core r0.8 overhead"] == pytest.approx(planner_accuracy.MEGATRON_R08.overhead, abs=5e-3)


def test_lower_bounds_are_below() -> None:
    assert all(one["error"] > 0 for one in planner_accuracy.lines(planner_accuracy.BOUNDS))
