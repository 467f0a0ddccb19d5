"""A checkpoint knows the order its rows of stacked weights are in; any layout goes on from any other's."""

import json
from pathlib import Path

import jax
import numpy as np
import pytest
from small_jobs import model, run_config

from megajax.mesh.config import ParallelConfig
from megajax.optim.config import ScheduleConfig
from megajax.training.config import BatchConfig
from megajax.training.job import train
from megajax.training.rows import reorder
from megajax.training.session import setup

STEPS = 6
LEGS = {
    "pipeline2-tensor2data2": (ParallelConfig(pipeline=2, data=1), ParallelConfig(tensor=2, data=2)),
    "pipeline4-tensor2data2-pipeline4": (
        ParallelConfig(pipeline=4, data=1),
        ParallelConfig(tensor=2, data=2),
        ParallelConfig(pipeline=4, data=1),
    ),
    "interleaved-uneven-one": (
        ParallelConfig(pipeline=2, virtual_stages=2, schedule="interleaved", data=2),
        ParallelConfig(pipeline=2, layers=(3, 1), data=1),
        ParallelConfig(data=1),
    ),
}


def one_run(folder: Path, legs: tuple[ParallelConfig, ...]) -> dict[int, float]:
    """Loss by step of a run whose legs are as many steps each."""
    for leg, parallel in enumerate(legs, start=1):
        cfg = run_config(
            folder,
            model=model(repeats=4),
            parallel=parallel,
            schedule=ScheduleConfig(lr=1e-2, warmup_steps=2, decay_steps=STEPS),
            batch=BatchConfig(global_size=8, micro_size=1),
            steps=STEPS // len(legs) * leg,
        )
        assert train(cfg) == 0
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return {line["step"]: line["loss"] for line in lines if "split" not in line and line.get("loss") is not None}


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> dict[int, float]:
    return one_run(tmp_path_factory.mktemp("whole"), (ParallelConfig(data=1),))


@pytest.mark.parametrize(
    "legs",
    [pytest.param(legs, id=name, marks=[pytest.mark.slow] if len(legs) > 2 else []) for name, legs in LEGS.items()],
)
def test_a_run_goes_on_in_another_pipeline(tmp_path, whole, legs):
    assert one_run(tmp_path, legs) == pytest.approx(whole, rel=1e-5)


def test_rows_find_their_places():
    run = setup(run_config(model=model(repeats=3), parallel=ParallelConfig(data=1)))
    program = run.program
    like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), run.state)
    stored, wanted = (2, -1, 0, 1), (1, 0, -1, 2)

    def rows(leaf, order):
        return np.stack([np.zeros_like(leaf[0]) if row < 0 else leaf[row] for row in order])

    before = jax.tree.map(np.asarray, run.state)
    given = dict(before.params) | {p: rows(w, stored) for p, w in before.params.items() if program.declared[p].layers}
    moved = reorder(run.state.__class__(**vars(before) | {"params": given}), like, program.declared, stored, wanted)
    for path, weight in before.params.items():
        expected = rows(weight, wanted) if program.declared[path].layers else weight
        np.testing.assert_array_equal(moved.params[path], expected, err_msg=path)
