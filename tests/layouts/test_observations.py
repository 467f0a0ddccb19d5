"""What layers observe is the same on every layout: through scan, recomputation, microbatches, data and pipelines."""

from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from tiny_runs import LENGTH, ONE, QUICK, ROWS, build_program, llama, place, rows, start, within

from megajax.batch import Grads
from megajax.layers.context import Context
from megajax.layers.mlp.config import GatedMLPConfig
from megajax.layers.mlp.module import MLP
from megajax.layers.param import LayerSettings, observation
from megajax.layers.recompute import Recompute
from megajax.mesh.config import ParallelConfig
from megajax.mesh.layer_metrics import Measure
from megajax.mesh.layer_observations import Observed, observe
from megajax.training.program import Program


@dataclass(frozen=True, kw_only=True, slots=True)
class CountingConfig(GatedMLPConfig):
    """A gated MLP that observes its input."""

    def build(self, *args: Any, **kwargs: Any) -> "Counting":
        return Counting(self, *args, **kwargs)


@dataclass(frozen=True, slots=True)
class Halved:
    """An updater: layers read half of the previous value, plus the loss scale where there was none."""

    def shape(self, seen: tuple[int, ...]) -> tuple[int, ...]:
        return (*seen, 2)

    def used(self, state: Array, scale: Array) -> Array:
        return state[..., 0] / 2

    def updated(self, state: Array, seen: Array, scale: Array) -> Array:
        return jnp.stack([seen, state[..., 0]], axis=-1)

    def measures(self) -> tuple[Measure, ...]:
        return ()


class Counting(MLP):
    """Positions, positive inputs by column, and the largest input by column."""

    def __init__(self, cfg: CountingConfig, settings: LayerSettings):
        super().__init__(cfg, settings)
        self.positions = observation(Observed(shape=(), axes=(), reduction="sum"))
        self.positive = observation(Observed(shape=(settings.hidden,), axes=(None,), reduction="sum", updater=Halved()))
        self.largest = observation(Observed(shape=(settings.hidden,), axes=(None,), reduction="max"))

    def __call__(self, x: Array, ctx: Context) -> Array:
        y = observe(super().__call__(x, ctx), self.positions[...], jnp.float32(x.shape[0] * x.shape[1]))
        y = observe(y, self.positive[...], jnp.sum(x > 0, axis=(0, 1), dtype=jnp.float32))
        return observe(y, self.largest[...], jnp.max(jnp.abs(x), axis=(0, 1)))


def observing(parallel: ParallelConfig, recompute: Recompute, microbatches: int) -> Program:
    """A llama of three layers whose feed-forward layers count."""
    model = llama(recompute, repeats=3)
    (block,) = model.stack.pattern
    stack = replace(model.stack, pattern=(replace(block, mlp=CountingConfig(ffn=block.mlp.ffn)),))
    return build_program(replace(model, stack=stack), parallel, microbatches=microbatches)


@cache
def seen(parallel: ParallelConfig, recompute: Recompute, microbatches: int) -> dict[str, np.ndarray]:
    """Observations of a step, rows in the order of the layers; padding rows have none."""
    program = observing(parallel, recompute, microbatches)
    with within(program):
        inputs, batch = start(program).inputs, place(program, rows())
        arguments = inputs, batch, np.float32(8)
        compiled = jax.jit(program.grad_fn()).lower(*arguments).compile(compiler_options=dict(QUICK))
        grads: Grads = jax.device_get(compiled(*arguments))
    order = np.array(program.partition.order())
    assert set(grads.grads) == set(program.declared) and set(grads.observed) == set(program.observed)
    assert all(np.isfinite(g).all() for g in grads.grads.values())
    assert not any(array[order < 0].any() for array in grads.observed.values())
    return {path: array[order >= 0][np.argsort(order[order >= 0])] for path, array in grads.observed.items()}


def test_sums_and_maxima_equal_those_of_one_device() -> None:
    """With an uneven pipeline, over data and tensor, in microbatches that are computed again."""
    uneven = ParallelConfig(data=2, pipeline=2, tensor=2, layers=(1, 2), sequence=True)
    first, second = seen(ONE, "none", 1), seen(uneven, "full", 3)
    mlp = "stack.blocks.0.mlp"
    assert set(first) == set(second) == {f"{mlp}.positions.sum", f"{mlp}.positive.sum", f"{mlp}.largest.max"}
    np.testing.assert_array_equal(second[f"{mlp}.positions.sum"], [ROWS * LENGTH] * 3)
    np.testing.assert_array_equal(second[f"{mlp}.positive.sum"], first[f"{mlp}.positive.sum"])
    np.testing.assert_allclose(second[f"{mlp}.largest.max"], first[f"{mlp}.largest.max"], rtol=1e-5)
    assert first[f"{mlp}.positive.sum"].min() > 0 and first[f"{mlp}.positive.sum"].max() < ROWS * LENGTH


def test_updaters_turn_them_into_state_and_the_optimizer_never_sees_them() -> None:
    program = observing(ONE, "none", 1)
    state = program.state_like()
    assert set(state.observed) == set(program.observed) and not set(program.observed) & set(program.declared)
    assert set(state.params) == set(program.declared) == set(state.optimizer["first_moment"])
    path = "stack.blocks.0.mlp.positive.sum"
    assert state.observed[path].shape == (3, 32, 2)
    with within(program):
        first = start(program)
        saved = np.asarray(first.observed[path])
        np.testing.assert_array_equal(program.used(first.inputs)[path], saved[..., 0] / 2)
        step = program.train_step.lower(first, place(program, rows())).compile(compiler_options=dict(QUICK))
        second, _ = step(first, place(program, rows()))
        counts = np.asarray(second.observed[path])
        third, _ = step(second, place(program, rows()))
    np.testing.assert_array_equal(counts[..., 0], seen(ONE, "none", 1)[path])
    np.testing.assert_array_equal(np.asarray(third.observed[path])[..., 1], counts[..., 0])
    assert not counts[..., 1].any()
