"""Reduction of the losses of a microbatch to the minimised and reported sums."""

from dataclasses import dataclass
from types import ModuleType
from typing import Any, Literal

import jax.numpy as jnp
from jax import Array, lax

from megajax.batch import Loss
from megajax.mesh.mesh import manual_axes


def divisor(weight: Any, xp: ModuleType = jnp) -> Any:
    """Sums of weights by which sums are divided: `weight` of any shape, and 1 where it is 0, like the sum over it.

    A least divisor above 0 would make a quotient depend on a common factor of the weights.
    """
    return xp.where(weight > 0, weight, 1)


def quotient(total: Any, weight: Any, xp: ModuleType = jnp) -> Any:
    """Sum and weight of a metric, [] or [K] -> the quotient, or the mean of quotients with a weight; nan for none.

    xp: the library of the arrays, jax.numpy or numpy.
    """
    has_weight = weight > 0
    sums = xp.where(has_weight, total / divisor(weight, xp), 0).sum()
    return xp.where(has_weight.any(), sums / xp.maximum(has_weight.sum(), 1), xp.nan)


@dataclass(frozen=True, slots=True)
class LossReduction:
    """Weights of losses.

    average "tokens": every counted loss has weight 1. "microbatches": the losses of a microbatch on a device share a
    weight of 1 (Megatron-LM's default), so the gradient is the mean of microbatch means.
    """

    average: Literal["tokens", "microbatches"] = "tokens"
    scale: Array | float = 1.0
    """The loss scale, float32 []. It does not change a `Loss`. A model that computes gradients in its forward pass
    applies this factor before rounding them to the compute dtype."""

    def __call__(self, losses: Array, weights: Array) -> Loss:
        """The weighted sum of `losses`, an array like `weights` (0 where nothing is counted), float32."""
        count = jnp.sum(weights)
        total, (share, weight) = jnp.sum(losses * weights), self.share(count)
        return Loss(total * share, weight, {"loss": (total, count)})

    def row_weights(self, weights: Array) -> Array:
        """Weights [B] of a loss per row, equal to the sums of the position weights [B, S].

        With context parallelism, sums over whole rows: one of the devices counts the loss.
        """
        if self.average == "microbatches":
            return jnp.full(weights.shape[:1], 1 / weights.shape[0])
        return over_context(weights.sum(1))

    def share(self, count: Array) -> tuple[Array, Array]:
        """(factor on the weight of each loss, weight of all of them); count: their sum on this device, float32 []."""
        if self.average == "tokens":
            return jnp.ones(()), count
        return 1 / divisor(over_context(count)), jnp.full((), 1 / manual_axes().get("context", 1))


def over_context(x: Array) -> Array:
    """The sum over the devices that hold parts of the same rows."""
    return lax.psum(x, "context") if manual_axes().get("context", 1) > 1 else x
