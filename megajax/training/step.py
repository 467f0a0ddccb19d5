"""The train step and the evaluation step.

The plain step is complete by itself. A run wraps it: `megajax.training.limits.step` applies limits from the host, and
exchanges stop flags and times between processes.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import NamedSharding
from jax.stages import Wrapped

from megajax.batch import SAMPLE, Batch, Grads, Params
from megajax.layers.param import ParamSpec
from megajax.models.reduction import divisor, quotient
from megajax.optim.moments import to_device, to_host
from megajax.optim.optimizer import Optimizer, OptimizerState, clip_factor, global_norm
from megajax.optim.schedule import RateSchedule
from megajax.precision.loss_scale import UNSCALED, LossScaler, in_range
from megajax.processes.xla_options import Value
from megajax.training.gradients.grads import GradFn
from megajax.training.observations import reported_arrays, updated_arrays
from megajax.training.state import TrainState

type Metrics = Mapping[str, Array]
type TrainStep = Callable[..., tuple[TrainState, Metrics]]
"""(state, batch [M, B, ...]) -> (state, metrics); the steps of a run also take a `StepControl`.

Metrics are scalars by name, and arrays of the observations that have measures by path."""


class ScheduleChoice(Protocol):
    """How a program was scheduled that was compiled with other times than XLA's own."""

    @property
    def digest(self) -> str:
        """Of what decides the order of collectives, which the processes of a run must share."""

    def to_dict(self) -> dict[str, Any]:
        """Figures of the choice."""

    def summary(self) -> str:
        """The choice, in one line of text."""


@runtime_checkable
class ScheduledTrainStep(Protocol):
    """A train step whose programs are compiled with other times than XLA's own."""

    @property
    def scheduled(self) -> Mapping[Any, ScheduleChoice]:
        """Of each program."""

    def __call__(self, state: TrainState, batch: Batch, /, *control: tuple) -> tuple[TrainState, Metrics]: ...
    def lower(self, state: TrainState, batch: Batch, /, *control: tuple) -> Any: ...


class StepScheduler(Protocol):
    """Compiles train steps with the times of a cost model: `megajax.planning.compiled.scheduled_step`."""

    @property
    def device(self) -> str:
        """Name of the GPU whose times it takes."""

    def schedule(self, step: Wrapped) -> ScheduledTrainStep:
        """step: of `jax.jit`."""


def unit_weight(batch: Batch) -> int:
    """A weight of 1, which does not change the loss scale."""
    del batch
    return 1


@dataclass(frozen=True, kw_only=True)
class StepParts:
    """The parts of a train step."""

    grad_fn: GradFn
    optimizer: Optimizer
    schedule: RateSchedule
    shardings: TrainState
    """Sharding of each leaf of the state."""
    gradient_shardings: Mapping[str, NamedSharding]
    """Shardings of gradients during the update, by path."""
    scaler: LossScaler = UNSCALED
    """Updates the loss scale."""
    weight: Callable[[Batch], int] = unit_weight
    """Approximate sum of the loss weights of a device, see `in_range`."""
    observed: Mapping[str, ParamSpec] = field(default_factory=lambda: MappingProxyType({}))
    """Observations by path."""

    def trained(self, state: TrainState) -> Params:
        """The trained weights, with the shardings of their gradients."""
        return place({path: state.params[path] for path in self.optimizer.declared}, self.gradient_shardings)


class Update(NamedTuple):
    """A computed update, and whether it is finite."""

    params: Params
    optimizer: OptimizerState
    observed: Params
    grads: Params
    """The mean over the batch, clipped."""
    finite: Array
    """Whether loss and gradient norm are finite, bool []."""
    metrics: dict[str, Array]


def compute_update(parts: StepParts, state: TrainState, batch: Batch) -> Update:
    """The gradients of a batch and the update of the optimizer; the state does not change."""
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
    params = parts.optimizer.adjusted(params, out.observed)
    metrics = {name: quotient(total, weight) for name, (total, weight) in out.metrics.items()}
    metrics |= {"grad_norm": norm, "lr": parts.schedule(state.scheduled_samples), "loss_scale": state.loss_scale}
    observed = updated_arrays(parts.observed, state.observed, out.observed, loss_scale)
    # Also reported for an update that is not applied: observations can explain the reason.
    everywhere = parts.shardings.step
    for path, x in reported_arrays(parts.observed, observed).items():
        metrics[path] = jax.lax.with_sharding_constraint(x, everywhere)
    return Update(params, moments, observed, grads, jnp.isfinite(norm) & jnp.isfinite(out.loss_sum), metrics)


def apply_update(
    parts: StepParts, state: TrainState, batch: Batch, update: Update, apply: Array
) -> tuple[TrainState, Metrics]:
    """The state after a step. apply: bool []; if false, weights and optimizer state do not change."""
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
    measures = parts.optimizer.measures(update.grads, new.params)
    return new, update.metrics | measures | {"skipped": ~apply}


def plain_step(parts: StepParts) -> TrainStep:
    """The train step: an update that is not finite changes no weight and is counted as skipped."""

    def train_step(state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        update = compute_update(parts, state, batch)
        return apply_update(parts, state, batch, update, update.finite)

    return train_step


def compiled(step: TrainStep, parts: StepParts, options: Mapping[str, Value] | None = None) -> Wrapped:
    """The jitted step; donates the state and keeps its layout. options: compiler options."""
    return jax.jit(
        step,
        donate_argnums=0,
        out_shardings=(parts.shardings, None),
        compiler_options=None if options is None else dict(options),
    )


def make_eval_step(
    sums: Callable[[Params, Batch], Mapping[str, tuple[Array, Array]]], options: Mapping[str, Value] | None = None
) -> Callable:
    """Jitted (weights, batch [M, B, ...]) -> {name: (sum, weight)}; options: compiler options."""

    def eval_step(weights: Params, batch: Batch) -> Mapping[str, tuple[Array, Array]]:
        return sums(weights, batch)

    return jax.jit(eval_step, compiler_options=None if options is None else dict(options))


def mean_gradients(out: Grads, loss_scale: Array) -> dict[str, Array]:
    """Gradients summed over tokens and multiplied by the loss scale -> mean gradients."""
    whole = divisor(out.weight_sum) * loss_scale
    return {path: g / whole for path, g in out.grads.items()}


def place(tree: Params, shardings: Mapping[str, jax.sharding.Sharding]) -> Params:
    """Constrains each array to its sharding."""
    return {path: jax.lax.with_sharding_constraint(x, shardings[path]) for path, x in tree.items()}


def select[T](keep_new: Array, new: T, old: T) -> T:
    """Leaf by leaf: new where keep_new, else old."""
    return jax.tree.map(lambda a, b: jnp.where(keep_new, a, b), new, old)
