"""The train step and the evaluation step."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from types import MappingProxyType

import jax
import jax.numpy as jnp
from jax import Array

from megajax.batch import SAMPLE, Batch, Params
from megajax.config.xla import Value
from megajax.layers.param import ParamSpec
from megajax.optim.offload import at_rest, on_device
from megajax.optim.optimizer import Optimizer, clip_factor, global_norm
from megajax.optim.schedule import Schedule
from megajax.precision.loss_scale import UNSCALED, LossScaler, in_range
from megajax.training.grads import GradFn
from megajax.training.guard import NOTHING, Orders, Told, judge
from megajax.training.observations import updated
from megajax.training.state import TrainState

type Metrics = Mapping[str, Array]
type TrainStep = Callable[..., tuple[TrainState, Metrics]]
"""(state, batch) -> (state, metrics); or (state, batch, Told), see `make_train_step`."""

STOP = "stop"
"""Metric of a step that was told flags: whether some process was asked to stop, int32 []."""
SECONDS = "seconds"
"""Metric of a step that was told seconds: their least and largest over the processes, float32 [2, phases]."""
HELD = "held"
"""Metric of a step with orders: whether it, or one before it, is to be run again and it changed nothing, bool []."""
COUNTERS = ("step", "loss_scale", "scale_counters", "consumed_samples", "scheduled_samples", "skipped")
"""What changes in a state though no update is made."""


def alone(batch: Batch) -> int:
    """The weight of gradients that are left as they are."""
    del batch
    return 1


def make_train_step(
    grad_fn: GradFn,
    optimizer: Optimizer,
    schedule: Schedule,
    shardings: TrainState,
    options: Mapping[str, Value] | None = None,
    scaler: LossScaler = UNSCALED,
    weight: Callable[[Batch], int] = alone,
    observed: Mapping[str, ParamSpec] = MappingProxyType({}),
) -> TrainStep:
    """Jitted (state, batch [M, B, ...]) -> (state, metrics); donates the state, which keeps its layout.

    A step whose loss or gradient norm is not finite changes no weight and is counted as skipped; a third argument may
    give orders of another kind (see `judge`). Of what processes tell with a step, the largest comes back in the
    metrics, so that all learn what one of them says, in a reduction that waits for nothing else.

    options: of the compiler, see megajax.config.xla; scaler: says what becomes of the loss scale; weight: about what a
    device's losses add up to, see `in_range`; observed: observations by path.
    """
    parts = (part for part in shardings.optimizer.values() if isinstance(part, dict))
    on_optimizer = {path: sharding.with_memory_kind("device") for part in parts for path, sharding in part.items()}

    def train_step(state: TrainState, batch: Batch, told: Told = NOTHING) -> tuple[TrainState, Metrics]:
        loss_scale = state.loss_scale * in_range(weight(batch))
        out = grad_fn(state.inputs, batch, loss_scale)
        orders = Orders() if told.orders is None else Orders(*told.orders)
        divisor = jnp.maximum(out.weight_sum, 1e-8) * loss_scale / orders.gradient_factor
        grads = place({path: out.grads[path] / divisor for path in state.params}, on_optimizer)
        norm = global_norm(grads)
        finite = jnp.isfinite(norm) & jnp.isfinite(out.loss_sum * orders.loss_factor)
        factor = clip_factor(norm, optimizer.cfg.clip)
        grads = {path: g * factor for path, g in grads.items()}

        lr = schedule(state.scheduled_samples)
        params = place(state.params, on_optimizer)
        rates = partial(schedule.rates, state.scheduled_samples, optimizer.cfg.weight_decay)
        before = on_device(state.optimizer, optimizer.cfg.offload)
        new_params, moments = optimizer.update(grads, before, params, rates=rates)
        rows = batch[SAMPLE].size
        scale, counters = scaler.update(state.loss_scale, state.scale_counters, finite)
        reported = {
            name: jnp.where(weight > 0, total / weight, jnp.nan) for name, (total, weight) in out.metrics.items()
        }
        reported["loss"] *= orders.loss_factor
        made, held = judge(told, finite=finite, loss=reported["loss"], norm=norm, scale=state.loss_scale)
        new = TrainState(
            step=state.step + 1,
            params=place(select(made, new_params, params), shardings.params),
            optimizer=at_rest(select(made, moments, before), optimizer.cfg.offload),
            loss_scale=scale,
            scale_counters=counters,
            consumed_samples=state.consumed_samples + jnp.uint32(rows),
            scheduled_samples=state.scheduled_samples + jnp.where(made, rows, 0),
            skipped=state.skipped + ~made,
            observed=select(made, updated(observed, state.observed, out.observed, loss_scale), state.observed),
        )
        if told.held is not None:
            kept = {name: jnp.where(held, getattr(state, name), getattr(new, name)) for name in COUNTERS}
            new = replace(new, **kept)
            reported[HELD] = jax.lax.with_sharding_constraint(held, shardings.step)
        if told.flags is not None:
            reported[STOP] = jnp.max(told.flags)
        if told.seconds is not None:
            reported[SECONDS] = jnp.stack([told.seconds.min(0), told.seconds.max(0)])
        reported |= optimizer.measures(grads, new.params)
        return new, reported | {"grad_norm": norm, "lr": lr, "loss_scale": state.loss_scale, "skipped": ~made}

    return jax.jit(
        train_step,
        donate_argnums=0,
        out_shardings=(shardings, None),
        compiler_options=None if options is None else dict(options),
    )


def make_eval_step(
    sums: Callable[[Params, Batch], Mapping[str, tuple[Array, Array]]], options: Mapping[str, Value] | None = None
) -> Callable:
    """Jitted (weights, batch [M, B, ...]) -> {name: (sum, weight)}; options: of the compiler."""

    def eval_step(weights: Params, batch: Batch) -> Mapping[str, tuple[Array, Array]]:
        return sums(weights, batch)

    return jax.jit(eval_step, compiler_options=None if options is None else dict(options))


def place(tree: Params, shardings: Mapping[str, jax.sharding.Sharding]) -> Params:
    """Move every array to its layout."""
    return {path: jax.lax.with_sharding_constraint(x, shardings[path]) for path, x in tree.items()}


def select[T](keep_new: Array, new: T, old: T) -> T:
    """Leaf by leaf: new where keep_new, else old."""
    return jax.tree.map(lambda a, b: jnp.where(keep_new, a, b), new, old)
