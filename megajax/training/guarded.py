"""A train step that the host has limits for: suspicious updates are not applied, and the step can be run again.

The verdict falls within the compiled step, on every device alike, before anything is changed. A step that is to be run
again changes nothing at all, and those dispatched after it, which cannot know yet, change nothing either.
"""

from dataclasses import replace
from math import inf
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array, lax

from megajax.batch import Batch, Grads, Params
from megajax.training.grads import GradFn
from megajax.training.state import TrainState
from megajax.training.step import Metrics, StepParts, TrainStep, Update, apply_update, compute_update, plain_step

HELD = "held"
"""Metric of a guarded step: whether it, or one before it, is to be run again and it changed nothing, bool []."""
COUNTERS = ("step", "loss_scale", "scale_counters", "consumed_samples", "scheduled_samples", "skipped")
"""What changes in a state though no update is applied."""


class GuardLimits(NamedTuple):
    """What the host says of one step; within a step each is a float32 []."""

    loss: Any = inf
    """Updates of a larger loss are not applied."""
    norm: Any = inf
    """Updates of a larger gradient norm are not applied."""
    final: Any = 1.0
    """Above 0: the step is not to be run again, whatever comes."""
    loss_scale: Any = inf
    """Loss scale above which an overflow is nothing unusual."""
    loss_factor: Any = 1.0
    """What the loss is multiplied by: 1, but in a drill."""
    gradient_factor: Any = 1.0
    """What the gradients are multiplied by: 1, but in a drill."""


class StepControl(NamedTuple):
    """What a step of a run takes beside its batch; None: nothing of that kind."""

    flags: Array | None = None
    """int32 [devices], from every process whether it was asked to stop."""
    seconds: Array | None = None
    """float32 [devices, phases], from every process how long it took over what."""
    limits: Array | None = None
    """float32 [6]: GuardLimits."""
    held: Array | None = None
    """bool []: a step before this one is to be run again, so this one does nothing; comes with limits."""


def guarded(parts: StepParts, *, drills: bool = False) -> TrainStep:
    """(state, batch, control) -> (state, metrics): the plain step, or with limits one that keeps to them.

    drills: whether limits may have factors other than 1.
    """
    plain = plain_step(parts)

    def train_step(state: TrainState, batch: Batch, control: StepControl) -> tuple[TrainState, Metrics]:
        if control.limits is None:
            return plain(state, batch)
        assert control.held is not None  # it comes with limits
        limits = GuardLimits(*control.limits)
        faulty = replace(parts, grad_fn=with_fault(parts.grad_fn, limits)) if drills else parts
        update = compute_update(faulty, state, batch)
        apply, held = should_apply(update, limits, control.held)
        new, metrics = apply_update(parts, state, batch, update, apply)
        counters = {name: jnp.where(held, getattr(state, name), getattr(new, name)) for name in COUNTERS}
        return replace(new, **counters), {**metrics, HELD: lax.with_sharding_constraint(held, parts.shardings.step)}

    return train_step


def should_apply(update: Update, limits: GuardLimits, held_before: Array) -> tuple[Array, Array]:
    """(whether the update is applied, whether nothing is changed because the step is to be run again), bool [] each.

    held_before: of the step before. The loss is in nats per token, nan where no token counts.
    """
    loss, norm = update.metrics["loss"], update.metrics["grad_norm"]
    high = jnp.where(jnp.isnan(loss), 0.0, loss) > limits.loss
    suspicious = jnp.where(update.finite, high, ~(update.metrics["loss_scale"] > limits.loss_scale))
    held = held_before | (suspicious & ~(limits.final > 0))
    return update.finite & ~high & ~(norm > limits.norm) & ~held, held


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
