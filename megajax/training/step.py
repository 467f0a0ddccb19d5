"""The train step and the evaluation step."""

from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
from jax import Array

from megajax.batch import LMBatch, Params
from megajax.optim.optimizer import AdamW, clip_factor, global_norm
from megajax.optim.schedule import Schedule
from megajax.precision.loss_scale import UNSCALED, LossScaler
from megajax.training.grads import GradFn
from megajax.training.state import TrainState

type Metrics = Mapping[str, Array]
type TrainStep = Callable[..., tuple[TrainState, Metrics]]
"""(state, batch) -> (state, metrics); with several processes (state, batch, flags), see `make_train_step`."""

STOP = "stop"
"""Metric of a step that carried flags: whether some process was asked to stop, int32 []."""


def make_train_step(
    grad_fn: GradFn,
    optimizer: AdamW,
    schedule: Schedule,
    shardings: TrainState,
    options: Mapping[str, bool | int] | None = None,
    scaler: LossScaler = UNSCALED,
) -> TrainStep:
    """Jitted (state, batch [M, B, S]) -> (state, metrics); donates the state, which keeps its layout.

    A step whose loss or gradient norm is not finite changes no weight and is counted as skipped. With a third argument,
    int32 [devices] with an element on each, their maximum comes back among the metrics, so that all processes learn
    what one of them says, in a reduction that waits for nothing the step does not wait for.

    options: of the compiler, see megajax.config.xla; scaler: says what becomes of the loss scale.
    """
    on_optimizer = shardings.optimizer["first_moment"]

    def train_step(state: TrainState, batch: LMBatch, flags: Array | None = None) -> tuple[TrainState, Metrics]:
        out = grad_fn(state.params, batch, state.loss_scale)
        divisor = jnp.maximum(out.weight_sum, 1e-8) * state.loss_scale
        grads = place({path: g / divisor for path, g in out.grads.items()}, on_optimizer)
        norm = global_norm(grads)
        finite = jnp.isfinite(norm) & jnp.isfinite(out.loss_sum)
        factor = clip_factor(norm, optimizer.cfg.clip)
        grads = {path: g * factor for path, g in grads.items()}

        lr = schedule(state.scheduled_samples)
        params = place(state.params, on_optimizer)
        updated, moments = optimizer.update(grads, state.optimizer, params, lr=lr)
        rows = batch.sample.size
        scale, counters = scaler.update(state.loss_scale, state.scale_counters, finite)
        new = TrainState(
            step=state.step + 1,
            params=place(select(finite, updated, params), shardings.params),
            optimizer=select(finite, moments, state.optimizer),
            loss_scale=scale,
            scale_counters=counters,
            consumed_samples=state.consumed_samples + jnp.uint32(rows),
            scheduled_samples=state.scheduled_samples + jnp.where(finite, rows, 0),
            skipped=state.skipped + ~finite,
        )
        reported = {
            name: jnp.where(weight > 0, total / weight, jnp.nan) for name, (total, weight) in out.metrics.items()
        }
        if flags is not None:
            reported[STOP] = jnp.max(flags)
        return new, reported | {"grad_norm": norm, "lr": lr, "loss_scale": state.loss_scale, "skipped": ~finite}

    return jax.jit(
        train_step,
        donate_argnums=0,
        out_shardings=(shardings, None),
        compiler_options=None if options is None else dict(options),
    )


def make_eval_step(sums: Callable[[Params, LMBatch], Mapping[str, tuple[Array, Array]]]) -> Callable:
    """Jitted (weights, batch [M, B, S]) -> {name: (sum, weight)}."""
    return jax.jit(sums)


def place(tree: Params, shardings: Mapping[str, jax.sharding.Sharding]) -> Params:
    """Move every array to its layout."""
    return {path: jax.lax.with_sharding_constraint(x, shardings[path]) for path, x in tree.items()}


def select[T](keep_new: Array, new: T, old: T) -> T:
    """Leaf by leaf: new where keep_new, else old."""
    return jax.tree.map(lambda a, b: jnp.where(keep_new, a, b), new, old)
