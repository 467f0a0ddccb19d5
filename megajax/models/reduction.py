"""How the losses of a microbatch become the sums that are minimised and reported: sums, never means."""

from dataclasses import dataclass
from typing import Any, Literal

import jax.numpy as jnp
from jax import Array, lax

from megajax.batch import Loss
from megajax.mesh.mesh import manual_axes


def quotient(total: Any, weight: Any, xp: Any = jnp) -> Any:
    """Sum and weight of a metric, [] or [K] -> their quotient, or the mean of those with a weight; nan for none.

    xp: the library of the arrays, jax.numpy or numpy.
    """
    counted = weight > 0
    sums = xp.where(counted, total / xp.where(counted, weight, 1), 0).sum()
    return xp.where(counted.any(), sums / xp.maximum(counted.sum(), 1), xp.nan)


@dataclass(frozen=True, slots=True)
class LossReduction:
    """What a loss weighs.

    average "tokens": everything that is counted weighs 1. "microbatches": what is counted in a device's microbatch
    shares a weight of 1 (Megatron-LM's default), which makes the gradient the mean of microbatch means.
    """

    average: Literal["tokens", "microbatches"] = "tokens"
    scale: Array | float = 1.0
    """The loss scale, float32 []. It changes no value of a `Loss`. A model that makes gradients in its forward pass
    makes them with this factor, before they are rounded to the compute dtype."""

    def __call__(self, losses: Array, weights: Array) -> Loss:
        """The weighted sum of `losses`, an array like `weights` (0 where nothing is counted), float32."""
        counted = jnp.sum(weights)
        total, (share, weight) = jnp.sum(losses * weights), self.share(counted)
        return Loss(total * share, weight, {"loss": (total, counted)})

    def row_weights(self, weights: Array) -> Array:
        """Weights [B] of a loss of each row beside one of its positions, whose weights [B, S] they add up to.

        Where rows are cut over devices, of whole rows: one of these devices counts the loss.
        """
        if self.average == "microbatches":
            return jnp.full(weights.shape[:1], 1 / weights.shape[0])
        return _over_context(weights.sum(1))

    def share(self, counted: Array) -> tuple[Array, Array]:
        """(factor on the weight of each loss, weight of all of them); counted: their sum on this device, float32 []."""
        if self.average == "tokens":
            return jnp.ones(()), counted
        return 1 / jnp.maximum(_over_context(counted), 1), jnp.full((), 1 / manual_axes().get("context", 1))


def _over_context(x: Array) -> Array:
    """Summed over the devices that hold parts of the same rows."""
    return lax.psum(x, "context") if manual_axes().get("context", 1) > 1 else x
