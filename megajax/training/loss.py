"""What is minimised: sums over the rows that are here, never means."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol

import jax.numpy as jnp
from jax import Array, lax

from megajax.batch import LMBatch
from megajax.layers.context import Context
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


class LossFn(Protocol):
    """A loss whole, and in the pieces a pipeline needs."""

    def __call__(self, model: DecoderLM, batch: LMBatch, key: Array | None) -> Loss:
        """Of a microbatch [B, S]; key: random key of the run, None for a deterministic forward."""
        ...

    def context(self, model: DecoderLM, batch: LMBatch, key: Array | None) -> Context:
        """What layers know of a microbatch."""
        ...

    def head(self, model: DecoderLM, x: Array, batch: LMBatch) -> Loss:
        """From the stack's output [B, S, D] on."""
        ...


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
        ctx = self.context(model, batch, key)
        return self.head(model, model.stack(model.embed(batch.tokens, ctx), ctx), batch)

    def context(self, model: DecoderLM, batch: LMBatch, key: Array | None) -> Context:
        return model.context(batch, key, isolated=self.isolated)

    def head(self, model: DecoderLM, x: Array, batch: LMBatch) -> Loss:
        counted = jnp.sum(batch.loss_mask)
        scale, weight = self._share(counted)
        loss = model.loss(model.finish(x), batch.labels, batch.loss_mask * scale)
        return Loss(loss, weight, {"loss": (loss / scale, counted)})

    def _share(self, counted: Array) -> tuple[Array, Array]:
        if self.average == "tokens":
            return jnp.ones(()), counted
        context = manual_axes().get("context", 1)
        total = lax.psum(counted, "context") if context > 1 else counted
        return 1 / jnp.maximum(total, 1), jnp.full((), 1 / context)
