"""A run with delayed 8-bit scales: stopped, and resumed on the same and on another layout."""

from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
import pytest
from small_jobs import losses, model, run_config

from megajax.checkpoint.reader import open_checkpoints
from megajax.faults.config import ResilienceConfig
from megajax.job.job import train
from megajax.job.start.resume import Resume
from megajax.mesh.config import ParallelConfig
from megajax.models.decoder.config import PredictionConfig
from megajax.optim.config import ScheduleConfig
from megajax.precision.config import Fp8DelayedConfig, PrecisionConfig
from megajax.training.run_config import RunConfig
from megajax.training.session import Run, setup

DELAYED = PrecisionConfig(matmul=Fp8DelayedConfig(history=3, algorithm="max"))
STACK = "stack.blocks.0.mlp.up.amax.max"


def job(folder: Path | str = "unused", **changes) -> RunConfig:
    """With a head that predicts further ahead, whose products are outside the stack."""
    wide = replace(model(hidden=64, ffn=64, dropout=0.0), prediction=PredictionConfig())
    settings = {"model": wide, "precision": DELAYED, "schedule": ScheduleConfig(lr=1e-2, style="constant"), "steps": 4}
    return run_config(folder, **settings | changes)


def state(folder: Path, cfg: RunConfig) -> Run:
    """The run as of its last checkpoint."""
    reader, _ = open_checkpoints(folder)
    return setup(cfg, start=Resume(reader, reader.newest(), same_run=False, say=print))


@pytest.mark.slow
def test_a_resume_is_exact_and_another_layout_gets_the_same_histories(tmp_path: Path) -> None:
    uninterrupted, halved = tmp_path / "whole", tmp_path / "halved"
    assert train(job(uninterrupted)) == 0
    assert train(job(halved, resilience=ResilienceConfig(exit_after_steps=2))) == 0
    assert train(job(halved)) == 0
    assert losses(halved) == losses(uninterrupted)
    first, second = (state(folder, job()) for folder in (uninterrupted, halved))
    assert all((np.asarray(history) > 0).all() for history in first.state.observed.values())
    jax.tree.map(np.testing.assert_array_equal, first.state, second.state)

    pipeline = ParallelConfig(data=1, pipeline=2)
    elsewhere = state(uninterrupted, job(parallel=pipeline))
    for path, history in elsewhere.state.observed.items():
        np.testing.assert_array_equal(history, first.state.observed[path])
    assert STACK in elsewhere.state.observed and "predictions.0.from_state.amax.max" in elsewhere.state.observed
    after = [next(iter(run.steps(1))).loss for run in (first, elsewhere)]
    assert after[1] == pytest.approx(after[0], abs=2e-3)


@pytest.mark.slow
def test_evaluation_and_the_model_use_the_scales_and_do_not_change_them(tmp_path: Path) -> None:
    run = setup(job(model=model(hidden=64, ffn=64, dropout=0.0, repeats=1)))
    for _ in run.steps(1):
        pass
    before = jax.device_get(run.state.observed)
    loss = run.evaluate(run.parts.splits.valid, batches=1)
    tokens = np.zeros((2, 16), np.int32)
    logits = np.asarray(run.model(tokens))
    jax.tree.map(np.testing.assert_array_equal, before, jax.device_get(run.state.observed))
    assert np.isfinite(loss) and np.isfinite(logits).all()
    tight = {path: np.full_like(history, 1e-3) for path, history in before.items()}
    run.state = replace(run.state, observed=jax.device_put(tight, run.program.shardings.observed))
    assert run.evaluate(run.parts.splits.valid, batches=1) != loss
    assert np.abs(np.asarray(run.model(tokens)) - logits).max() > 0
