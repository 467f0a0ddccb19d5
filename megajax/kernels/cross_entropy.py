"""Cross-entropy over a vocabulary cut into shards, a chunk of tokens at a time.

Float32 logits exist for one chunk only. The gradient is made in the same pass as the loss: the loss is the end of the
model, its cotangent is a scalar, so the logits need not be computed a second time in the backward pass.

T tokens, D hidden size, V rows of the vocabulary table held here.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax


class VocabularyShard(NamedTuple):
    """The rows of the table this device holds."""

    first: Array | int
    """Id of its first row."""
    size: int
    """Ids at or above this are padding: they take no part in the softmax."""
    axes: tuple[str, ...]
    """Mesh axes (manual here) the table is cut over; () when it is whole."""

    def sum(self, x: Array) -> Array:
        return lax.psum(x, self.axes) if self.axes else x

    def max(self, x: Array) -> Array:
        return lax.pmax(x, self.axes) if self.axes else x


def _chunk_losses(x: Array, table: Array, labels: Array, shard: VocabularyShard) -> tuple[Array, Array, Array]:
    """x [C, D], labels [C] -> losses [C], softmax [C, V] float32 and the one-hot mask of labels [C, V]."""
    rows = shard.first + jnp.arange(table.shape[0])
    logits = jnp.einsum("cd,vd->cv", x, table, preferred_element_type=jnp.float32)
    logits = jnp.where(rows[None] < shard.size, logits, -jnp.inf)
    highest = shard.max(logits.max(-1))
    exponentials = jnp.exp(logits - highest[:, None])
    hit = labels[:, None] == rows[None]
    # One reduction for both: in a pipeline it spans many nodes, and its latency is what it costs.
    total, at_label = shard.sum(jnp.stack([exponentials.sum(-1), jnp.where(hit, logits, 0).sum(-1)]))
    return jnp.log(total) + highest - at_label, exponentials / total[:, None], hit


def _chunked(x: Array, chunk: int) -> Array:
    """[T, ...] -> [chunks, C, ...], zero-padded at the end."""
    count = -(-x.shape[0] // chunk)
    padding = [(0, count * chunk - x.shape[0])] + [(0, 0)] * (x.ndim - 1)
    return jnp.pad(x, padding).reshape(count, chunk, *x.shape[1:])


def token_losses(x: Array, table: Array, labels: Array, shard: VocabularyShard, *, chunk: int) -> Array:
    """-log p(label), not to be differentiated: x [T, D], table [V, D], labels int32 [T] -> float32 [T]."""
    tokens = x.shape[0]
    chunk = min(chunk, tokens)
    losses = lax.map(
        lambda c: _chunk_losses(c[0], table, c[1], shard)[0], (_chunked(x, chunk), _chunked(labels, chunk))
    )
    return losses.reshape(losses.size)[:tokens]


def weighted(losses: Array, weights: Array) -> Array:
    """Sum of losses times weights, float32 []; at weight 0 even an infinite loss, of a label in the padding, is 0."""
    return jnp.sum(jnp.where(weights == 0, 0, losses * weights))


def loss_and_gradients(
    x: Array, table: Array, labels: Array, weights: Array, shard: VocabularyShard, *, chunk: int
) -> tuple[Array, Array, Array]:
    """Weighted sum of token losses with its gradients.

    x [T, D], table [V, D], labels int32 [T], weights float32 [T]
    -> loss float32 [], d loss/dx [T, D] in x's dtype (this shard's part: sum it over shard.axes),
       d loss/dtable float32 [V, D].
    """
    tokens = x.shape[0]
    chunk = min(chunk, tokens)

    def one(carry: tuple[Array, Array], piece: tuple[Array, ...]) -> tuple[tuple[Array, Array], Array]:
        loss, dtable = carry
        x, labels, weights = piece
        losses, probabilities, hit = _chunk_losses(x, table, labels, shard)
        dlogits = ((probabilities - hit) * weights[:, None]).astype(x.dtype)
        dx = jnp.einsum("cv,vd->cd", dlogits, table)
        dtable = dtable + jnp.einsum("cv,cd->vd", dlogits, x, preferred_element_type=jnp.float32)
        return (loss + weighted(losses, weights), dtable), dx

    start = jnp.zeros((), jnp.float32), jnp.zeros(table.shape, jnp.float32)
    pieces = _chunked(x, chunk), _chunked(labels, chunk), _chunked(weights, chunk)
    (loss, dtable), dx = jax.lax.scan(one, start, pieces)
    return loss, dx.reshape(dx.shape[0] * chunk, x.shape[1])[:tokens], dtable
