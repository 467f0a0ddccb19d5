"""A float16 run finds its loss scale, and ends if the lowest scale overflows."""

from pathlib import Path

import pytest
from run_folder import steps
from small_jobs import model, run_config

from megajax.faults.exit_codes import NUMERIC_FAULT
from megajax.job.job import train
from megajax.mesh.config import ParallelConfig
from megajax.optim.config import ScheduleConfig
from megajax.precision.config import DynamicScaleConfig, PrecisionConfig
from megajax.training.config import EvaluationConfig


def job(folder: Path, scale: DynamicScaleConfig, **changes):
    return run_config(
        folder,
        model=model(dropout=0.0),
        precision=PrecisionConfig(compute="float16", loss_scale=scale),
        schedule=ScheduleConfig(lr=1e-2, style="constant"),
        evaluation=EvaluationConfig(batches=0),
        **changes,
    )


def test_the_optimizer_and_the_schedule_skip_overflows_but_the_data_does_not(tmp_path, capfd):
    # 2^28 overflows: one overflow is tolerated, then a few halvings follow until steps count.
    cfg = job(tmp_path, DynamicScaleConfig(initial=2.0**28, window=2), steps=24, parallel=ParallelConfig(data=2))
    assert train(cfg) == 0
    taken = list(steps(tmp_path).values())
    skipped = [line["skipped"] for line in taken]
    scales = [line["loss_scale"] for line in taken]
    assert skipped[0] and not all(skipped)
    assert [line["consumed_samples"] for line in taken] == [8 * n for n in range(1, 25)]
    expected, good_steps, remaining = 2.0**28, 0, 2
    for overflow, scale in zip(skipped, scales, strict=True):
        assert scale == expected
        good_steps, remaining = (0, remaining - 1) if overflow else (good_steps + 1, remaining)
        if overflow and remaining <= 0:
            expected /= 2
        if good_steps == 2:
            expected, good_steps, remaining = expected * 2, 0, 2
    assert taken[-1]["loss"] < taken[0]["loss"]
    out = capfd.readouterr().out
    assert f"starts at {2**28:,}; updates are skipped until" in out and " of 24; the loss scale fell to " in out


@pytest.mark.slow
def test_an_overflow_at_the_lowest_scale_ends_the_run(tmp_path, capfd):
    cfg = job(tmp_path, DynamicScaleConfig(initial=2.0**28, floor=2.0**27, hysteresis=1))
    assert train(cfg) == NUMERIC_FAULT
    text = capfd.readouterr()
    assert "lowest loss scale, 1.34218e+08; 2 steps were skipped" in text.out + text.err
