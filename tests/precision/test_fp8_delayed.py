"""Delayed scales of 8-bit matmuls: against numpy, and the same history on all layouts."""

from dataclasses import replace
from functools import cache
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_runs import ONE, QUICK, Program, build_program, place, rows, start, wide, within

from megajax.config.compose import check
from megajax.config.errors import ConfigError
from megajax.job.start.layer_order import like_stored, reorder
from megajax.mesh.config import ParallelConfig
from megajax.mesh.layer_observations import accumulated
from megajax.mesh.mesh import build_mesh
from megajax.precision.config import DelayedScalingConfig, Fp8Config
from megajax.precision.fp8 import STARTS, AmaxHistory, Fp8Matmul
from megajax.training.guarded.step import GuardLimits, StepControl
from megajax.training.state import TrainState

LARGEST = {"e4m3": 448.0, "e5m2": 57344.0}
DIGITS = {"e4m3": (3, -6), "e5m2": (2, -14)}
EQUATION = "bsd,df->bsf"


def rounded(x: np.ndarray, form: str, expected: float, margin: int) -> np.ndarray:
    """x as stored in 8 bits under the scale made for `expected`, float64, by the formats' definition."""
    digits, smallest = DIGITS[form]
    scale = 2.0 ** (np.floor(np.log2(LARGEST[form] / expected)) - margin)
    y = np.clip(np.asarray(x, np.float64) * scale, -LARGEST[form], LARGEST[form])
    step = np.ldexp(1.0, np.maximum(np.frexp(y)[1] - 1, smallest) - digits)
    return np.round(y / step) * step / scale


@pytest.mark.parametrize("algorithm", ["most_recent", "max"])
def test_four_steps_equal_those_of_numpy(algorithm: str) -> None:
    """History 2; magnitudes fall and rise so that the two algorithms differ and some values are clipped."""
    cfg = Fp8Config(delayed=DelayedScalingConfig(history=2, algorithm=algorithm, margin=1))
    history, multiply = AmaxHistory(cfg.delayed, token_share=0.5), Fp8Matmul(cfg)
    state, scale = jnp.zeros((3, 2)), jnp.float32(8)
    past: list[np.ndarray] = []
    rng, clipped = np.random.default_rng(0), 0
    for size in (1.0, 0.01, 0.0001, 100.0):
        x, w, dy = (rng.normal(0, size, shape) for shape in ((2, 16, 32), (32, 48), (2, 16, 48)))
        used = history.used(state, scale)
        y, pull = jax.vjp(lambda x, w, e: multiply(EQUATION, x, w, e), jnp.float32(x), jnp.float32(w), used)
        dx, dw, observed = pull(jnp.float32(dy))

        before = past[-1:] if algorithm == "most_recent" else past[-2:]
        expected = np.max(before, axis=0) if past else np.array(STARTS) * [1, 1, 0.5]
        expected = expected * [1, 1, 8]
        now = np.array([np.abs(np.float32(a)).max() for a in (x, w, dy)])
        np.testing.assert_array_equal(observed, now)
        sx, sw, sdy = (
            rounded(np.float32(a), form, e, 1)
            for a, form, e in zip((x, w, dy), ("e4m3", "e4m3", "e5m2"), expected, strict=True)
        )
        clipped += np.abs(sx).max() < np.abs(x).max() / 2
        for actual, exact in (
            (y, np.einsum(EQUATION, sx, sw)),
            (dx, np.einsum("bsf,df->bsd", sdy, sw)),
            (dw, np.einsum("bsd,bsf->df", sx, sdy)),
        ):
            np.testing.assert_allclose(actual, exact, rtol=0, atol=2e-6 * np.abs(exact).max() + 1e-30)
        state = history.updated(state, observed, scale)
        past.append(now / [1, 1, 8])
        np.testing.assert_allclose(state[:, 0], past[-1], rtol=1e-7)
    assert clipped == 1, "the last step is far larger than what the scales were made for"


def test_values_outside_the_step_are_not_recorded_and_infinities_are_visible() -> None:
    history = AmaxHistory(DelayedScalingConfig(history=3), token_share=1.0)
    state = jnp.arange(1.0, 10).reshape(3, 3)
    actual = history.updated(state, jnp.array([5.0, 0.0, 6.0]), jnp.float32(2))
    np.testing.assert_array_equal(actual, [[5, 1, 2], [4, 5, 6], [3, 7, 8]])
    x = jnp.ones((2, 16, 32)).at[0, 0, 0].set(jnp.inf)
    y = Fp8Matmul(Fp8Config())(EQUATION, x, jnp.ones((32, 48)), jnp.ones(3))
    assert np.isnan(y[0, 0]).all() and np.isfinite(y[1]).all()
    total = accumulated("0.mlp.up.amax.max", jnp.array([1.0, 4.0, 1.0]), jnp.array([2.0, 3.0, jnp.nan]))
    np.testing.assert_array_equal(total, [2, 4, np.nan])
    np.testing.assert_array_equal(accumulated("0.mlp.up", jnp.ones(2), jnp.ones(2)), [2, 2])


LAYOUTS = {
    "data": ParallelConfig(data=2, data_sharding="zero1"),
    "fsdp": ParallelConfig(data=2, data_sharding="fsdp"),
    "pipeline": ParallelConfig(data=1, pipeline=2),
    "uneven pipeline": ParallelConfig(data=1, pipeline=2, layers=(1, 2)),
    "pipeline, data and tensor": ParallelConfig(data=2, pipeline=2, tensor=2, sequence=True),
}
AS_IT_IS = StepControl(limits=np.array(GuardLimits(), np.float32), rerun=np.bool(False))
ROUNDED = MappingProxyType({**QUICK, "xla_allow_excess_precision": False})
"""Compiler options: bfloat16 is rounded in the same places in every program."""
MICROBATCHES, STEPS, APART = 6, 20, 1e-2
DELAYED = Fp8Config(delayed=DelayedScalingConfig(history=2, algorithm="max"))


class Compiled(NamedTuple):
    program: Program
    step: Any


@cache
def prepared(parallel: ParallelConfig, fp8: Fp8Config | None, repeats: int = 2) -> Program:
    """Not compiled."""
    program = build_program(
        wide(repeats), parallel, microbatches=MICROBATCHES // parallel.data_size(2), compute="bfloat16"
    )
    cfg = program.cfg.but(
        precision=replace(program.cfg.precision, fp8=fp8), schedule=replace(program.cfg.schedule, lr=1e-3), steps=STEPS
    )
    assert not cfg.problems(8)
    return Program.of(cfg, build_mesh(parallel))


@cache
def compiled(
    parallel: ParallelConfig, fp8: Fp8Config | None, repeats: int = 2, *, controlled: bool = False
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


def histories_by_layer(compiled_step: Compiled, state: TrainState) -> dict[str, np.ndarray]:
    """Histories with rows in the order of the layers; those of padding rows are zeros."""
    order = np.array(compiled_step.program.partition.order())
    actual = {path: np.asarray(history) for path, history in state.observed.items()}
    assert all((history[order < 0] == 0).all() for history in actual.values())
    return {path: history[order >= 0][np.argsort(order[order >= 0])] for path, history in actual.items()}


def same_after_a_step(
    parallel: ParallelConfig, reference: ParallelConfig = ONE, repeats: int = 2, *, gradients: bool = True
) -> None:
    """Histories after one step; gradients: those of gradients too, or else up to the rounding of 8 bits."""
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
def test_data_parallelism_has_the_history_of_one_device() -> None:
    same_after_a_step(LAYOUTS["data"])


@pytest.mark.slow
def test_fsdp_has_the_history_of_one_device() -> None:
    same_after_a_step(LAYOUTS["fsdp"])


@pytest.mark.slow
def test_a_pipeline_has_the_history_of_one_device_and_padding_rows_stay_zero() -> None:
    """Stages sum the parts of the gradient of the loss, so it is rounded differently before it is cast."""
    same_after_a_step(LAYOUTS["uneven pipeline"], repeats=3, gradients=False)


@pytest.mark.slow
@pytest.mark.parametrize(
    "parallel",
    [ParallelConfig(data=2, pipeline=2), ParallelConfig(data=1, pipeline=2, virtual_stages=2, schedule="interleaved")],
)
def test_pipelines_have_the_same_history(parallel: ParallelConfig) -> None:
    same_after_a_step(parallel, LAYOUTS["pipeline"], repeats=4)


@pytest.mark.slow
def test_a_skipped_step_does_not_change_them() -> None:
    step = compiled(ONE, DELAYED, controlled=True)
    broken = AS_IT_IS._replace(limits=np.array(GuardLimits(loss=-np.inf), np.float32))
    state, _ = run(step, start(step.program), range(2), AS_IT_IS)
    before = histories_by_layer(step, state)
    state, _ = run(step, state, range(2, 3), broken)
    assert int(state.skipped) == 1
    for path, history in histories_by_layer(step, state).items():
        np.testing.assert_array_equal(history, before[path])


@pytest.mark.slow
def test_twenty_steps_beside_current_scaling_and_bfloat16() -> None:
    losses = {}
    for name, fp8 in (("delayed", DELAYED), ("current", Fp8Config()), ("bfloat16", None)):
        step = compiled(ONE, fp8)
        losses[name] = np.array(run(step, start(step.program), range(STEPS))[1])
    for name in ("current", "bfloat16"):
        print(name, np.abs(losses["delayed"] - losses[name]).max())
        assert 0 < np.abs(losses["delayed"] - losses[name]).max() < APART


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["data", "pipeline", "pipeline, data and tensor"])
def test_twenty_steps_on_other_layouts(layout: str) -> None:
    expected_run, actual_run = compiled(ONE, DELAYED), compiled(LAYOUTS[layout], DELAYED)
    (_, expected), (_, actual) = (run(step, start(step.program), range(STEPS)) for step in (expected_run, actual_run))
    print(layout, np.abs(np.array(actual) - expected).max())
    assert np.abs(np.array(actual) - expected).max() < APART


@pytest.mark.slow
def test_16_bit_layers_have_no_history() -> None:
    step = compiled(ONE, replace(DELAYED, first_layers=1))
    state, _ = run(step, start(step.program), range(1))
    for history in histories_by_layer(step, state).values():
        assert (history[0] == 0).all() and (history[1, :, 0] > 0).all()


def test_histories_are_no_weights() -> None:
    delayed, plain = prepared(ONE, DELAYED), prepared(ONE, Fp8Config())
    assert delayed.declared == plain.declared and not plain.observed
    assert set(delayed.arrays) == set(delayed.observed) | set(delayed.declared) and not set(delayed.observed) & set(
        delayed.declared
    )
    state = delayed.state_like()
    assert set(state.params) == set(delayed.declared) == set(state.optimizer["first_moment"])
    assert set(state.observed) == set(delayed.observed) and plain.state_like().observed == {}


def test_rows_follow_their_layers_to_another_pipeline() -> None:
    unsplit, pipelined = prepared(ONE, DELAYED, 3), prepared(LAYOUTS["uneven pipeline"], DELAYED, 3)
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
    fp8 = Fp8Config(delayed=DelayedScalingConfig(**settings))
    with pytest.raises(ConfigError, match=message):
        check(cfg.but(precision=replace(cfg.precision, fp8=fp8)), 8)
