"""What is minimised: sums over the rows that are here, never means."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple

import jax.numpy as jnp
from jax import Array, lax

from megajax.batch import LMBatch
from megajax.mesh.mesh import manual_axes
from megajax.models.decoder import DecoderLM


class Loss(NamedTuple):
    """Of one microbatch; all float32 []."""

    loss_sum: Array
    """Differentiated."""
    weight_sum: Array
    """What to divide the sum of loss_sum by."""
    metrics: Mapping[str, tuple[Array, Array]]
    """name -> (sum, weight) to report."""


type LossFn = Callable[[DecoderLM, LMBatch, Array | None], Loss]
"""(model, microbatch [B, S], random key or None) -> Loss."""


@dataclass(frozen=True, slots=True)
class LanguageModelLoss:
    """Next-token cross-entropy over the tokens the mask counts.

    average "tokens": every counted token weighs 1. "microbatches": tokens of a device's microbatch share a weight of 1
    between them (Megatron-LM's default), which makes the gradient the mean of microbatch means.
    """

    isolated: bool
    """Documents in a row do not see each other."""
    average: Literal["tokens", "microbatches"] = "tokens"

    def __call__(self, model: DecoderLM, batch: LMBatch, key: Array | None) -> Loss:
        hidden = model.trunk(batch.tokens, model.context(batch, key, isolated=self.isolated))
        counted = jnp.sum(batch.loss_mask)
        scale, weight = self._share(counted)
        loss = model.loss(hidden, batch.labels, batch.loss_mask * scale)
        return Loss(loss, weight, {"loss": (loss / scale, counted)})

    def _share(self, counted: Array) -> tuple[Array, Array]:
        if self.average == "tokens":
            return jnp.ones(()), counted
        context = manual_axes().get("context", 1)
        total = lax.psum(counted, "context") if context > 1 else counted
        return 1 / jnp.maximum(total, 1), jnp.full((), 1 / context)
