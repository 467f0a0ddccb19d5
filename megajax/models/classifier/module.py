"""Models that classify texts. B rows, K sequences of a row, N = B K sequences, S positions, D hidden, C classes."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

from megajax.batch import SAMPLE, Loss, Rows
from megajax.layers.context import Context, dropout
from megajax.layers.param import LayerSettings
from megajax.models.bert.module import Bert, Dense
from megajax.models.classifier.config import ChoiceHeadConfig, ClassHeadConfig, RegressionHeadConfig, SpanHeadConfig
from megajax.models.decoder.module import EMBEDDING_PLACE, DecoderLM, batch_of
from megajax.models.reduction import LossReduction
from megajax.models.vit.module import Linear, reported, scored

HEAD_PLACE = EMBEDDING_PLACE - 1
"""A row's key is folded with this for the head's dropout; classifiers have no multi-token prediction."""
MASKED = -1e9
"""Score of padding."""


def _first(x: Array, segments: Array) -> Array:
    del segments
    return x[:, 0]


def _last(x: Array, segments: Array) -> Array:
    last = jnp.maximum(segments.sum(1) - 1, 0)
    return jnp.take_along_axis(x, last[:, None, None], axis=1)[:, 0]


def _mean(x: Array, segments: Array) -> Array:
    weights = segments.astype(jnp.float32)
    total = jnp.einsum("nsd,ns->nd", x.astype(jnp.float32), weights)
    return (total / jnp.maximum(weights.sum(1, keepdims=True), 1)).astype(x.dtype)


POOLINGS = {"first": _first, "last": _last, "mean": _mean}
"""(states [N, S, D], 1 for tokens and 0 for padding, int32 [N, S]) -> [N, D]."""


class TextClassifier(DecoderLM):
    """Base of BERT and decoders with a text classification head."""

    cfg: Any
    """A `TextClassifierConfig`."""

    def add_head(self, settings: LayerSettings) -> None:
        head = self.cfg.head
        if head.dense():
            self.pooler = Dense(settings)
        self.head = head.build(settings)

    def __call__(
        self,
        tokens: Array,
        positions: Array | None = None,
        segment_ids: Array | None = None,
        token_types: Array | None = None,
    ) -> Array:
        """int32 [B, S], or [B, K, S] for choices -> float32 logits [B, C], numbers [B], scores of choices [B, K], or of
        first and last tokens [B, S, 2]; by plain jax.jit.

        positions: in order by default; segment_ids: 1 for tokens, 0 for padding after them, by default no padding;
        token_types: all 0 by default.
        """
        segments = jnp.ones_like(tokens) if segment_ids is None else segment_ids
        types = jnp.zeros_like(tokens) if token_types is None else token_types
        batch = batch_of(tokens=tokens, segment_ids=segments, token_types=types, positions=positions)
        ctx = self.context(batch)
        return self.head_scores(self.stack(self.enter(self.embed(batch), ctx), ctx), batch, ctx)

    def context(self, batch: Rows, key: Array | None = None) -> Context:
        """The context of the sequences of a microbatch: positions in order, padding masked."""
        rows = self.sequences(batch)
        rows["padding"] = rows["segment_ids"] == 0
        if not self.cfg.pads_rows():  # a causal mask hides padding at the end
            del rows["segment_ids"]
        if SAMPLE in batch:
            count = self.cfg.head.sequences()
            numbers = batch[SAMPLE][:, None] * count + jnp.arange(count, dtype=batch[SAMPLE].dtype)[None]
            rows[SAMPLE] = numbers.reshape(-1)
        return super().context(rows, key)

    def embed(self, batch: Rows) -> Array:
        """Embeddings of all sequences [N, S, D]."""
        return super().embed(self.sequences(batch))

    def sequences(self, batch: Rows) -> dict[str, Array]:
        """The leaves along the sequence of a microbatch, each [N, S]."""
        names = ("tokens", "positions", "segment_ids", "token_types")
        return {name: batch[name].reshape(-1, batch[name].shape[-1]) for name in names if name in batch}

    def head_scores(self, x: Array, batch: Rows, ctx: Context) -> Array:
        """Scores of the head from the output of the layers [N, S, D], float32, with B rows first."""
        cfg, x = self.cfg.head, self.layout.act(self.final_norm(x), "batch", "seq", "embed")
        segments = self.sequences(batch)["segment_ids"]
        if cfg.pools():
            x = POOLINGS[cfg.pooling](x, segments)[:, None]
            x = jnp.tanh(self.pooler(x)) if cfg.dense() else x
            ctx = ctx._replace(index=jnp.zeros(1, jnp.int32))
        x = dropout(x, cfg.dropout, ctx, HEAD_PLACE, self.layout, ("batch", None, "embed"))
        return self.head(x, segments)

    def loss(self, x: Array, batch: Rows, ctx: Context, reduction: LossReduction) -> Loss:
        """The loss of the head; the weight of a row is 1, or its loss_mask."""
        rows = batch[self.head.labels[0]].shape
        weights = batch.get("loss_mask", jnp.ones(rows, jnp.float32))
        return self.head.loss(self.head_scores(x, batch, ctx), batch, weights, reduction)

    def outputs(self, x: Array, batch: Rows, ctx: Context) -> Mapping[str, Array]:
        """See `megajax.models.protocol.PredictingModel`: `scores` [B, ...], and `losses` [B] of rows with labels."""
        scores = self.head_scores(x, batch, ctx)
        return {"scores": scores, "losses": self.head.losses(scores, batch)}


class BertClassifier(TextClassifier, Bert):
    """BERT with one of these heads."""


class DecoderClassifier(TextClassifier):
    """A decoder with one of these heads."""


class ClassHead(nnx.Module):
    """Cross-entropy over classes."""

    labels = ("labels",)

    def __init__(self, cfg: ClassHeadConfig, settings: LayerSettings):
        self.smoothing, self.linear = cfg.label_smoothing, Linear(settings, cfg.columns(), bias=cfg.bias)

    def __call__(self, x: Array, segments: Array) -> Array:
        """Pooled states [N, 1, D] -> logits [B, C]."""
        del segments
        return self.linear(x)[:, 0]

    def losses(self, scores: Array, batch: Rows) -> Array:
        """Cross-entropy of each row [B]."""
        return scored(scores, batch["labels"], 0.0)[0]

    def loss(self, scores: Array, batch: Rows, weights: Array, reduction: LossReduction) -> Loss:
        """Cross-entropy with smoothed labels; reports it without smoothing, and the accuracy."""
        return reported(*scored(scores, batch["labels"], self.smoothing), weights, reduction)


class RegressionHead(nnx.Module):
    """Mean squared error of one number."""

    labels = ("labels",)

    def __init__(self, cfg: RegressionHeadConfig, settings: LayerSettings):
        self.linear = Linear(settings, cfg.columns(), bias=cfg.bias)

    def __call__(self, x: Array, segments: Array) -> Array:
        """Pooled states [N, 1, D] -> numbers [B]."""
        del segments
        return self.linear(x)[:, 0, 0]

    def losses(self, scores: Array, batch: Rows) -> Array:
        """Squared error of each row [B]."""
        return jnp.square(scores - batch["labels"])

    def loss(self, scores: Array, batch: Rows, weights: Array, reduction: LossReduction) -> Loss:
        """The mean squared error."""
        return reduction(self.losses(scores, batch), weights)


class ChoiceHead(ClassHead):
    """Cross-entropy over the sequences of a row."""

    def __init__(self, cfg: ChoiceHeadConfig, settings: LayerSettings):
        self.choices, self.smoothing = cfg.choices, 0.0
        self.linear = Linear(settings, cfg.columns(), bias=cfg.bias)

    def __call__(self, x: Array, segments: Array) -> Array:
        """Pooled states [N, 1, D] -> scores of the choices [B, K]."""
        del segments
        return self.linear(x).reshape(-1, self.choices)


class SpanHead(nnx.Module):
    """Mean of the cross-entropies of the first and the last token of an answer, over tokens without padding."""

    labels = ("starts", "ends")

    def __init__(self, cfg: SpanHeadConfig, settings: LayerSettings):
        self.linear = Linear(settings, cfg.columns(), bias=cfg.bias)

    def __call__(self, x: Array, segments: Array) -> Array:
        """States [B, S, D] -> scores [B, S, 2]."""
        return jnp.where(segments[..., None] > 0, self.linear(x), MASKED)

    def losses(self, scores: Array, batch: Rows) -> Array:
        """Cross-entropy of each row [B]."""
        return self._losses_and_hits(scores, batch)[0]

    def loss(self, scores: Array, batch: Rows, weights: Array, reduction: LossReduction) -> Loss:
        """The loss; accuracy counts rows where both the first and the last token have the highest scores."""
        losses, correct = self._losses_and_hits(scores, batch)
        return reported(losses, losses, correct, weights, reduction)

    def _losses_and_hits(self, scores: Array, batch: Rows) -> tuple[Array, Array]:
        losses, correct = jnp.zeros(()), jnp.ones(())
        for place, name in enumerate(self.labels):
            log_p = jax.nn.log_softmax(scores[..., place])
            losses = losses - jnp.take_along_axis(log_p, batch[name][:, None], axis=1)[:, 0] / len(self.labels)
            correct = correct * (jnp.argmax(log_p, -1) == batch[name])
        return losses, correct
