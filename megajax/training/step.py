"""The train step and the evaluation step.

The plain step is all that training needs. What a run adds stands around it: `megajax.training.guarded` lets the host
decide about suspicious steps, `megajax.training.exchange` sends what processes tell each other along with a step.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from types import MappingProxyType
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import NamedSharding

from megajax.batch import SAMPLE, Batch, Grads, Params
from megajax.layers.param import ParamSpec
from megajax.mesh.xla import Value
from megajax.models.reduction import quotient
from megajax.optim.offload import to_device, to_host
from megajax.optim.optimizer import Optimizer, OptimizerState, clip_factor, global_norm
from megajax.optim.schedule import Schedule
from megajax.precision.loss_scale import UNSCALED, LossScaler, in_range
from megajax.training.grads import GradFn
from megajax.training.observations import reported_arrays, updated_arrays
from megajax.training.state import TrainState

type Metrics = Mapping[str, Array]
type TrainStep = Callable[..., tuple[TrainState, Metrics]]
"""(state, batch [M, B, ...]) -> (state, metrics); those of a run take a `StepControl` too.

Metrics are scalars by name, and by path what the state keeps of observations that have measures."""


def unit_weight(batch: Batch) -> int:
    """The weight that leaves gradients as they are."""
    del batch
    return 1


@dataclass(frozen=True, kw_only=True)
class StepParts:
    """What a train step is made of."""

    grad_fn: GradFn
    optimizer: Optimizer
    schedule: Schedule
    shardings: TrainState
    """Where each leaf of the state is."""
    gradient_shardings: Mapping[str, NamedSharding]
    """Where gradients are when the update is made, by path."""
    scaler: LossScaler = UNSCALED
    """What becomes of the loss scale."""
    weight: Callable[[Batch], int] = unit_weight
    """About what the losses of a device add up to, see `in_range`."""
    observed: Mapping[str, ParamSpec] = field(default_factory=lambda: MappingProxyType({}))
    """Observations by path."""

    def trained(self, state: TrainState) -> Params:
        """The weights that are trained, where their gradients are."""
        return place({path: state.params[path] for path in self.optimizer.declared}, self.gradient_shardings)


class Update(NamedTuple):
    """An update that is computed, and whether it can be applied."""

    params: Params
    optimizer: OptimizerState
    observed: Params
    grads: Params
    """The mean over the batch, clipped."""
    finite: Array
    """Whether loss and gradient norm are, bool []."""
    metrics: dict[str, Array]


def compute_update(parts: StepParts, state: TrainState, batch: Batch) -> Update:
    """The gradients of a batch and what the optimizer makes of them; changes nothing."""
    loss_scale = state.loss_scale * in_range(parts.weight(batch))
    out = parts.grad_fn(state.inputs, batch, loss_scale)
    grads = place(mean_gradients(out, loss_scale), parts.gradient_shardings)
    norm = global_norm(grads)
    factor = clip_factor(norm, parts.optimizer.cfg.clip)
    grads = {path: g * factor for path, g in grads.items()}
    params, moments = parts.optimizer.update(
        grads,
        to_device(state.optimizer, parts.optimizer.cfg.offload),
        parts.trained(state),
        rates=partial(parts.schedule.rates, state.scheduled_samples, parts.optimizer.cfg.weight_decay),
    )
    metrics = {name: quotient(total, weight) for name, (total, weight) in out.metrics.items()}
    metrics |= {"grad_norm": norm, "lr": parts.schedule(state.scheduled_samples), "loss_scale": state.loss_scale}
    observed = updated_arrays(parts.observed, state.observed, out.observed, loss_scale)
    # Also of an update that is not applied: what layers saw tells why.
    everywhere = parts.shardings.step
    for path, x in reported_arrays(parts.observed, observed).items():
        metrics[path] = jax.lax.with_sharding_constraint(x, everywhere)
    return Update(params, moments, observed, grads, jnp.isfinite(norm) & jnp.isfinite(out.loss_sum), metrics)


def apply_update(
    parts: StepParts, state: TrainState, batch: Batch, update: Update, apply: Array
) -> tuple[TrainState, Metrics]:
    """The state after a step, with the update or, unless `apply` (bool []), with the weights as they were."""
    offload, rows = parts.optimizer.cfg.offload, batch[SAMPLE].size
    scale, counters = parts.scaler.update(state.loss_scale, state.scale_counters, update.finite)
    new = TrainState(
        step=state.step + 1,
        params={**state.params, **place(select(apply, update.params, parts.trained(state)), parts.shardings.params)},
        optimizer=to_host(select(apply, update.optimizer, to_device(state.optimizer, offload)), offload),
        loss_scale=scale,
        scale_counters=counters,
        consumed_samples=state.consumed_samples + jnp.uint32(rows),
        scheduled_samples=state.scheduled_samples + jnp.where(apply, rows, 0),
        skipped=state.skipped + ~apply,
        observed=select(apply, update.observed, state.observed),
    )
    measured = parts.optimizer.measures(update.grads, new.params)
    return new, update.metrics | measured | {"skipped": ~apply}


def plain_step(parts: StepParts) -> TrainStep:
    """The step: an update that is not finite changes no weight and is counted as skipped."""

    def train_step(state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        update = compute_update(parts, state, batch)
        return apply_update(parts, state, batch, update, update.finite)

    return train_step


def compiled(step: TrainStep, parts: StepParts, options: Mapping[str, Value] | None = None) -> TrainStep:
    """The step, jitted; it donates the state, which keeps its layout. options: of the compiler."""
    return jax.jit(
        step,
        donate_argnums=0,
        out_shardings=(parts.shardings, None),
        compiler_options=None if options is None else dict(options),
    )


def make_eval_step(
    sums: Callable[[Params, Batch], Mapping[str, tuple[Array, Array]]], options: Mapping[str, Value] | None = None
) -> Callable:
    """Jitted (weights, batch [M, B, ...]) -> {name: (sum, weight)}; options: of the compiler."""

    def eval_step(weights: Params, batch: Batch) -> Mapping[str, tuple[Array, Array]]:
        return sums(weights, batch)

    return jax.jit(eval_step, compiler_options=None if options is None else dict(options))


def mean_gradients(out: Grads, loss_scale: Array) -> dict[str, Array]:
    """Sums of gradients, multiplied by the loss scale -> their mean."""
    divisor = jnp.maximum(out.weight_sum, 1e-8) * loss_scale
    return {path: g / divisor for path, g in out.grads.items()}


def place(tree: Params, shardings: Mapping[str, jax.sharding.Sharding]) -> Params:
    """Move every array to its layout."""
    return {path: jax.lax.with_sharding_constraint(x, shardings[path]) for path, x in tree.items()}


def select[T](keep_new: Array, new: T, old: T) -> T:
    """Leaf by leaf: new where keep_new, else old."""
    return jax.tree.map(lambda a, b: jnp.where(keep_new, a, b), new, old)
