"""A train step with limits from the host: suspicious updates are not applied, and the step can be run again.

The compiled step compares loss and gradient norm with the limits before it changes the state, with the same result on
all devices. A step that will be run again changes nothing, nor do the steps that were dispatched after it before the
host knew.
"""

from dataclasses import replace
from typing import NamedTuple

import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import Sharding

from megajax.batch import Batch, Grads, Params
from megajax.training.gradients.grads import GradFn
from megajax.training.state import TrainState
from megajax.training.step import Metrics, StepParts, TrainStep, Update, apply_update, compute_update, plain_step
from megajax.training.step_report import GuardLimits

RERUN = "rerun"
"""Metric of a guarded step, bool []: whether it changed nothing because it or a step before it will be run again."""
STOP = "stop"
"""Metric of a step with flags: whether any process was asked to stop, int32 []."""
SECONDS = "seconds"
"""Metric of a step with seconds: float32 [devices, phases], the seconds of each device's process."""
COUNTERS = ("step", "loss_scale", "scale_counters", "consumed_samples", "scheduled_samples", "skipped")
"""Fields of the state that change even if the update is not applied."""


class StepControl(NamedTuple):
    """The inputs of a step besides state and batch; None: the step runs without the input."""

    flags: Array | None = None
    """int32 [devices]: 1 if the process of the device was asked to stop."""
    seconds: Array | None = None
    """float32 [devices, phases]: seconds of each phase in the process of the device."""
    limits: Array | None = None
    """float32 [6]: GuardLimits."""
    rerun: Array | None = None
    """bool []: a step before this one will be run again, so this one changes nothing. Given with limits."""


NO_CONTROL = StepControl()


def exchanging(step: TrainStep, replicated: Sharding) -> TrainStep:
    """The step (state, batch, control) that adds the maximum of control's flags, and its seconds, to the metrics.

    replicated: the sharding of a replicated array.
    """

    def train_step(state: TrainState, batch: Batch, control: StepControl = NO_CONTROL) -> tuple[TrainState, Metrics]:
        state, metrics = step(state, batch, control)
        exchanged = {}
        if control.flags is not None:
            exchanged[STOP] = jnp.max(control.flags)
        if control.seconds is not None:
            exchanged[SECONDS] = lax.with_sharding_constraint(control.seconds, replicated)
        return state, {**metrics, **exchanged}

    return train_step


def guarded(parts: StepParts, *, drills: bool = False) -> TrainStep:
    """(state, batch, control) -> (state, metrics): with limits the guarded step, else the plain step.

    drills: whether limits may have factors other than 1.
    """
    plain = plain_step(parts)

    def train_step(state: TrainState, batch: Batch, control: StepControl) -> tuple[TrainState, Metrics]:
        if control.limits is None:
            return plain(state, batch)
        assert control.rerun is not None  # given with limits
        limits = GuardLimits(*control.limits)
        faulty = replace(parts, grad_fn=with_fault(parts.grad_fn, limits)) if drills else parts
        update = compute_update(faulty, state, batch)
        apply, rerun = should_apply(update, limits, control.rerun)
        new, metrics = apply_update(parts, state, batch, update, apply)
        counters = {name: jnp.where(rerun, getattr(state, name), getattr(new, name)) for name in COUNTERS}
        return replace(new, **counters), {**metrics, RERUN: lax.with_sharding_constraint(rerun, parts.shardings.step)}

    return train_step


def should_apply(update: Update, limits: GuardLimits, rerun_before: Array) -> tuple[Array, Array]:
    """(whether the update is applied, whether nothing changes because a step will be run again), bool [] each.

    rerun_before: the second result of the step before. The loss is in nats per token, nan where no token counts.
    """
    loss, norm = update.metrics["loss"], update.metrics["grad_norm"]
    high = jnp.where(jnp.isnan(loss), 0.0, loss) > limits.loss
    suspicious = jnp.where(update.finite, high, ~(update.metrics["loss_scale"] > limits.loss_scale))
    rerun = rerun_before | (suspicious & ~(limits.final > 0))
    return update.finite & ~high & ~(norm > limits.norm) & ~rerun, rerun


def with_fault(grad_fn: GradFn, limits: GuardLimits) -> GradFn:
    """A gradient function whose loss and gradients are multiplied by the factors of a drill."""

    def faulty(params: Params, batch: Batch, scale: Array) -> Grads:
        out = grad_fn(params, batch, scale)
        total, weight = out.metrics["loss"]
        return out._replace(
            loss_sum=out.loss_sum * limits.loss_factor,
            grads={path: g * limits.gradient_factor for path, g in out.grads.items()},
            metrics={**out.metrics, "loss": (total * limits.loss_factor, weight)},
        )

    return faulty
