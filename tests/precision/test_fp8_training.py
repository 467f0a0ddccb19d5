"""Training with matmuls in 8 bits: beside bfloat16 and on other layouts, with delayed scales of the same history.

Sums in another order move numbers by the last bit of bfloat16, some of them across the border between two of the 8-bit
format, where they land 2**-4 apart. So after a few steps layouts differ by about as much as 8 bits differ from 16, ten
times what they differ by in bfloat16. Before the first update they differ only where sums are cut: over tensor.
"""

from dataclasses import replace
from functools import cache
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import numpy as np
import pytest
from tiny_runs import ONE, QUICK, Program, build_program, place, rows, start, wide, within

from megajax.config.compose import check
from megajax.config.errors import ConfigError
from megajax.job.start.layer_order import like_stored, reorder
from megajax.mesh.config import ParallelConfig
from megajax.mesh.mesh import build_mesh
from megajax.pipeline.partition import Partition
from megajax.precision.config import (
    Fp8BlocksConfig,
    Fp8CurrentConfig,
    Fp8DelayedConfig,
    MatmulConfig,
    Mxfp8Config,
    Nvfp4Config,
)
from megajax.training.limits.step import StepControl
from megajax.training.state import TrainState
from megajax.training.step_report import GuardLimits

FSDP = ParallelConfig(data=2, data_sharding="fsdp")
PIPELINE = ParallelConfig(data=1, pipeline=2)
TENSOR = ParallelConfig(data=1, tensor=2, sequence=True)
UNEVEN = ParallelConfig(data=1, pipeline=2, layers=(1, 2))
EVERYTHING = ParallelConfig(data=2, pipeline=2, tensor=2, sequence=True)
AS_IT_IS = StepControl(limits=np.array(GuardLimits(), np.float32), rerun=np.bool(False))
ROUNDED = MappingProxyType({**QUICK, "xla_allow_excess_precision": False})
"""Compiler options: bfloat16 is rounded in the same places in every program."""
MICROBATCHES, STEPS = 6, 20
APART = 1e-2
"""Of losses around 5.6 on 384 tokens; the largest observed difference was 5.3e-3."""
APART_4_BITS = 3e-2
"""Of the same losses with NVFP4 in all layers; the largest observed difference was 1.9e-2."""
NVFP4 = Nvfp4Config(first_layers=0, last_layers=0)
CURRENT, DELAYED = Fp8CurrentConfig(), Fp8DelayedConfig(history=2, algorithm="max")


class Compiled(NamedTuple):
    program: Program
    step: Any


@cache
def prepared(parallel: ParallelConfig, fp8: MatmulConfig | None, repeats: int = 2) -> Program:
    """Not compiled."""
    microbatches = MICROBATCHES // parallel.data_size(2)
    program = build_program(wide(repeats), parallel, microbatches=microbatches, compute="bfloat16", isolated=False)
    precision, schedule = replace(program.cfg.precision, matmul=fp8), replace(program.cfg.schedule, lr=1e-3)
    cfg = program.cfg.but(precision=precision, schedule=schedule, steps=STEPS)
    # A recipe for no layers is refused, but has a program.
    assert all("leave none" in problem.message for problem in cfg.problems(8))
    return Program.of(cfg, build_mesh(parallel))


@cache
def compiled(
    parallel: ParallelConfig, fp8: MatmulConfig | None, repeats: int = 2, *, controlled: bool = False
) -> Compiled:
    """A train step that takes a StepControl if `controlled`."""
    program = prepared(parallel, fp8, repeats)
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
def losses(parallel: ParallelConfig, fp8: MatmulConfig | None, steps: int = STEPS) -> np.ndarray:
    step = compiled(parallel, fp8)
    return np.array(run(step, start(step.program), range(steps))[1])


@pytest.mark.slow
@pytest.mark.parametrize(
    "fp8",
    [CURRENT, Fp8CurrentConfig(format="e4m3"), DELAYED, Fp8BlocksConfig(), Mxfp8Config()],
    ids=["current", "e4m3", "delayed", "blocks", "mxfp8"],
)
def test_twenty_steps_beside_bfloat16(fp8: MatmulConfig) -> None:
    assert 0 < np.abs(losses(ONE, fp8) - losses(ONE, None)).max() < APART


@pytest.mark.slow
@pytest.mark.parametrize(
    ("parallel", "fp8"),
    [
        (EVERYTHING, CURRENT),
        (ParallelConfig(data=1, context=2, context_strategy="ring"), CURRENT),
        (EVERYTHING, DELAYED),
    ],
)
def test_twenty_steps_on_other_layouts(parallel: ParallelConfig, fp8: MatmulConfig) -> None:
    assert np.abs(losses(parallel, fp8) - losses(ONE, fp8)).max() < APART


@pytest.mark.slow
@pytest.mark.parametrize("recipe", [Fp8BlocksConfig(), Mxfp8Config(), NVFP4], ids=["blocks", "mxfp8", "nvfp4"])
def test_blocks_on_other_layouts(recipe: MatmulConfig) -> None:
    """The first step is the same: a device rounds its own rows and layers. Then last bits of bfloat16 decide."""
    apart = APART_4_BITS if recipe == NVFP4 else APART
    for parallel in (FSDP, PIPELINE):
        actual, expected = losses(parallel, recipe), losses(ONE, recipe)
        assert actual[0] == pytest.approx(expected[0], rel=1e-6)
        assert np.abs(actual - expected).max() < apart


@pytest.mark.slow
def test_4_bits_beside_bfloat16_and_over_tensor() -> None:
    assert 0 < np.abs(losses(ONE, NVFP4) - losses(ONE, None)).max() < APART_4_BITS
    assert np.abs(losses(TENSOR, NVFP4) - losses(ONE, NVFP4)).max() < APART_4_BITS


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
        (FSDP, ONE, 2, True),
        # Stages sum the parts of the gradient of the loss, so it is rounded differently before it is cast.
        (UNEVEN, ONE, 3, False),
        (ParallelConfig(data=1, pipeline=2, virtual_stages=2, schedule="interleaved"), PIPELINE, 4, True),
    ],
    ids=["fsdp", "an uneven pipeline, whose padding rows stay zero", "an interleaved pipeline"],
)
def test_layouts_have_the_same_history(
    parallel: ParallelConfig, reference: ParallelConfig, repeats: int, gradients: bool
) -> None:
    """After one step; gradients: those of gradients too, or else up to the rounding of 8 bits."""
    expected_run, actual_run = compiled(reference, DELAYED, repeats), compiled(parallel, DELAYED, repeats)
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


def test_histories_are_no_weights() -> None:
    delayed, plain = prepared(ONE, DELAYED), prepared(ONE, CURRENT)
    assert delayed.declared == plain.declared and not plain.observed
    assert set(delayed.arrays) == set(delayed.observed) | set(delayed.declared) and not set(delayed.observed) & set(
        delayed.declared
    )
    state = delayed.state_like()
    assert set(state.params) == set(delayed.declared) == set(state.optimizer["first_moment"])
    assert set(state.observed) == set(delayed.observed) and plain.state_like().observed == {}


def test_rows_follow_their_layers_to_another_pipeline() -> None:
    unsplit, pipelined = prepared(ONE, DELAYED, 3), prepared(UNEVEN, DELAYED, 3)
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


@pytest.mark.parametrize(("settings", "message"), [({"history": 0}, "at least 1"), ({"margin": 100}, "between")])
def test_refusals(settings: dict[str, int], message: str) -> None:
    cfg = prepared(ONE, DELAYED).cfg
    fp8 = Fp8DelayedConfig(**settings)
    with pytest.raises(ConfigError, match=message):
        check(cfg.but(precision=replace(cfg.precision, matmul=fp8)), 8)
