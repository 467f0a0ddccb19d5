"""Observations: values that layers compute in a step to update the training state.

A layer declares an observation as a leaf, like a weight. In the forward pass, the leaf has a value derived from the
state; its cotangent is the value observed in this step. Observations therefore pass through scan, recomputation and
pipelines like the gradients of weights. Over microbatches and devices they are combined by the maximum (of nonnegative
values) or the sum. The reduction is the last part of their path (`query.amax.max`). The state holds one array per
observation, which an updater replaces after every step.
"""

from dataclasses import dataclass
from typing import Literal, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jax import Array

from megajax.mesh.layer_metrics import Measure

type Reduction = Literal["max", "sum"]
REDUCTIONS: tuple[Reduction, ...] = ("max", "sum")


class Updater(Protocol):
    """How an observation updates the state. Hashable."""

    def shape(self, observed: tuple[int, ...]) -> tuple[int, ...]:
        """Shape of the state for an observation of this shape; its initial value is zeros."""
        ...

    def used(self, state: Array, scale: Array) -> Array:
        """The value that layers read. scale: the loss scale, float32 []."""
        ...

    def updated(self, state: Array, observed: Array, scale: Array) -> Array:
        """The state after a step with this observation."""
        ...

    def measures(self) -> tuple[Measure, ...]:
        """The measures that a run reports after each step; () for none."""
        ...


@runtime_checkable
class OverPositions(Protocol):
    """An updater of layers that add gradients of losses over positions, see `over_positions`."""

    def over_positions(self) -> bool:
        """Whether layers add gradients of sums over positions, which they multiply by the value that they read.

        A step multiplies that value by the weight of a position: see
        `megajax.training.gradients.position_weights`.
        """
        ...


@runtime_checkable
class Following(Protocol):
    """An updater whose state changes what layers compute, like a weight: it only moves beside a trained weight."""

    follows: str
    """Name of that weight in the layer."""

    def at_rest(self) -> "Updater":
        """The updater of a layer whose weight is not trained."""
        ...


@dataclass(frozen=True, slots=True)
class Latest:
    """Keeps the observation of the last step."""

    def shape(self, observed: tuple[int, ...]) -> tuple[int, ...]:
        return observed

    def used(self, state: Array, scale: Array) -> Array:
        del scale
        return state

    def updated(self, state: Array, observed: Array, scale: Array) -> Array:
        del state, scale
        return observed

    def measures(self) -> tuple[Measure, ...]:
        return ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Observed:
    """Declaration of an observation: shape and logical axes of the array that layers read, float32."""

    shape: tuple[int, ...]
    axes: tuple[str | None, ...]
    reduction: Reduction
    updater: Updater = Latest()


@jax.custom_vjp
def observe(x: Array, leaf: Array, observed: Array) -> Array:
    """Returns x; makes `observed` the cotangent of `leaf`, of the same shape. Once per leaf and call of a layer.

    The loss must depend on x. For a `sum`, `observed` covers the positions of this device only: it must not be summed
    over mesh axes of the batch or the sequence. A layer that all pipeline stages run divides it by their number.
    """
    del leaf, observed
    return x


observe.defvjp(lambda x, leaf, observed: (x, observed.astype(leaf.dtype)), lambda observed, dx: (dx, observed, None))


def reduction_of(path: str) -> Reduction | None:
    """Reduction of the observation with this path; None for a weight."""
    last = path.rpartition(".")[2]
    return next((reduction for reduction in REDUCTIONS if last == reduction), None)


def accumulated(path: str, total: Array, new: Array) -> Array:
    """total + new, or their maximum for a `max` observation, in the dtype of total; NaN if either is NaN."""
    new = new.astype(total.dtype)
    return jnp.maximum(total, new) if reduction_of(path) == "max" else total + new
