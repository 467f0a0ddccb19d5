"""The token embedding, and the loss or logits of the head.

The table [V, D] is sharded along the vocabulary, over pipeline stages too: every device looks up, or scores, its own
rows. Gradients through the sums over devices are written by hand (see Layout.island).

In a pipeline, all stages call these functions together, each with its own copy of the other arrays. `embed` expects the
same cotangent on all P stages. `vocabulary_loss` expects 1 / P of the cotangent on each stage, and returns each stage's
part of the gradient with respect to x; `embedded_beside_loss` sums these parts.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from megajax.kernels.cross_entropy import (
    TokenLoss,
    VocabularyShard,
    loss_and_gradients,
    token_losses,
    token_scores,
    weighted,
)
from megajax.mesh.layout import Layout

TABLE, BIAS, TOKENS, RESIDUAL = ("vocab", "embed"), ("vocab",), ("batch", "seq"), ("batch", "seq_residual", "embed")


def _shard(table: Array, size: int, axes: tuple[str, ...]) -> VocabularyShard:
    """The rows of this device, inside an island; `axes` are the mesh axes that shard the vocabulary."""
    return VocabularyShard(lax.axis_index(axes) * table.shape[0] if axes else 0, size, axes)


def _vocabulary_axes(layout: Layout) -> tuple[str, ...]:
    """Mesh axes that shard the vocabulary, outermost first."""
    return (*layout.manual_axes("vocab"), *layout.free_axes("vocab"))


def _sequence_axes(layout: Layout) -> tuple[str, ...]:
    """Free mesh axes that shard seq_residual but not seq, as in sequence parallelism."""
    return tuple(axis for axis in layout.free_axes("seq_residual") if axis not in layout.free_axes("seq"))


def _gather_sequence(x: Array, extra: tuple[str, ...]) -> Array:
    """Inside an island: [B, local S, D] -> [B, S, D]."""
    return lax.all_gather(x, extra, axis=1, tiled=True) if extra else x


def _reduce(x: Array, axes: tuple[str, ...], extra: tuple[str, ...]) -> Array:
    """Inside an island: [B, S, D] summed over the vocabulary's mesh axes -> [B, local S, D]."""
    rest = tuple(axis for axis in axes if axis not in extra)
    x = lax.psum_scatter(x, extra, scatter_dimension=1, tiled=True) if extra else x
    return lax.psum(x, rest) if rest else x


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def embed(layout: Layout, table: Array, tokens: Array) -> Array:
    """table [V, D], tokens int32 [B, S] -> [B, S, D] in table's dtype, laid out (batch, seq_residual, embed)."""
    extra, axes = _sequence_axes(layout), _vocabulary_axes(layout)

    def local(table: Array, tokens: Array) -> Array:
        shard = _shard(table, 0, axes)
        row = tokens - shard.first
        in_shard = (row >= 0) & (row < table.shape[0])
        rows = jnp.where(in_shard[..., None], table[jnp.where(in_shard, row, 0)], 0)
        return _reduce(rows, axes, extra)

    return layout.island(local, (TABLE, TOKENS), RESIDUAL)(table, tokens)


def _embed_forward(layout: Layout, table: Array, tokens: Array) -> tuple[Array, tuple[Array, Array]]:
    return embed(layout, table, tokens), (table, tokens)


def _embed_backward(layout: Layout, saved: tuple[Array, Array], dy: Array) -> tuple[Array, None]:
    table, tokens = saved
    extra, rows, axes = _sequence_axes(layout), layout.free_axes("batch", "seq"), _vocabulary_axes(layout)

    def local(table: Array, tokens: Array, dy: Array) -> Array:
        shard = _shard(table, 0, axes)
        dy = _gather_sequence(dy, extra)
        row = tokens - shard.first
        row = jnp.where((row >= 0) & (row < table.shape[0]), row, table.shape[0])
        sums = jnp.zeros(table.shape, jnp.float32).at[row].add(dy.astype(jnp.float32), mode="drop")
        return (lax.psum(sums, rows) if rows else sums).astype(table.dtype)

    return layout.island(local, (TABLE, TOKENS, RESIDUAL), TABLE)(table, tokens, dy), None


embed.defvjp(_embed_forward, _embed_backward)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def embedded_beside_loss(layout: Layout, x: Array) -> Array:
    """x [B, S, D] from `embed`, for a loss on all stages: the backward pass sums the gradients of the stages."""
    del layout
    return x


def _beside_loss_backward(layout: Layout, saved: None, dy: Array) -> tuple[Array]:
    del saved
    axes = layout.manual_axes("vocab")
    return (layout.island(lambda dy: lax.psum(dy, axes), (RESIDUAL,), RESIDUAL)(dy) if axes else dy,)


embedded_beside_loss.defvjp(lambda layout, x: (x, None), _beside_loss_backward)


class VocabularyLoss(NamedTuple):
    """Weighted sums over the rows of this call, float32 []."""

    minimised: Array
    """Differentiable."""
    losses: dict[str, Array]
    """The losses of `Objective.losses`, for reporting; their gradients are taken as 0."""
    scores: Array | None = None
    """With `Objective.weigh`: log-probability of each label and entropy, float32 [B, S, 2], without a gradient."""


@partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2, 3))
def vocabulary_loss(
    layout: Layout,
    size: int,
    chunk: int,
    objective: TokenLoss,
    x: Array,
    table: Array,
    targets: Any,
    weights: Array,
    bias: Array | None = None,
) -> VocabularyLoss:
    """Loss of the head, summed over tokens.

    size: ids in use, the rest of the table is padding; chunk: tokens per chunk of logits.
    x [B, S, D] laid out (batch, seq_residual, embed), table [V, D], bias [V] of the logits; targets:
    labels int32 [B, S], or what else the objective reads; weights float32 [B, S], or [B, S, E] for `Objective.weigh`.

    Gradients are computed in the forward pass, for a cotangent of 1, and rounded to the dtypes of x and table. Apply a
    loss scale to the weights, so that it acts before the rounding.
    """
    rows, axes, extra = layout.free_axes("batch", "seq"), _vocabulary_axes(layout), _sequence_axes(layout)

    def local(
        x: Array, table: Array, targets: Any, facts: Array, bias: Array | None
    ) -> tuple[dict[str, Array], Array | None]:
        shard, x = _shard(table, size, axes), _flat(_gather_sequence(x, extra))
        bound, tokens = objective.bound(targets, partial(_gather_sequence, extra=extra))
        losses = token_losses(x, table, jax.tree.map(_flat, tokens), shard, bound, chunk=chunk, bias=bias)
        weights = objective.weights(losses, _flat(facts))
        sums = {name: weighted(values, weights) for name, values in losses.items()}
        return lax.psum(sums, rows) if rows else sums, _of_rows(objective.scores(losses), facts)

    ins = RESIDUAL, TABLE, objective.target_axes, _axes_of_facts(weights), None if bias is None else BIAS
    sums, scores = layout.island(local, ins, ((), _axes_of_scores(objective)))(x, table, targets, weights, bias)
    return VocabularyLoss(objective.minimised(sums), sums, scores)


def _loss_forward(
    layout: Layout,
    size: int,
    chunk: int,
    objective: TokenLoss,
    x: Array,
    table: Array,
    targets: Any,
    weights: Array,
    bias: Array | None,
) -> tuple[VocabularyLoss, tuple[Array, Array, Array | None]]:
    rows, axes, extra = layout.free_axes("batch", "seq"), _vocabulary_axes(layout), _sequence_axes(layout)
    free = layout.free_axes("vocab")

    def local(
        x: Array, table: Array, targets: Any, weights: Array, bias: Array | None
    ) -> tuple[dict[str, Array], Array | None, Array, Array, Array | None]:
        shard, x = _shard(table, size, axes), _gather_sequence(x, extra)
        bound, tokens = objective.bound(targets, partial(_gather_sequence, extra=extra))
        arrays = _flat(x), table, jax.tree.map(_flat, tokens), _flat(weights)
        sums, dx, dtable, dbias, scores = loss_and_gradients(*arrays, shard, bound, chunk=chunk, bias=bias)
        dx = _reduce(dx.reshape(x.shape), free, extra)
        if rows:
            sums, dtable, dbias = lax.psum((sums, dtable, dbias), rows)
        dbias = None if bias is None or dbias is None else dbias.astype(bias.dtype)
        return sums, _of_rows(scores, weights), dx, dtable.astype(table.dtype), dbias

    biased = None if bias is None else BIAS
    ins = RESIDUAL, TABLE, objective.target_axes, _axes_of_facts(weights), biased
    island = layout.island(local, ins, ((), _axes_of_scores(objective), RESIDUAL, TABLE, biased))
    sums, scores, *gradients = island(x, table, targets, weights, bias)
    return VocabularyLoss(objective.minimised(sums), sums, scores), tuple(gradients)


def _loss_backward(
    layout: Layout,
    size: int,
    chunk: int,
    objective: TokenLoss,
    saved: tuple[Array, Array, Array | None],
    cotangent: VocabularyLoss,
) -> tuple:
    del size, chunk, objective
    dloss = cotangent.minimised * layout.manual_devices("vocab")
    dx, dtable, dbias = jax.tree.map(lambda g: (g * dloss).astype(g.dtype), saved)
    return dx, dtable, None, None, dbias


vocabulary_loss.defvjp(_loss_forward, _loss_backward)


def vocabulary_token_scores(
    layout: Layout,
    size: int,
    chunk: int,
    x: Array,
    table: Array,
    labels: Array,
    bias: Array | None = None,
    cap: float | None = None,
    temperature: float = 1.0,
) -> tuple[Array, Array]:
    """Log-probability of each label, float32 [B, S], and the most likely id, int32 [B, S].

    Not differentiated: results are constants to a surrounding gradient. Arguments as for `vocabulary_loss`; cap: soft
    cap of logits, which are then divided by the temperature.
    """
    x, table, bias = lax.stop_gradient((x, table, bias))
    axes, extra = _vocabulary_axes(layout), _sequence_axes(layout)

    def local(x: Array, table: Array, labels: Array, bias: Array | None) -> tuple[Array, Array]:
        shard, x = _shard(table, size, axes), _flat(_gather_sequence(x, extra))
        numbers = {"chunk": chunk, "bias": bias, "cap": cap, "temperature": temperature}
        scores = token_scores(x, table, _flat(labels), shard, **numbers)
        return scores[0].reshape(labels.shape), scores[1].reshape(labels.shape)

    ins = RESIDUAL, TABLE, TOKENS, None if bias is None else BIAS
    return layout.island(local, ins, (TOKENS, TOKENS))(x, table, labels, bias)


def _axes_of_facts(weights: Array) -> tuple[str | None, ...]:
    """The axes of weights [B, S], or of facts of tokens [B, S, E]."""
    return (*TOKENS, *(None,) * (weights.ndim - 2))


def _axes_of_scores(objective: TokenLoss) -> tuple[str | None, ...] | None:
    """The axes of `VocabularyLoss.scores`."""
    return (*TOKENS, None) if objective.gives_scores else None


def _of_rows(scores: Array | None, weights: Array) -> Array | None:
    """[B * S, 2] -> [B, S, 2], as the weights [B, S, ...] are."""
    return None if scores is None else scores.reshape(*weights.shape[:2], 2)


def _flat(x: Array) -> Array:
    """[B, S, ...] -> [B * S, ...]; only valid where a device holds whole rows, as in an island."""
    return x.reshape(x.shape[0] * x.shape[1], *x.shape[2:])
