"""A checkpoint knows the order its rows of stacked weights are in; any layout goes on from any other's.

Whole rows go on as rows cut over `context`, and the other way round. Two key-value heads on
four devices of `tensor` are two heads in a checkpoint.
"""

from pathlib import Path

import pytest
from run_folder import steps
from small_jobs import model, run_config

from megajax.job.job import train
from megajax.mesh.config import ParallelConfig
from megajax.optim.config import ScheduleConfig
from megajax.training.config import BatchConfig, EvaluationConfig

STEPS = 6
LEGS = {
    "copied-heads-one": (ParallelConfig(tensor=4, data=2, data_sharding="zero1"), ParallelConfig(data=1)),
    "interleaved-uneven-one": (
        ParallelConfig(pipeline=2, virtual_stages=2, schedule="interleaved", data=2),
        ParallelConfig(pipeline=2, layers=(3, 1), data=1),
        ParallelConfig(data=1),
    ),
    "ring-pipeline_exchange": (
        ParallelConfig(context=4, context_strategy="ring", tensor=2, sequence=True, data=1),
        ParallelConfig(context=2, context_strategy="all_to_all", pipeline=2, data=2),
    ),
}


def one_run(folder: Path, legs: tuple[ParallelConfig, ...]) -> dict[int, float]:
    """Loss by step of a run in attempts of equal length."""
    for leg, parallel in enumerate(legs, start=1):
        cfg = run_config(
            folder,
            model=model(repeats=4),
            parallel=parallel,
            schedule=ScheduleConfig(lr=1e-2, warmup_steps=2, decay_steps=STEPS),
            batch=BatchConfig(global_size=8, micro_size=1),
            evaluation=EvaluationConfig(batches=0),
            steps=STEPS // len(legs) * leg,
        )
        assert train(cfg) == 0
    return {step: line["loss"] for step, line in steps(folder).items()}


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory) -> dict[int, float]:
    return one_run(tmp_path_factory.mktemp("whole"), (ParallelConfig(data=1),))


@pytest.mark.slow
@pytest.mark.parametrize("legs", LEGS.values(), ids=LEGS)
def test_a_run_resumes_in_another_pipeline(tmp_path, uninterrupted, legs):
    assert one_run(tmp_path, legs) == pytest.approx(uninterrupted, rel=1e-5)


@pytest.mark.slow
def test_a_stop_changes_no_bit_where_rows_are_sharded(tmp_path):
    """Two attempts of three steps against one of six, on the same layout."""
    layout = ParallelConfig(context=4, context_strategy="ring", data=2)
    assert one_run(tmp_path / "legs", (layout, layout)) == one_run(tmp_path / "whole", (layout,))
