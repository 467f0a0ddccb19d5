"""Cross-entropy over a vocabulary cut into shards, a chunk of tokens at a time.

Float32 logits exist for one chunk only. The gradient is made in the same pass as the loss. The loss is the end of the
model and its cotangent a scalar, so the backward pass need not compute the logits again.

T tokens, D hidden size, V rows of the vocabulary table held here.
"""

from collections.abc import Mapping
from dataclasses import dataclass
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


@dataclass(frozen=True, slots=True)
class Objective:
    """What is minimised for a token, beside the weights of tokens. K ids in use, p their softmax, Z its denominator."""

    label_smoothing: float = 0.0
    """Probability that the target gives to all other ids together, each of them a share of 1 / (K - 1)."""
    z_loss: float = 0.0
    """Coefficient of log(Z)^2, which is added (Chowdhery et al. 2022, section 5)."""

    @property
    def names(self) -> tuple[str, ...]:
        """Of `losses`."""
        return ("loss", *["smoothed_loss"] * bool(self.label_smoothing), *["z_loss"] * bool(self.z_loss))

    def losses(self, seen: "Softmax", size: int) -> dict[str, Array]:
        """Losses of tokens by name, each float32 [C]: `loss`, the cross-entropy alone, and what `minimised` needs."""
        found = {"loss": seen.log_z - seen.at_label}
        if self.label_smoothing:
            if seen.mean is None:
                raise ValueError("label smoothing needs the mean logit of every token")
            uniform = self._uniform(size)
            found["smoothed_loss"] = seen.log_z - (1 - uniform) * seen.at_label - uniform * seen.mean
        if self.z_loss:
            found["z_loss"] = self.z_loss * jnp.square(seen.log_z)
        return found

    def minimised(self, losses: Mapping[str, Array]) -> Array:
        """Of such losses, or of weighted sums of them, what is minimised."""
        loss = losses["smoothed_loss"] if self.label_smoothing else losses["loss"]
        return loss + losses["z_loss"] if self.z_loss else loss

    def gradient(self, seen: "Softmax", size: int) -> Array:
        """d minimised / d logits of each token, float32 [C, V]."""
        p = seen.probabilities
        p = p * (1 + 2 * self.z_loss * seen.log_z)[:, None] if self.z_loss else p
        if not self.label_smoothing:
            return p - seen.hit
        uniform = self._uniform(size)
        return p - (1 - uniform) * seen.hit - uniform / size * seen.in_use[None]

    def _uniform(self, size: int) -> float:
        """u, where the target is u times the uniform distribution and 1 - u times the label's."""
        return self.label_smoothing * size / (size - 1)


CROSS_ENTROPY = Objective()
"""The cross-entropy alone."""


class Softmax(NamedTuple):
    """What is known of a chunk of tokens [C] over the rows of the table that are here [V]; float32."""

    log_z: Array
    """[C]: the logarithm of the sum of exponentials of all logits."""
    at_label: Array
    """[C]: the label's logit."""
    mean: Array | None
    """[C]: the mean logit of the ids in use, where the objective needs it."""
    probabilities: Array
    """[C, V]: 0 for padding."""
    hit: Array
    """bool [C, V]: one-hot mask of labels."""
    in_use: Array
    """bool [V]: rows that are no padding."""


def _softmax(x: Array, table: Array, labels: Array, shard: VocabularyShard, objective: Objective) -> Softmax:
    """x [C, D], table [V, D], labels int32 [C]."""
    rows = shard.first + jnp.arange(table.shape[0])
    in_use = rows < shard.size
    logits = jnp.einsum("cd,vd->cv", x, table, preferred_element_type=jnp.float32)
    logits = jnp.where(in_use[None], logits, -jnp.inf)
    highest = shard.max(logits.max(-1))
    exponentials = jnp.exp(logits - highest[:, None])
    hit = labels[:, None] == rows[None]
    sums = [exponentials.sum(-1), jnp.where(hit, logits, 0).sum(-1)]
    if objective.label_smoothing:
        sums.append(jnp.where(in_use[None], logits, 0).sum(-1) / shard.size)
    # One reduction for all: in a pipeline it spans many nodes, and its latency is what it costs.
    total, at_label, *mean = shard.sum(jnp.stack(sums))
    return Softmax(
        log_z=jnp.log(total) + highest,
        at_label=at_label,
        mean=mean[0] if mean else None,
        probabilities=exponentials / total[:, None],
        hit=hit,
        in_use=in_use,
    )


def _chunked(x: Array, chunk: int) -> Array:
    """[T, ...] -> [chunks, C, ...], zero-padded at the end."""
    count = -(-x.shape[0] // chunk)
    padding = [(0, count * chunk - x.shape[0])] + [(0, 0)] * (x.ndim - 1)
    return jnp.pad(x, padding).reshape(count, chunk, *x.shape[1:])


def token_losses(
    x: Array, table: Array, labels: Array, shard: VocabularyShard, objective: Objective = CROSS_ENTROPY, *, chunk: int
) -> dict[str, Array]:
    """The objective's losses by name, not to be differentiated.

    x [T, D], table [V, D], labels int32 [T] -> float32 [T] each; `loss` is -log p(label).
    """
    tokens = x.shape[0]
    chunk = min(chunk, tokens)
    losses = lax.map(
        lambda c: objective.losses(_softmax(c[0], table, c[1], shard, objective), shard.size),
        (_chunked(x, chunk), _chunked(labels, chunk)),
    )
    return {name: each.reshape(each.size)[:tokens] for name, each in losses.items()}


def weighted(losses: Array, weights: Array) -> Array:
    """Sum of losses times weights, float32 []; at weight 0 even an infinite loss, of a label in the padding, is 0."""
    return jnp.sum(jnp.where(weights == 0, 0, losses * weights))


def loss_and_gradients(
    x: Array,
    table: Array,
    labels: Array,
    weights: Array,
    shard: VocabularyShard,
    objective: Objective = CROSS_ENTROPY,
    *,
    chunk: int,
) -> tuple[dict[str, Array], Array, Array]:
    """Weighted sums of token losses, with the gradients of what is minimised.

    x [T, D], table [V, D], labels int32 [T], weights float32 [T], the loss scale included: gradients with respect to
    logits are rounded to x's dtype after they are multiplied by it.
    -> the objective's losses by name, float32 [] each; d minimised / dx [T, D] in x's dtype (this shard's part: sum it
       over shard.axes), d minimised / dtable float32 [V, D].
    """
    tokens = x.shape[0]
    chunk = min(chunk, tokens)

    def one(carry: tuple[dict[str, Array], Array], piece: tuple[Array, ...]) -> tuple[tuple, Array]:
        sums, dtable = carry
        x, labels, weights = piece
        seen = _softmax(x, table, labels, shard, objective)
        dlogits = (objective.gradient(seen, shard.size) * weights[:, None]).astype(x.dtype)
        dx = jnp.einsum("cv,vd->cd", dlogits, table)
        dtable = dtable + jnp.einsum("cv,cd->vd", dlogits, x, preferred_element_type=jnp.float32)
        losses = objective.losses(seen, shard.size)
        return ({name: sums[name] + weighted(each, weights) for name, each in losses.items()}, dtable), dx

    pieces = _chunked(x, chunk), _chunked(labels, chunk), _chunked(weights, chunk)
    zero = {name: jnp.zeros((), jnp.float32) for name in objective.names}
    start = zero, jnp.zeros(table.shape, jnp.float32)
    (sums, dtable), dx = jax.lax.scan(one, start, pieces)
    return sums, dx.reshape(dx.shape[0] * chunk, x.shape[1])[:tokens], dtable
