"""What is minimised: sums over the rows that are here, never means."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal, NamedTuple, Protocol

import jax.numpy as jnp
from jax import Array, lax

from megajax.batch import LMBatch
from megajax.layers.context import Context
from megajax.mesh.mesh import manual_axes
from megajax.models.decoder import DecoderLM
from megajax.models.prediction import ahead


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
        """Of a microbatch [B, S]; not to be differentiated. key: random key of the run, None: deterministic."""
        ...

    def context(self, model: DecoderLM, batch: LMBatch, key: Array | None) -> Context:
        """What layers know of a microbatch."""
        ...

    def head(
        self, model: DecoderLM, x: Array, batch: LMBatch, key: Array | None = None, scale: Array | float = 1.0
    ) -> Loss:
        """From the stack's output [B, S, D] on.

        key: as above, for layers that come after the stack; scale: the loss scale, float32 []. It changes no value of
        the result. A caller that differentiates scale * loss_sum gives it here too, because the head makes its
        gradients in the forward pass: they are made with this factor, before they are rounded to the compute dtype.
        """
        ...


@dataclass(frozen=True, slots=True)
class LanguageModelLoss:
    """Next-token loss over the tokens the mask counts: cross-entropy, with smoothed labels and a z-loss if the model's
    config has them. The metric `loss` is the cross-entropy alone.

    average "tokens": every counted token weighs 1. "microbatches": tokens of a device's microbatch share a weight of 1
    between them (Megatron-LM's default), which makes the gradient the mean of microbatch means.
    """

    isolated: bool
    """Documents in a row do not see each other."""
    average: Literal["tokens", "microbatches"] = "tokens"

    def weight(self, microbatches: int, tokens: int) -> int:
        """Largest weight_sum of a device that has that many tokens in each microbatch."""
        return microbatches * (tokens if self.average == "tokens" else 1)

    def __call__(self, model: DecoderLM, batch: LMBatch, key: Array | None) -> Loss:
        ctx = self.context(model, batch, key)
        return self.head(model, model.stack(model.embed(batch.tokens, ctx), ctx), batch, key)

    def context(self, model: DecoderLM, batch: LMBatch, key: Array | None) -> Context:
        return model.context(batch, key, isolated=self.isolated)

    def head(
        self, model: DecoderLM, x: Array, batch: LMBatch, key: Array | None = None, scale: Array | float = 1.0
    ) -> Loss:
        counted = jnp.sum(batch.loss_mask)
        share, weight = self._share(counted)
        x = model.finish(x)
        found = model.loss(x, batch.labels, batch.loss_mask * (share * scale))
        metrics = {name: (each / scale / share, counted) for name, each in found.losses.items()}
        out = Loss(found.minimised / scale, weight, metrics)
        return self._further(model, x, batch, key, scale, out)

    def _further(
        self, model: DecoderLM, x: Array, batch: LMBatch, key: Array | None, scale: Array | float, out: Loss
    ) -> Loss:
        """With the losses of heads that predict further ahead, if any, each a mean of the same kind as the main loss.

        Average "tokens": a row's last tokens have nothing to predict, and those that do weigh more, so that the row (or
        microbatch, see `PredictionConfig.made_up`) weighs as much as in the main loss.
        """
        prediction = model.cfg.prediction
        if prediction is None:
            return out
        ctx = self.context(model, batch, key)
        labels, mask, (total, weight, metrics) = batch.labels, batch.loss_mask, out
        for depth, state in enumerate(model.further(x, batch.tokens, ctx), start=1):
            labels, mask = ahead(labels, ctx.segments), ahead(mask, ctx.segments)
            weights = mask if self.average != "tokens" else made_up(mask, batch.loss_mask, MADE_UP[prediction.made_up])
            counted = jnp.sum(weights)
            share, _ = self._share(counted)
            found = model.loss(state, labels, weights * (share * scale))
            total = total + found.minimised / scale * (prediction.weight / prediction.depth)
            metrics = {**metrics, f"loss_{depth + 1}_ahead": (found.losses["loss"] / scale / share, counted)}
        return Loss(total, weight, metrics)

    def _share(self, counted: Array) -> tuple[Array, Array]:
        if self.average == "tokens":
            return jnp.ones(()), counted
        context = manual_axes().get("context", 1)
        total = lax.psum(counted, "context") if context > 1 else counted
        return 1 / jnp.maximum(total, 1), jnp.full((), 1 / context)


MADE_UP = MappingProxyType({"rows": (1,), "microbatches": (0, 1)})
"""Dimensions of [B, S] over which tokens are made up for."""


def made_up(mask: Array, whole: Array, over: tuple[int, ...]) -> Array:
    """float32 [B, S]: tokens of `mask`, so weighed that over some dimensions they weigh what those of `whole` do."""
    inside, wanted = (jnp.sum(each, axis=over, keepdims=True) for each in (mask, whole))
    if manual_axes().get("context", 1) > 1:
        inside, wanted = lax.psum((inside, wanted), "context")
    return mask * (wanted / jnp.maximum(inside, 1))
