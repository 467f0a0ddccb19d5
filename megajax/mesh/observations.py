"""Observations: what layers see in a step and the training state learns from.

A layer declares a leaf, as it declares a weight. In the forward pass the leaf holds what the state makes of earlier
steps, and its cotangent is what the layer saw in this one. So observations pass through scan, recomputation and
pipelines as the gradients of weights do. They differ in how several are combined, over microbatches and over devices:
by the maximum (of values that are not negative) or by the sum. The reduction is the last part of their path
(`query.amax.max`). The state keeps one array for each, which an updater replaces after every step.
"""

from dataclasses import dataclass
from typing import Literal, Protocol

import jax
import jax.numpy as jnp
from jax import Array

type Reduction = Literal["max", "sum"]
REDUCTIONS: tuple[Reduction, ...] = ("max", "sum")


class Updater(Protocol):
    """What becomes of an observation between steps. Hashable."""

    def shape(self, seen: tuple[int, ...]) -> tuple[int, ...]:
        """Shape of the state's array for an observation of that shape; it begins as zeros."""
        ...

    def used(self, state: Array, scale: Array) -> Array:
        """State -> what layers read. scale: what the loss is multiplied by, float32 []."""
        ...

    def updated(self, state: Array, seen: Array, scale: Array) -> Array:
        """State after a step that saw `seen`; scale: as above."""
        ...


@dataclass(frozen=True, slots=True)
class Latest:
    """Keeps the observation of the last step."""

    def shape(self, seen: tuple[int, ...]) -> tuple[int, ...]:
        return seen

    def used(self, state: Array, scale: Array) -> Array:
        del scale
        return state

    def updated(self, state: Array, seen: Array, scale: Array) -> Array:
        del state, scale
        return seen


@dataclass(frozen=True, kw_only=True, slots=True)
class Observed:
    """An observation as declared: shape and logical axes of the array that layers read, float32."""

    shape: tuple[int, ...]
    axes: tuple[str | None, ...]
    reduction: Reduction
    updater: Updater = Latest()


@jax.custom_vjp
def observe(x: Array, leaf: Array, seen: Array) -> Array:
    """x as it is; the cotangent of `leaf` is `seen`, which has its shape. Once per leaf and call of a layer.

    x must have a part in the loss. A `sum` counts the positions that are here: devices that work on other positions
    count theirs, so `seen` must not be summed over mesh axes of the batch or the sequence already.
    """
    del leaf, seen
    return x


observe.defvjp(lambda x, leaf, seen: (x, seen.astype(leaf.dtype)), lambda seen, dx: (dx, seen, None))


def reduction_of(path: str) -> Reduction | None:
    """How observations of that path are combined; None for the path of a weight."""
    last = path.rpartition(".")[2]
    return next((reduction for reduction in REDUCTIONS if last == reduction), None)


def accumulated(path: str, total: Array, new: Array) -> Array:
    """A total with one more added, in the total's dtype; the maximum where observations have it, NaN if one is NaN."""
    new = new.astype(total.dtype)
    return jnp.maximum(total, new) if reduction_of(path) == "max" else total + new
