"""Frozen weights: no gradient, no reduction, no optimizer state, on every layout."""

from dataclasses import replace
from functools import cache
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_runs import (
    ONE,
    QUICK,
    Program,
    build_program,
    gradients_of,
    in_order,
    llama,
    place,
    rows,
    start,
    with_block,
    within,
)
from user_errors import user_error

from megajax.layers.lora.config import LoRAConfig
from megajax.layers.mlp.config import GatedMLPConfig
from megajax.layers.moe.config import MoEConfig, RouterConfig
from megajax.mesh.config import ParallelConfig
from megajax.mesh.mesh import build_mesh
from megajax.planning.compiled.hlo import Collective, read
from megajax.training.observations import updated_arrays

TRAINED = ("*.mixer.query", "norm.gain")
PATHS = {"stack.blocks.0.mixer.query", "norm.gain"}
FSDP = ParallelConfig(data=2, data_sharding="fsdp")


def training(parallel: ParallelConfig, trainable: tuple[str, ...], microbatches: int = 2) -> Program:
    """The program of a llama with three layers, not compiled."""
    cfg = build_program(llama(repeats=3), parallel, microbatches=microbatches).cfg
    cfg = cfg.but(optimizer=replace(cfg.optimizer, trainable=trainable))
    return Program.of(cfg, build_mesh(parallel))


class Compiled(NamedTuple):
    program: Program
    step: Any


@cache
def compiled(trainable: tuple[str, ...]) -> Compiled:
    """The train step on FSDP over two devices."""
    program = training(FSDP, trainable)
    with within(program):
        step: Any = program.train_step
        return Compiled(
            program, step.lower(program.state_like(), program.batch_like()).compile(compiler_options=dict(QUICK))
        )


def reductions(program: Compiled) -> list[Collective]:
    """Reductions of arrays over the data axis."""
    every = read(program.step.as_text(), program.program.mesh.shape).collectives
    return [op for op in every if op.kind in ("reduce-scatter", "all-reduce") and op.elements > op.arrays]


def matmuls(program: Compiled) -> int:
    return program.step.as_text().count(" dot(")


@pytest.mark.slow
def test_the_compiled_step_does_no_work_for_frozen_weights() -> None:
    every, partial = compiled(("*",)), compiled(TRAINED)
    assert sum(op.arrays for op in reductions(partial)) == len(PATHS)
    assert sum(op.arrays for op in reductions(every)) == len(every.program.declared)
    # Of the seven matrices of a layer, six have no gradient; neither has the head's table.
    assert matmuls(every) - matmuls(partial) == 6 + 1
    assert partial.step.cost_analysis()["flops"] < 0.75 * every.step.cost_analysis()["flops"]
    moments = partial.program.state_like().optimizer
    assert set(moments["first_moment"]) == set(moments["second_moment"]) == PATHS


def test_a_step_does_not_change_frozen_weights() -> None:
    program, step = compiled(TRAINED)
    with within(program):
        before = start(program)
        expected = jax.device_get(before.params)
        after, metrics = step(before, place(program, rows()))
    changed = {path for path, w in jax.device_get(after.params).items() if not np.array_equal(w, expected[path])}
    assert changed == PATHS and metrics["grad_norm"] > 0


@pytest.mark.slow
def test_gradients_over_fsdp_equal_those_without_frozen_weights() -> None:
    moments = {}
    for trainable in (TRAINED, ("*",)):
        program, step = compiled(trainable)
        with within(program):
            after, metrics = step(start(program), place(program, rows()))
        moments[trainable] = gradients_of(program, after, float(metrics["grad_norm"]))
    assert set(moments[TRAINED]) == PATHS
    for path in PATHS:
        expected = moments["*",][path]
        np.testing.assert_allclose(moments[TRAINED][path], expected, rtol=0, atol=1e-5 * np.abs(expected).max())


@cache
def gradients(parallel: ParallelConfig, trainable: tuple[str, ...], microbatches: int = 2) -> dict[str, np.ndarray]:
    """The gradients of a step, with rows in the order of the layers."""
    compiled_run = training(parallel, trainable, microbatches)
    with within(compiled_run):
        inputs, batch = start(compiled_run).inputs, place(compiled_run, rows())
        lowered = jax.jit(lambda: compiled_run.grad_fn()(inputs, batch, np.float32(1)).grads).lower()
        return in_order(compiled_run, jax.device_get(lowered.compile(compiler_options=dict(QUICK))()))[0]


@pytest.mark.slow
def test_gradients_of_trained_weights_equal_those_without_frozen_weights() -> None:
    layout = ParallelConfig(data=2, pipeline=2, layers=(1, 2), data_sharding="zero1")
    every, partial = gradients(ONE, ("*",)), gradients(layout, TRAINED)
    assert set(partial) == PATHS
    for path in PATHS:
        np.testing.assert_allclose(partial[path], every[path], rtol=0, atol=1e-5 * np.abs(every[path]).max())


def test_a_pattern_that_matches_nothing_is_refused() -> None:
    with user_error("optimizer.trainable"):
        training(ONE, ("*.mixer.quary",))


ROUTED = MoEConfig(experts=4, expert=GatedMLPConfig(ffn=16), router=RouterConfig(score="sigmoid", balance_rate=0.01))
LOAD = "stack.blocks.0.mlp.load.sum"


@pytest.mark.parametrize(
    ("model", "trainable", "moves"),
    [
        ({}, ("*",), True),
        ({}, ("*norm*", "*router"), True),
        ({}, ("*norm*", "*experts*"), False),
        ({"lora": LoRAConfig(rank=2)}, ("*",), False),
    ],
    ids=["all weights", "routers", "experts", "adapters"],
)
def test_selection_biases_of_experts_move_only_beside_a_trained_router(model, trainable, moves):
    plain = build_program(replace(with_block(llama(), mlp=ROUTED), **model), ONE, microbatches=2).cfg
    cfg = plain.but(optimizer=replace(plain.optimizer, trainable=trainable))
    observed = Program.of(cfg, build_mesh(ONE)).observed
    before = {LOAD: jnp.array([[0.5, -0.5, 0.0, 0.0], [1.0, 1.0, 1.0, 1.0]])}
    seen = {LOAD: jnp.array([[0.0] * 4, [8.0, 0.0, 4.0, 4.0]])}
    only = {LOAD: observed[LOAD]}
    biases, tokens = updated_arrays(only, before, seen, jnp.float32(1))[LOAD]
    expected = [0.49, -0.49, 0, 0] if moves else [0.5, -0.5, 0, 0]
    np.testing.assert_allclose(biases, expected, rtol=1e-6)
    assert tokens.tolist() == [8, 0, 4, 4], "the load is reported"
