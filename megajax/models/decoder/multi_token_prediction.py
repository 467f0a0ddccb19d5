"""Heads that predict tokens further ahead (DeepSeek-AI 2024, DeepSeek-V3, section 2.2).

B rows, S positions, D hidden.
"""

from collections.abc import Iterator
from dataclasses import replace
from types import MappingProxyType
from typing import NamedTuple

import jax.numpy as jnp
from flax import nnx
from jax import Array, lax

from megajax.batch import Rows
from megajax.kernels.context.collectives import gather_rows
from megajax.layers.block.config import BlockConfig
from megajax.layers.context import Context
from megajax.layers.decoding import Cache
from megajax.layers.norm.config import NormConfig
from megajax.layers.param import LayerSettings, Matrix, matrix
from megajax.mesh.layout import Layout
from megajax.mesh.mesh import manual_axes
from megajax.models.decoder.config import PredictionConfig
from megajax.models.reduction import LossReduction, divisor

TOKENS = ("batch", "seq")


class Prediction(nnx.Module):
    """One head: merges the previous state with the embedding of the next known token, followed by a block.

    number: layer number of its block, continuing those of the stack, for dropout.
    """

    def __init__(
        self, cfg: PredictionConfig, settings: LayerSettings, *, block: BlockConfig, norm: NormConfig, number: int
    ):
        del cfg
        self.layout, self.number = settings.layout, number
        self.embedding_norm, self.state_norm = norm.build(settings), norm.build(settings)
        shape, axes = (settings.hidden, settings.hidden), ("embed", "mlp")
        self.from_embedding = matrix(settings, shape, axes)
        self.from_state = matrix(settings, shape, axes)
        self.block = block.build(replace(settings, on_every_stage=True))
        self.norm = norm.build(settings)

    def __call__(self, x: Array, embedded: Array, ctx: Context) -> Array:
        """Previous state [B, S, D] and embeddings [B, S, D] -> normalised state [B, S, D]."""
        return self.norm(self.block(self.merged(x, embedded), ctx.for_layer(self.number)))

    def step(self, x: Array, embedded: Array, cache: Cache, ctx: Context) -> tuple[Array, Cache]:
        """The tokens of a decoding step, [T, 1, D] each -> [T, 1, D], and the cache: leaves of the block."""
        x, cache = self.block.step(self.merged(x, embedded), cache, ctx)
        return self.norm(x), cache

    def merged(self, x: Array, embedded: Array) -> Array:
        """Previous state and embeddings [B, S, D] -> the input of the block [B, S, D]."""
        merged = self.part(self.embedding_norm(embedded), self.from_embedding)
        merged = merged + self.part(self.state_norm(x), self.from_state)
        return self.layout.act(merged, "batch", "seq_residual", "embed")

    def part(self, x: Array, w: Matrix) -> Array:
        """[B, S, D] times a weight -> [B, S, D], sharded by columns."""
        return self.layout.dot("bsd,de->bse", self.layout.act(x, "batch", "seq", "embed"), w, "batch", "seq", "mlp")


class Target(NamedTuple):
    """Targets of one head."""

    labels: Array
    """int32 [B, S]."""
    weights: Array
    """float32 [B, S]."""
    counted: Array
    """Sum of the weights, float32 []."""
    share: Array
    """Factor on the weights, see `LossReduction.share`; float32 []."""
    coefficient: float
    """Factor on the loss."""


def mtp_targets(
    cfg: PredictionConfig, layout: Layout, batch: Rows, segments: Array | None, reduction: LossReduction
) -> Iterator[Target]:
    """The targets of heads 1, 2, ... (unbounded); each loss is averaged like the main loss.

    Average "tokens": the last tokens of a row have no target, and the others get larger weights, so that the row (or
    microbatch, see `PredictionConfig.reweighted`) has the same weight as in the main loss.
    """
    labels, mask = batch["labels"], batch["loss_mask"]
    while True:
        labels, mask = shifted(layout, labels, segments), shifted(layout, mask, segments)
        by_tokens = reduction.average == "tokens"
        weights = reweighted(mask, batch["loss_mask"], DIMENSIONS[cfg.reweighted]) if by_tokens else mask
        count = jnp.sum(weights)
        yield Target(labels, weights, count, reduction.share(count)[0], cfg.weight / cfg.depth)


DIMENSIONS = MappingProxyType({"rows": (1,), "microbatches": (0, 1)})
"""Dimensions of [B, S] over which the sum of token weights is preserved."""


def reweighted(mask: Array, reference: Array, over: tuple[int, ...]) -> Array:
    """float32 [B, S]: `mask`, scaled to the sums of `reference` over some dimensions."""
    inside, target = (jnp.sum(array, axis=over, keepdims=True) for array in (mask, reference))
    if manual_axes().get("context", 1) > 1:
        inside, target = lax.psum((inside, target), "context")
    return mask * (target / divisor(inside))


def shifted(layout: Layout, x: Array, segments: Array | None) -> Array:
    """[B, S] -> the value at the next position; zero at the end of a row and, with segments, of a document.

    With context parallelism, the value after a chunk is the first of the next chunk of the row. A device sends one
    number per chunk, B x chunks x 4 bytes, for x and for the segments.
    """
    sequence_sharding = layout.sequence_sharding()
    if sequence_sharding.devices == 1:
        return _within(_shifted(x), segments, None if segments is None else _shifted(segments))

    def local(x: Array) -> Array:
        chunks = x.reshape(x.shape[0], sequence_sharding.chunks, -1)
        firsts = _shifted(gather_rows(sequence_sharding, chunks[:, :, 0]))
        after = firsts[:, sequence_sharding.local_index(sequence_sharding.chunks)]
        return jnp.concatenate([chunks[:, :, 1:], after[:, :, None]], axis=2).reshape(x.shape)

    following = layout.island(local, (TOKENS,), TOKENS)
    return _within(following(x), segments, None if segments is None else following(segments))


def _shifted(x: Array) -> Array:
    """[B, S] -> the next value in an unsharded row; zero at the end."""
    return jnp.pad(x[:, 1:], ((0, 0), (0, 1)))


def _within(x: Array, segments: Array | None, following: Array | None) -> Array:
    """x, with zeros where the next position belongs to another document."""
    return x if segments is None else jnp.where(segments == following, x, jnp.zeros_like(x))
