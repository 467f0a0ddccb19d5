"""ViT (Dosovitskiy et al. 2021). B images, S positions (class tokens, patches, padding), D hidden, C classes."""

from collections.abc import Mapping
from dataclasses import replace

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

from megajax.batch import SAMPLE, Loss, Rows
from megajax.layers.context import Context, keys_of_rows
from megajax.layers.param import ZEROS, LayerSettings, Normal, param
from megajax.mesh.layout import Layout
from megajax.models.protocol import Section
from megajax.models.reduction import LossReduction
from megajax.models.vision.config import VisionTowerConfig
from megajax.models.vision.module import VisionTower, tower_settings
from megajax.models.vit.config import (
    IGNORED,
    AttentionPoolingConfig,
    ClassifierConfig,
    ClassTokenConfig,
    SegmenterConfig,
    ViTConfig,
)


class ViT(VisionTower):
    """Takes images; gives the loss or logits of classes. The model is its own section."""

    def __init__(self, cfg: ViTConfig, layout: Layout):
        super().__init__(cfg, layout)
        self.cfg: ViTConfig = cfg
        self.head = cfg.head.build(tower_settings(cfg, layout), tower=cfg)

    @property
    def sections(self) -> Mapping[str, Section]:
        return {"": self}

    def __call__(self, images: Array) -> Array:
        """uint8 or normalised float [B, height, width, 3] -> float32 logits [B, C], of pixels [B, height, width, C]."""
        ctx = self.image_context(images.shape[0])
        return self.head(self.leave(self.stack(self.enter(self.embed_images(images), ctx), ctx), ctx), ctx)

    def context(self, batch: Rows, key: Array | None = None) -> Context:
        """The context of a microbatch. key: random key of the run, None for a deterministic forward."""
        row_keys = keys_of_rows(key, batch[SAMPLE]) if key is not None and self.cfg.has_dropout() else None
        return self.image_context(batch["images"].shape[0], row_keys)

    def embed(self, batch: Rows) -> Array:
        """Embeddings of patches [B, S, D]."""
        return self.embed_images(batch["images"])

    def loss(self, x: Array, batch: Rows, ctx: Context, reduction: LossReduction) -> Loss:
        """Cross-entropy of the classes, from the output of the blocks [B, S, D]."""
        return self.head.loss(self.head(self.leave(x, ctx), ctx), batch, reduction)


class ClassToken(nnx.Module):
    """[B, S, D] -> [B, D], the first position."""

    def __init__(self, cfg: ClassTokenConfig, settings: LayerSettings, *, tower: VisionTowerConfig):
        del cfg, settings, tower

    def __call__(self, x: Array, ctx: Context) -> Array:
        del ctx
        return x[:, 0]


class MeanPooling(nnx.Module):
    """[B, S, D] -> [B, D], the mean of patches."""

    def __init__(self, cfg: ClassTokenConfig, settings: LayerSettings, *, tower: VisionTowerConfig):
        del cfg, settings
        self.patches = slice(tower.class_tokens, tower.used_positions())

    def __call__(self, x: Array, ctx: Context) -> Array:
        del ctx
        return x[:, self.patches].astype(jnp.float32).mean(1).astype(x.dtype)


class AttentionPooling(nnx.Module):
    """[B, S, D] -> [B, D], by a learned query."""

    def __init__(self, cfg: AttentionPoolingConfig, settings: LayerSettings, *, tower: VisionTowerConfig):
        del tower
        # The single query position is not sharded along the sequence.
        plan = settings.layout.plan
        compute = replace(plan.compute, seq_residual=plan.compute.seq)
        settings = replace(settings, layout=replace(settings.layout, plan=replace(plan, compute=compute)))
        self.layout = settings.layout
        self.query = param((settings.hidden,), (None,), init=Normal(settings.std))
        self.attention = cfg.attention.build(settings)
        self.norm = cfg.norm.build(settings)
        self.mlp = cfg.mlp.build(settings)

    def __call__(self, x: Array, ctx: Context) -> Array:
        x = self.layout.act(x, "batch", "seq", "embed")
        query = jnp.broadcast_to(self.query[...][None, None], (x.shape[0], 1, x.shape[2]))
        segments = None if ctx.segments is None else jnp.ones((x.shape[0], 1), jnp.int32)
        zeros = jnp.zeros((x.shape[0], 1), jnp.int32)
        query_ctx = Context(zeros, jnp.zeros(1, jnp.int32), segments, memory=x, memory_segments=ctx.segments)
        y = self.attention(query, query_ctx)
        return (y + self.mlp(self.norm(y), query_ctx))[:, 0]


class Linear(nnx.Module):
    """x matrix + bias, [..., D] -> [..., C] in float32, replicated on every device."""

    def __init__(self, settings: LayerSettings, classes: int, *, bias: bool = True):
        self.matrix = param((settings.hidden, classes), ("embed", None), init=Normal(settings.std))
        self.bias = param((classes,), (None,), init=ZEROS, role="bias") if bias else None

    def __call__(self, x: Array) -> Array:
        product = jnp.einsum("...d,dc->...c", x, self.matrix[...], preferred_element_type=jnp.float32)
        if self.bias is None:
            return product
        return product + self.bias[...].astype(jnp.float32).reshape(*[1] * (x.ndim - 1), -1)


class Classifier(nnx.Module):
    """One class for each image."""

    def __init__(self, cfg: ClassifierConfig, settings: LayerSettings, *, tower: VisionTowerConfig):
        self.cfg = cfg
        self.pooling = cfg.pooling.build(settings, tower=tower)
        self.linear = Linear(settings, cfg.classes)

    def __call__(self, x: Array, ctx: Context) -> Array:
        """Normalised states [B, S, D] -> float32 logits [B, C]."""
        return self.linear(self.pooling(x, ctx))

    def loss(self, logits: Array, batch: Rows, reduction: LossReduction) -> Loss:
        """Cross-entropy with smoothed labels; for mixed images, of both labels, weighted by their shares."""
        labels = batch["labels"]
        weights = batch.get("loss_mask", jnp.ones(labels.shape, jnp.float32))
        losses, smoothed, correct = token = scored(logits, labels, self.cfg.label_smoothing)
        if "mix" in batch:
            share, other_scores = batch["mix"], scored(logits, batch["other_labels"], self.cfg.label_smoothing)
            losses, smoothed, correct = (share * a + (1 - share) * b for a, b in zip(token, other_scores, strict=True))
        return reported(losses, smoothed, correct, weights, reduction)


class Segmenter(nnx.Module):
    """One class for each pixel."""

    def __init__(self, cfg: SegmenterConfig, settings: LayerSettings, *, tower: VisionTowerConfig):
        self.cfg, self.grid, self.size = cfg, tower.grid(), (tower.height, tower.width)
        self.patches = slice(tower.class_tokens, tower.used_positions())
        self.linear = Linear(settings, cfg.classes)

    def __call__(self, x: Array, ctx: Context) -> Array:
        """Normalised states [B, S, D] -> float32 logits [B, height, width, C]."""
        del ctx
        logits = self.linear(x[:, self.patches]).reshape(x.shape[0], *self.grid, self.cfg.classes)
        return jax.image.resize(logits, (x.shape[0], *self.size, self.cfg.classes), "bilinear")

    def loss(self, logits: Array, batch: Rows, reduction: LossReduction) -> Loss:
        """Cross-entropy of the counted pixels; the weight of an image is their share in it.

        The metric `iou` is the intersection over union of each class.
        """
        labels = batch["labels"]
        weights = (labels != IGNORED).astype(jnp.float32)
        weights = weights * batch["loss_mask"][:, None, None] if "loss_mask" in batch else weights
        valid_labels = jnp.where(labels == IGNORED, 0, labels)
        losses, smoothed, correct = scored(logits, valid_labels, self.cfg.label_smoothing)
        loss = reported(losses, smoothed, correct, weights / weights[0].size, reduction)
        true = jax.nn.one_hot(valid_labels, self.cfg.classes) * weights[..., None]
        predicted = jax.nn.one_hot(jnp.argmax(logits, -1), self.cfg.classes) * weights[..., None]
        overlap, union = (true * predicted).sum((0, 1, 2)), jnp.maximum(true, predicted).sum((0, 1, 2))
        return loss._replace(metrics={**loss.metrics, "iou": (overlap, union)})


def scored(logits: Array, labels: Array, smoothing: float) -> tuple[Array, Array, Array]:
    """logits [..., C], labels int32 [...] -> cross-entropy, with smoothed labels, 1 for correct predictions."""
    log_p = jax.nn.log_softmax(logits)
    losses = -jnp.take_along_axis(log_p, labels[..., None], axis=-1)[..., 0]
    smoothed = (1 - smoothing) * losses - smoothing * log_p.mean(-1) if smoothing else losses
    return losses, smoothed, (jnp.argmax(logits, -1) == labels).astype(jnp.float32)


def reported(losses: Array, smoothed: Array, correct: Array, weights: Array, reduction: LossReduction) -> Loss:
    """Minimises the smoothed losses; reports the losses without smoothing and the accuracy."""
    count = jnp.sum(weights)
    metrics = {"loss": (jnp.sum(losses * weights), count), "accuracy": (jnp.sum(correct * weights), count)}
    return reduction(smoothed, weights)._replace(metrics=metrics)
