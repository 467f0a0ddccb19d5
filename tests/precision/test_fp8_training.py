"""Training with matmuls in 8 and 4 bits: beside bfloat16 and on layouts, with delayed scales of the same history.

Sums in another order move numbers by the last bit of bfloat16, some of them across the border between two of the 8-bit
format, where they land 2**-4 apart. So after a few steps layouts differ by about as much as 8 bits differ from 16, ten
times what they differ by in bfloat16. Before the first update they differ only where sums are cut: over tensor.
"""

from dataclasses import replace
from functools import cache
from types import MappingProxyType
from typing import Any, NamedTuple
from unittest.mock import patch

import jax
import numpy as np
import pytest
from tiny_runs import ONE, QUICK, Program, build_program, place, rows, start, wide, with_block, within
from user_errors import user_error

from megajax.config.compose import check
from megajax.config.errors import ConfigError
from megajax.job.start.layer_order import like_stored, reorder
from megajax.layers.mlp.config import GatedMLPConfig
from megajax.layers.moe.config import MoEConfig, RouterConfig
from megajax.mesh.config import ParallelConfig
from megajax.mesh.mesh import build_mesh
from megajax.models.decoder.config import DecoderConfig
from megajax.pipeline.partition import Partition
from megajax.precision.config import (
    Fp8BlocksConfig,
    Fp8CurrentConfig,
    Fp8DelayedConfig,
    MatmulConfig,
    Mxfp8Config,
    Nvfp4Config,
)
from megajax.precision.matmul import _multiply
from megajax.training.gradients import grads
from megajax.training.limits.step import StepControl
from megajax.training.state import TrainState
from megajax.training.step_report import GuardLimits

FSDP = ParallelConfig(data=2, data_sharding="fsdp")
PIPELINE = ParallelConfig(data=1, pipeline=2)
UNEVEN = ParallelConfig(data=1, pipeline=2, layers=(1, 2))
AS_IT_IS = StepControl(limits=np.array(GuardLimits(), np.float32), rerun=np.bool(False))
ROUNDED = MappingProxyType({**QUICK, "xla_allow_excess_precision": False})
"""Compiler options: bfloat16 is rounded in the same places in every program."""
MICROBATCHES = 6
CURRENT, DELAYED = Fp8CurrentConfig(), Fp8DelayedConfig(history=2, algorithm="max")
RECIPES: dict[str, MatmulConfig] = {
    "current": CURRENT,
    "delayed": DELAYED,
    "blocks": Fp8BlocksConfig(),
    "mxfp8": Mxfp8Config(),
    "nvfp4": Nvfp4Config(first_layers=0, last_layers=0),
}


def mixture() -> DecoderConfig:
    """Experts with sides of at least 32 on two devices."""
    experts = MoEConfig(experts=4, expert=GatedMLPConfig(ffn=64), router=RouterConfig(aux_loss=0.01))
    return with_block(wide(), mlp=experts, mixer={"head_dim": 32})


class Kind(NamedTuple):
    """A model, and how far losses around 5.6 of 384 tokens may be apart."""

    model: DecoderConfig
    steps: int
    beside: float
    """From those of bfloat16."""
    on_layouts: float


KINDS = {
    # The largest observed differences were 5.3e-3, and 1.9e-2 in 4 bits.
    "dense": Kind(wide(), 20, 1e-2, 1e-2),
    "dense in 4 bits": Kind(wide(), 20, 3e-2, 3e-2),
    "mixture": Kind(mixture(), 5, 3e-2, 2e-2),
}


class Compiled(NamedTuple):
    program: Program
    step: Any


@cache
def prepared(parallel: ParallelConfig, fp8: MatmulConfig | None, model: DecoderConfig | None = None) -> Program:
    """Not compiled. model: `wide` by default."""
    microbatches, model = MICROBATCHES // parallel.data, model or wide()
    program = build_program(model, parallel, microbatches=microbatches, compute="bfloat16", isolated=False)
    precision, schedule = replace(program.cfg.precision, matmul=fp8), replace(program.cfg.schedule, lr=1e-3)
    cfg = program.cfg.but(precision=precision, schedule=schedule, steps=20)
    # A recipe for no layers is refused, but has a program.
    assert all("leave none" in problem.message for problem in cfg.problems(8))
    return Program.of(cfg, build_mesh(parallel))


@cache
def compiled(
    parallel: ParallelConfig, fp8: MatmulConfig | None, model: DecoderConfig | None = None, *, controlled: bool = False
) -> Compiled:
    """A train step that takes a StepControl if `controlled`."""
    program = prepared(parallel, fp8, model)
    control = (AS_IT_IS,) * controlled
    with within(program):
        step: Any = program.train_step
        step = step.lower(start(program), place(program, rows()), *control).compile(compiler_options=dict(ROUNDED))
    return Compiled(program, step)


def run(compiled_step: Compiled, state: TrainState, numbers: range, *more: Any) -> tuple[TrainState, list[float]]:
    """Steps on new rows each."""
    losses = []
    with within(compiled_step.program):
        for number in numbers:
            state, metrics = compiled_step.step(state, place(compiled_step.program, rows(number)), *more)
            losses.append(float(metrics["loss"]))
    return state, losses


@cache
def losses(
    parallel: ParallelConfig, fp8: MatmulConfig | None, steps: int = 20, model: DecoderConfig | None = None
) -> np.ndarray:
    step = compiled(parallel, fp8, model)
    return np.array(run(step, start(step.program), range(steps))[1])


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "recipe"), [("dense", "current"), ("dense in 4 bits", "nvfp4"), ("mixture", "mxfp8")])
def test_steps_beside_bfloat16(kind: str, recipe: str) -> None:
    model, steps, beside, _ = KINDS[kind]
    low, high = (losses(ONE, matmul, steps, model) for matmul in (RECIPES[recipe], None))
    assert 0 < np.abs(low - high).max() < beside


EVERYTHING = ParallelConfig(data=2, pipeline=2, tensor=2, sequence=True)
WHOLE_LAYERS = ParallelConfig(data=2, pipeline=2, data_sharding="fsdp")
"""A device rounds its own rows and layers, so that the first step is the same."""
EXPERTS = ParallelConfig(data=2, expert=2, tensor=2, data_sharding="fsdp")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "recipe", "parallel"),
    [
        ("dense", "current", ParallelConfig(data=1, context=2, context_strategy="ring")),
        ("dense", "delayed", EVERYTHING),
        ("dense", "blocks", WHOLE_LAYERS),
        ("dense in 4 bits", "nvfp4", ParallelConfig(data=1, tensor=2, sequence=True)),
        # Magnitudes of the whole tensor are gathered on every axis.
        ("mixture", "delayed", EXPERTS),
        # Blocks of its attention lie on two devices.
        ("mixture", "blocks", ParallelConfig(data=1, pipeline=2, tensor=2, sequence=True)),
    ],
)
def test_steps_on_layouts(kind: str, recipe: str, parallel: ParallelConfig) -> None:
    """The expert axis gathers all tokens of a microbatch: its first step differs by last bits of bfloat16."""
    model, steps, _, on_layouts = KINDS[kind]
    actual, expected = (losses(on, RECIPES[recipe], steps, model) for on in (parallel, ONE))
    assert np.abs(actual - expected).max() < on_layouts
    if parallel == WHOLE_LAYERS:
        assert actual[0] == pytest.approx(expected[0], rel=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("recipe", "parallel"),
    [
        ("delayed", ParallelConfig(data=1, expert=2, tensor=2, sequence=True)),
        ("blocks", ParallelConfig(data=1, pipeline=2, expert=2)),
    ],
    ids=["expert x tensor", "pipeline"],
)
def test_matrices_rounded_once_a_step_are_those_of_each_microbatch(recipe: str, parallel: ParallelConfig) -> None:
    """Bit for bit with scales that are powers of two; those of NVFP4 are quotients, whose last bit may differ."""
    calls: list[bool] = []

    def multiplied(*inputs: Any) -> Any:
        calls.append(inputs[-1] is not None)
        return _multiply(*inputs)

    def run_of() -> tuple[list[float], bool]:
        calls.clear()
        step = compiled.__wrapped__(parallel, RECIPES[recipe], mixture())
        return run(step, start(step.program), range(5))[1], any(calls)

    with patch("megajax.precision.matmul._multiply", multiplied):
        once = run_of()
        with patch.object(grads, "operands_for_step", lambda *_: {}):
            each = run_of()
    assert once == (each[0], True) and not each[1]


def test_only_weights_that_a_device_has_whole_are_rounded_once_a_step() -> None:
    for parallel, once in ((EXPERTS, False), (replace(EXPERTS, data_sharding="zero1"), True)):
        assert (prepared(parallel, CURRENT, mixture()).layout.matrices is not None) == once
    assert prepared(ONE, None, mixture()).layout.matrices is None


@pytest.mark.slow
def test_layers_at_both_ends_stay_in_16_bits() -> None:
    """With two layers, both ends are all layers: the same as without fp8. A pipeline chooses by a branch."""
    actual, half = (
        losses(PIPELINE, Fp8CurrentConfig(first_layers=1, last_layers=1), 3),
        Fp8CurrentConfig(first_layers=1),
    )
    np.testing.assert_allclose(actual, losses(ONE, None)[:3], rtol=2e-4)
    assert np.abs(losses(PIPELINE, half, 3) - actual).max() > 5e-4
    # Scales of parts of a batch differ, the 8-bit numbers do not: powers of two.
    assert losses(PIPELINE, half, 3)[0] == pytest.approx(losses(ONE, half, 1)[0], rel=1e-6)


@pytest.mark.parametrize(
    ("recomputed", "units"),
    [
        ({}, [1, 2, 1]),
        ({"recompute": "full", "layers_per_checkpoint": 2}, [1, 1]),
        ({"recompute_layers": 2}, [1, 1, 1, 1]),
    ],
)
def test_without_a_pipeline_layers_at_both_ends_are_spans_of_their_own(recomputed: dict, units: list[int]) -> None:
    """Their numbers are known, so no branch decides: a GPU may wait for the host at each."""
    model = replace(wide(), stack=replace(wide().stack, repeats=4), **({"recompute": "full"} | recomputed))
    program = build_program(model, ONE, microbatches=1, compute="bfloat16", isolated=False)
    precision = replace(program.cfg.precision, matmul=Fp8CurrentConfig(first_layers=1, last_layers=1))
    program = Program.of(program.cfg.but(precision=precision), program.mesh)
    stack = program.abstract.stack
    assert [span.units for span in stack.spans()] == units
    assert sum(span.units for span in Partition.even(4, 1, 1).spans(stack)) == sum(units)
    if recomputed:
        return
    with within(program):
        state, batch = start(program), place(program, rows())
        text = str(program.train_step.trace(state, batch).jaxpr)
    assert "f8_e4m3fn" in text and " cond[" not in text


def histories_by_layer(compiled_step: Compiled, state: TrainState) -> dict[str, np.ndarray]:
    """Histories with rows in the order of the layers; those of padding rows are zeros."""
    order = np.array(compiled_step.program.partition.order())
    actual = {path: np.asarray(history) for path, history in state.observed.items()}
    assert all((history[order < 0] == 0).all() for history in actual.values())
    return {path: history[order >= 0][np.argsort(order[order >= 0])] for path, history in actual.items()}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("parallel", "reference", "repeats", "gradients"),
    [
        # Stages sum the parts of the gradient of the loss, so it is rounded differently before it is cast.
        (UNEVEN, ONE, 3, False),
        (ParallelConfig(data=1, pipeline=2, virtual_stages=2, schedule="interleaved"), PIPELINE, 4, True),
    ],
    ids=["an uneven pipeline, whose padding rows stay zero", "an interleaved pipeline"],
)
def test_layouts_have_the_same_history(
    parallel: ParallelConfig, reference: ParallelConfig, repeats: int, gradients: bool
) -> None:
    """After one step; gradients: those of gradients too, or else up to the rounding of 8 bits."""
    expected_run, actual_run = (compiled(on, DELAYED, wide(repeats)) for on in (reference, parallel))
    (expected_state, losses), (state, actual) = (
        run(step, start(step.program), range(1)) for step in (expected_run, actual_run)
    )
    assert actual[0] == pytest.approx(losses[0], rel=1e-6)
    expected, histories = histories_by_layer(expected_run, expected_state), histories_by_layer(actual_run, state)
    assert len(expected) == 7 and all((history[..., 0] > 0).all() for history in expected.values())
    for path, history in histories.items():
        assert history.shape == (repeats, 3, 2) and history.dtype == np.float32
        exact = 3 if gradients else 2
        np.testing.assert_array_equal(history[:, :exact], expected[path][:, :exact], err_msg=path)
        np.testing.assert_allclose(history, expected[path], rtol=2**-3, err_msg=path)
        for shard in state.observed[path].addressable_shards:
            np.testing.assert_array_equal(shard.data, np.asarray(state.observed[path])[shard.index])


@pytest.mark.slow
def test_neither_a_skipped_step_nor_a_layer_in_16_bits_changes_the_history() -> None:
    step = compiled(ONE, replace(DELAYED, first_layers=1), controlled=True)
    broken = AS_IT_IS._replace(limits=np.array(GuardLimits(loss=-np.inf), np.float32))
    state, _ = run(step, start(step.program), range(2), AS_IT_IS)
    before = histories_by_layer(step, state)
    state, _ = run(step, state, range(2, 3), broken)
    assert int(state.skipped) == 1
    for path, history in histories_by_layer(step, state).items():
        np.testing.assert_array_equal(history, before[path])
        assert (history[0] == 0).all() and (history[1, :, 0] > 0).all()


def test_rows_follow_their_layers_to_another_pipeline() -> None:
    unsplit, pipelined = (prepared(on, DELAYED, wide(3)) for on in (ONE, UNEVEN))
    order = pipelined.partition.order()
    like = pipelined.state_like()
    target = like_stored(like, pipelined.arrays, unsplit.partition.order_of)
    assert {leaf.shape for leaf in target.observed.values()} == {(3, 3, 2)}
    values = {path: np.random.default_rng(0).random(leaf.shape, np.float32) for path, leaf in target.observed.items()}
    empty = jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), target)
    restored = jax.device_put(replace(empty, observed=values), jax.tree.map(lambda leaf: leaf.sharding, target))
    moved = reorder(restored, like, pipelined.arrays, unsplit.partition.order_of, pipelined.partition.order_of)
    for path, history in moved.observed.items():
        for row, layer in enumerate(order):
            np.testing.assert_array_equal(history[row], values[path][layer] if layer >= 0 else 0)


@pytest.mark.parametrize("settings", [{"history": 0}, {"margin": 100}])
def test_refusals(settings: dict[str, int]) -> None:
    cfg = prepared(ONE, DELAYED).cfg
    fp8 = Fp8DelayedConfig(**settings)
    with user_error(kind=ConfigError):
        check(cfg.but(precision=replace(cfg.precision, matmul=fp8)), 8)
