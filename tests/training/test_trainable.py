"""Frozen weights: no gradient, no reduction, no optimizer state, on every layout."""

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import pytest
from small_jobs import losses, run_config
from tiny_runs import ONE, QUICK, Program, build_program, gradients_of, in_order, llama, place, rows, start, within

from megajax.checkpoint.config import CheckpointConfig
from megajax.config.errors import UserError
from megajax.job.job import train
from megajax.mesh.config import ParallelConfig
from megajax.mesh.mesh import build_mesh
from megajax.optim.config import AdamWConfig
from megajax.planning.program.hlo import Collective, read
from megajax.resilience.config import ResilienceConfig

TRAINED = ("*.mixer.query", "norm.gain")
PATHS = {"stack.blocks.0.mixer.query", "norm.gain"}
FSDP = ParallelConfig(data=2, data_sharding="fsdp")


def training(parallel: ParallelConfig, trainable: tuple[str, ...], microbatches: int = 2) -> Program:
    """Not compiled; a llama of three layers."""
    cfg = build_program(llama(repeats=3), parallel, microbatches=microbatches).cfg
    cfg = cfg.but(optimizer=replace(cfg.optimizer, trainable=trainable))
    return Program.of(cfg, build_mesh(parallel))


class Compiled(NamedTuple):
    program: Program
    step: Any


@cache
def compiled(trainable: tuple[str, ...]) -> Compiled:
    """The train step on FSDP over two devices."""
    made = training(FSDP, trainable)
    with within(made):
        step: Any = made.train_step
        return Compiled(made, step.lower(made.state_like(), made.batch_like()).compile(compiler_options=dict(QUICK)))


def reductions(made: Compiled) -> list[Collective]:
    """Of arrays over data."""
    every = read(made.step.as_text(), made.program.mesh.shape).collectives
    return [one for one in every if one.kind in ("reduce-scatter", "all-reduce") and one.elements > one.arrays]


def matmuls(made: Compiled) -> int:
    return made.step.as_text().count(" dot(")


@pytest.mark.slow
def test_the_compiled_step_has_no_work_for_frozen_weights() -> None:
    every, some = compiled(("*",)), compiled(TRAINED)
    assert sum(one.arrays for one in reductions(some)) == len(PATHS)
    assert sum(one.arrays for one in reductions(every)) == len(every.program.declared)
    # Of the seven matrices of a layer six have no gradient, nor has the head's table.
    assert matmuls(every) - matmuls(some) == 6 + 1
    assert some.step.cost_analysis()["flops"] < 0.75 * every.step.cost_analysis()["flops"]
    moments = some.program.state_like().optimizer
    assert set(moments["first_moment"]) == set(moments["second_moment"]) == PATHS


def test_a_step_leaves_frozen_weights_as_they_are() -> None:
    made, step = compiled(TRAINED)
    with within(made):
        before = start(made)
        wanted = jax.device_get(before.params)
        after, metrics = step(before, place(made, rows()))
    changed = {path for path, w in jax.device_get(after.params).items() if not np.array_equal(w, wanted[path])}
    assert changed == PATHS and metrics["grad_norm"] > 0


def test_gradients_over_fsdp_are_those_without_frozen_weights() -> None:
    moments = {}
    for trainable in (TRAINED, ("*",)):
        made, step = compiled(trainable)
        with within(made):
            after, metrics = step(start(made), place(made, rows()))
        moments[trainable] = gradients_of(made, after, float(metrics["grad_norm"]))
    assert set(moments[TRAINED]) == PATHS
    for path in PATHS:
        expected = moments["*",][path]
        np.testing.assert_allclose(moments[TRAINED][path], expected, rtol=0, atol=1e-5 * np.abs(expected).max())


@cache
def gradients(parallel: ParallelConfig, trainable: tuple[str, ...], microbatches: int = 2) -> dict[str, np.ndarray]:
    """Of a step, rows in the order of the layers."""
    made = training(parallel, trainable, microbatches)
    with within(made):
        inputs, batch = start(made).inputs, place(made, rows())
        lowered = jax.jit(lambda: made.grad_fn()(inputs, batch, np.float32(1)).grads).lower()
        return in_order(made, jax.device_get(lowered.compile(compiler_options=dict(QUICK))()))[0]


@pytest.mark.parametrize(
    "parallel",
    [
        pytest.param(ParallelConfig(data=2, pipeline=2, layers=(1, 2), data_sharding="zero1"), marks=pytest.mark.slow),
        pytest.param(
            ParallelConfig(data=2, tensor=2, data_sharding="replicate", sequence=True), marks=pytest.mark.slow
        ),
        pytest.param(ParallelConfig(data=1, pipeline=3, schedule="gpipe"), marks=pytest.mark.slow),
    ],
    ids=["uneven pipeline", "tensor", "gpipe"],
)
def test_gradients_of_the_others_are_those_without_frozen_weights(parallel: ParallelConfig) -> None:
    every, some = gradients(ONE, ("*",)), gradients(parallel, TRAINED)
    assert set(some) == PATHS
    for path in PATHS:
        np.testing.assert_allclose(some[path], every[path], rtol=0, atol=1e-5 * np.abs(every[path]).max())


@pytest.mark.slow
def test_a_resumed_run_goes_on_exactly_and_on_another_layout(tmp_path: Path) -> None:
    settings = {"optimizer": AdamWConfig(trainable=TRAINED), "checkpoint": CheckpointConfig(every=2), "steps": 4}
    whole, halved = tmp_path / "whole", tmp_path / "halved"
    assert train(run_config(whole, **settings)) == 0
    assert train(run_config(halved, **settings, resilience=ResilienceConfig(exit_after_steps=2))) == 0
    assert train(run_config(halved, **settings, parallel=ParallelConfig(data=2, pipeline=2))) == 0
    np.testing.assert_allclose(losses(halved), losses(whole), rtol=1e-4)


def test_a_pattern_that_matches_nothing_is_refused() -> None:
    with pytest.raises(UserError, match=r"optimizer\.trainable=\*\.mixer\.quary matches no weight.*mixer\.query"):
        training(ONE, ("*.mixer.quary",))
