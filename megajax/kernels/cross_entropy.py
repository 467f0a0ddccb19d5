"""Cross-entropy over a sharded vocabulary, computed in chunks of tokens.

Float32 logits exist for one chunk only. The gradient is computed in the same pass as the loss: the cotangent of the
loss is a scalar, so the backward pass does not recompute the logits.

T tokens, C tokens per chunk, D hidden size, V rows of this shard of the vocabulary table. A head may have a bias of
logits [V].
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, Protocol, Self

import jax
import jax.numpy as jnp
from jax import Array, lax

from megajax.kernels.soft_cap import soft_cap_slope, soft_capped


class VocabularyShard(NamedTuple):
    """The rows of the table on this device."""

    first: Array | int
    """Id of its first row."""
    size: int
    """Vocabulary size without padding: ids at or above it are not part of the softmax."""
    axes: tuple[str, ...]
    """Mesh axes (manual here) that the table is sharded over; () for an unsharded table."""

    def sum(self, x: Array) -> Array:
        return lax.psum(x, self.axes) if self.axes else x

    def max(self, x: Array) -> Array:
        return lax.pmax(x, self.axes) if self.axes else x


class Normaliser(NamedTuple):
    """What makes log-probabilities of the logits of rows [R]; float32.

    The order of its operations is the same in losses, in scores and in the steps of engines, so that they can agree bit
    for bit.
    """

    maximum: Array
    """[R]: the largest logit."""
    total: Array
    """[R]: the sum of exp(logit - maximum)."""

    def log_p(self, logits: Array) -> Array:
        """Log-probabilities of logits [R] or [R, N]."""
        of_rows = (self.maximum, jnp.log(self.total))
        maximum, log_total = of_rows if logits.ndim == 1 else (x[:, None] for x in of_rows)
        return logits - maximum - log_total


class TokenLoss(Protocol):
    """A loss of tokens, with the targets that it compares logits with: a tree of arrays, the labels by default."""

    target_axes: ClassVar[Any]
    """Logical axes of each array of the targets."""

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the losses."""
        ...

    @property
    def gives_scores(self) -> bool:
        """Whether `scores` is not None."""
        ...

    def bound(self, targets: Any, gather: Callable[[Array], Array]) -> tuple[Self, Any]:
        """The loss with those of the targets that belong to no token, and the others, [B, S, ...].

        gather: states [B, part of S, D] of a sequence-parallel residual stream -> [B, S, D].
        """
        ...

    def of_chunk(
        self, x: Array, table: Array, bias: Array | None, targets: Any, shard: VocabularyShard
    ) -> tuple[dict[str, Array], Callable[[Array, Array], Array]]:
        """Losses by name, float32 [C] each, and (weights [C], facts) -> the gradient of the weighted sum of `minimised`
        by logits before their cap [C, V].

        x [C, D], table [V, D], bias [V], targets: arrays [C, ...]; facts: see `weights`.
        """
        ...

    def minimised(self, losses: Mapping[str, Array]) -> Array:
        """The loss to minimise, from such losses or from weighted sums of them."""
        ...

    def scores(self, losses: Mapping[str, Array]) -> Array | None:
        """The log p of the labels and the entropies [C, 2] to return; None: they are not asked for."""
        ...

    def weights(self, losses: Mapping[str, Array], facts: Array) -> Array:
        """The weights of the losses of tokens [C], from the weights [C] themselves, or facts [C, E]."""
        ...


@dataclass(frozen=True, slots=True)
class Objective:
    """The loss of a token, for K ids without padding, their softmax p and its denominator Z."""

    label_smoothing: float = 0.0
    """Probability that the target distribution spreads evenly over the K - 1 other ids."""
    z_loss: float = 0.0
    """Coefficient of the added term log(Z)^2 (Chowdhery et al. 2022, section 5)."""
    logit_cap: float | None = None
    """Soft cap of logits, see `soft_capped`; None: no cap."""
    weigh: Callable[[Array, Array], Array] | None = None
    """(log p of the labels [C], facts of the tokens [C, E]) -> the weight of each token's loss, float32 [C]. So a loss
    that is any function of log p has its gradient with the logits that give log p. None: the weights are given."""
    entropy_weight: float = 0.0
    """With `weigh`: this times the entropy of a token's distribution, times its first fact, is subtracted from the
    loss."""
    temperature: float = 1.0
    """Divisor of the logits, after their cap."""

    target_axes: ClassVar[tuple[str, ...]] = ("batch", "seq")

    def bound(self, targets: Array, gather: Callable[[Array], Array]) -> tuple[Self, Array]:
        """See `TokenLoss`."""
        del gather
        return self, targets

    def of_chunk(
        self, x: Array, table: Array, bias: Array | None, targets: Array, shard: VocabularyShard
    ) -> tuple[dict[str, Array], Callable[[Array, Array], Array]]:
        """See `TokenLoss`; targets: labels int32 [C]."""
        softmax = _softmax(x, table, bias, targets, shard, self)
        losses = self.losses(softmax, shard.size)

        def gradient(weights: Array, facts: Array) -> Array:
            of_losses = self.gradient(softmax, shard.size) * weights[:, None]
            return self.with_entropy(of_losses, softmax, losses, facts)

        return losses, gradient

    @property
    def gives_scores(self) -> bool:
        """Whether log p and entropies are returned."""
        return self.weigh is not None

    def scores(self, losses: Mapping[str, Array]) -> Array | None:
        """The log p of the labels and the entropies [C, 2]; None without `weigh`."""
        return None if self.weigh is None else jnp.stack([-losses["loss"], losses["entropy"]], axis=-1)

    def weights(self, losses: Mapping[str, Array], facts: Array) -> Array:
        """The weights of the losses of tokens [C], from the weights [C] themselves, or facts [C, E]."""
        return facts if self.weigh is None else self.weigh(-losses["loss"], facts)

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the `losses`."""
        more = {"smoothed_loss": self.label_smoothing, "z_loss": self.z_loss, "entropy": self.weigh}
        return ("loss", *(name for name, wanted in more.items() if wanted))

    def losses(self, softmax: "Softmax", size: int) -> dict[str, Array]:
        """Losses of tokens by name, float32 [C] each: `loss`, the plain cross-entropy, and the other terms."""
        losses = {"loss": -softmax.log_p}
        if self.label_smoothing:
            if softmax.mean_logit is None:
                raise ValueError("label smoothing needs the mean logit of every token")
            uniform = self._uniform(size)
            smoothed = softmax.log_z - (1 - uniform) * softmax.label_logit - uniform * softmax.mean_logit
            losses["smoothed_loss"] = smoothed
        if self.z_loss:
            losses["z_loss"] = self.z_loss * jnp.square(softmax.log_z)
        if softmax.expected_logit is not None:
            losses["entropy"] = softmax.log_z - softmax.expected_logit
        return losses

    def minimised(self, losses: Mapping[str, Array]) -> Array:
        """The loss to minimise, from such losses or from weighted sums of them."""
        loss = losses["smoothed_loss"] if self.label_smoothing else losses["loss"]
        return loss + losses["z_loss"] if self.z_loss else loss

    def gradient(self, softmax: "Softmax", size: int) -> Array:
        """Gradient of `minimised` with respect to the logits of each token before their cap, float32 [C, V]."""
        return self._before_cap(softmax, self._capped_gradient(softmax, size))

    def with_entropy(self, gradient: Array, softmax: "Softmax", losses: Mapping[str, Array], facts: Array) -> Array:
        """The weighted `gradient` [C, V] with that of the entropies, -p (log p + entropy) of each logit."""
        if not self.entropy_weight:
            return gradient
        p = softmax.probabilities
        slope = jnp.where(p > 0, p * (jnp.log(jnp.where(p > 0, p, 1)) + losses["entropy"][:, None]), 0)
        return gradient + self._before_cap(softmax, slope * (self.entropy_weight * facts[:, 0])[:, None])

    def _before_cap(self, softmax: "Softmax", gradient: Array) -> Array:
        gradient = gradient if self.temperature == 1 else gradient / self.temperature
        if softmax.capped is None:
            return gradient
        return gradient * soft_cap_slope(jnp.where(softmax.in_vocabulary[None], softmax.capped, 0), self.logit_cap)

    def _capped_gradient(self, softmax: "Softmax", size: int) -> Array:
        p = softmax.probabilities
        p = p * (1 + 2 * self.z_loss * softmax.log_z)[:, None] if self.z_loss else p
        if not self.label_smoothing:
            return p - softmax.one_hot
        uniform = self._uniform(size)
        return p - (1 - uniform) * softmax.one_hot - uniform / size * softmax.in_vocabulary[None]

    def _uniform(self, size: int) -> float:
        """u, where the target is u times the uniform distribution plus 1 - u times the one-hot label."""
        return self.label_smoothing * size / (size - 1)


CROSS_ENTROPY = Objective()
"""The plain cross-entropy."""


class Softmax(NamedTuple):
    """Softmax of a chunk of tokens [C] over this shard of the vocabulary [V]; float32."""

    log_z: Array
    """[C]: log-sum-exp of all logits."""
    log_p: Array
    """[C]: log-probability of the label."""
    label_logit: Array
    """[C]: the logit of the label."""
    mean_logit: Array | None
    """[C]: the mean logit without padding; None unless the objective needs it."""
    expected_logit: Array | None
    """[C]: the mean logit under the softmax; None unless the objective needs it."""
    probabilities: Array
    """[C, V]: 0 for padding."""
    one_hot: Array
    """bool [C, V]: mask of the labels."""
    in_vocabulary: Array
    """bool [V]: False for padding."""
    capped: Array | None
    """[C, V]: the logits before their division by a temperature; None without a cap."""


def _softmax(
    x: Array, table: Array, bias: Array | None, labels: Array, shard: VocabularyShard, objective: Objective
) -> Softmax:
    """x [C, D], table [V, D], bias [V], labels int32 [C]."""
    capped, rows = capped_logits(x, table, bias, shard, objective.logit_cap)
    in_vocabulary, logits = rows < shard.size, tempered(capped, objective.temperature)
    maximum = shard.max(logits.max(-1))
    exponentials = jnp.exp(logits - maximum[:, None])
    one_hot = labels[:, None] == rows[None]
    sums = [exponentials.sum(-1), jnp.where(one_hot, logits, 0).sum(-1)]
    if objective.label_smoothing:
        sums.append(jnp.where(in_vocabulary[None], logits, 0).sum(-1) / shard.size)
    if objective.weigh is not None:
        sums.append((jnp.where(in_vocabulary[None], logits, 0) * exponentials).sum(-1))
    # A single reduction: in a pipeline it spans many nodes, so latency dominates its cost.
    total, label_logit, *others = shard.sum(jnp.stack(sums))
    return Softmax(
        log_z=jnp.log(total) + maximum,
        log_p=Normaliser(maximum, total).log_p(label_logit),
        label_logit=label_logit,
        mean_logit=others[0] if objective.label_smoothing else None,
        expected_logit=None if objective.weigh is None else others[-1] / total,
        probabilities=exponentials / total[:, None],
        one_hot=one_hot,
        in_vocabulary=in_vocabulary,
        capped=None if objective.logit_cap is None else capped,
    )


def capped_logits(
    x: Array, table: Array, bias: Array | None, shard: VocabularyShard, cap: float | None
) -> tuple[Array, Array]:
    """x [C, D], table [V, D], bias [V] -> capped logits float32 [C, V], -inf for padding, and their ids int32 [V]."""
    rows = shard.first + jnp.arange(table.shape[0])
    logits = jnp.einsum("cd,vd->cv", x, table, preferred_element_type=jnp.float32)
    logits = logits if bias is None else logits + bias.astype(jnp.float32)[None]
    logits = soft_capped(logits, cap)
    return jnp.where((rows < shard.size)[None], logits, -jnp.inf), rows


def tempered(logits: Array, temperature: float) -> Array:
    """Logits divided by a temperature."""
    return logits if temperature == 1 else logits / temperature


def chunked[T](tree: T, chunk: int) -> T:
    """Arrays [T, ...] -> [chunks, C, ...], zero-padded at the end."""

    def of_array(x: Array) -> Array:
        count = -(-x.shape[0] // chunk)
        padding = [(0, count * chunk - x.shape[0])] + [(0, 0)] * (x.ndim - 1)
        return jnp.pad(x, padding).reshape(count, chunk, *x.shape[1:])

    return jax.tree.map(of_array, tree)


def token_losses(
    x: Array,
    table: Array,
    targets: Any,
    shard: VocabularyShard,
    objective: TokenLoss = CROSS_ENTROPY,
    *,
    chunk: int,
    bias: Array | None = None,
) -> dict[str, Array]:
    """The losses of the objective by name; not differentiable.

    x [T, D], table [V, D], targets [T, ...], bias [V] -> float32 [T] each; targets: labels, see `TokenLoss`.
    """
    tokens = x.shape[0]
    chunk = min(chunk, tokens)
    losses = lax.map(
        lambda c: objective.of_chunk(c[0], table, bias, c[1], shard)[0], (chunked(x, chunk), chunked(targets, chunk))
    )
    return {name: loss.reshape(loss.size)[:tokens] for name, loss in losses.items()}


def token_scores(
    x: Array,
    table: Array,
    labels: Array,
    shard: VocabularyShard,
    *,
    chunk: int,
    bias: Array | None = None,
    cap: float | None = None,
    temperature: float = 1.0,
) -> tuple[Array, Array]:
    """Log-probability of each label, float32 [T], and the id with the largest logit, int32 [T]; not differentiable.

    x [T, D], table [V, D], labels int32 [T], bias [V]; cap: soft cap of logits, which are then divided by the
    temperature. Among equal logits the lowest id wins, as in numpy.argmax.
    """
    tokens = x.shape[0]
    chunk = min(chunk, tokens)

    def score_chunk(piece: tuple[Array, Array]) -> tuple[Array, Array]:
        logits, rows = capped_logits(piece[0], table, bias, shard, cap)
        logits = tempered(logits, temperature)
        local_maximum = logits.max(-1)
        maximum = shard.max(local_maximum)
        first = jnp.where(local_maximum == maximum, rows[logits.argmax(-1)], jnp.iinfo(jnp.int32).max)
        label = jnp.where(piece[1][:, None] == rows[None], logits, 0).sum(-1)
        total, label = shard.sum(jnp.stack([jnp.exp(logits - maximum[:, None]).sum(-1), label]))
        return Normaliser(maximum, total).log_p(label), -shard.max(-first)

    scores, likeliest = lax.map(score_chunk, (chunked(x, chunk), chunked(labels, chunk)))
    return scores.reshape(scores.size)[:tokens], likeliest.reshape(likeliest.size)[:tokens]


def weighted(losses: Array, weights: Array) -> Array:
    """Sum of losses times weights, float32 []; weight 0 gives 0 even for an infinite loss (a label in the padding)."""
    return jnp.sum(jnp.where(weights == 0, 0, losses * weights))


def loss_and_gradients(
    x: Array,
    table: Array,
    targets: Any,
    weights: Array,
    shard: VocabularyShard,
    objective: TokenLoss = CROSS_ENTROPY,
    *,
    chunk: int,
    bias: Array | None = None,
) -> tuple[dict[str, Array], Array, Array, Array | None, Array | None]:
    """Weighted sums of the losses of tokens, and the gradients of `TokenLoss.minimised`.

    x [T, D], table [V, D], targets [T, ...], bias [V]; weights float32 [T], or [T, E] for `Objective.weigh`. The
    weights include the loss scale: gradients with respect to logits are multiplied by them before they are rounded to
    x's dtype.
    -> losses by name, float32 [] each; the gradient of x [T, D] in x's dtype, to be summed over shard.axes; the
       gradients of the table, float32 [V, D], and of the bias, float32 [V], None without a bias; and the log p of the
       labels and the entropies, float32 [T, 2], None without `Objective.weigh`.
    """
    tokens = x.shape[0]
    chunk = min(chunk, tokens)

    def add_chunk(carry: tuple, piece: tuple[Array, ...]) -> tuple[tuple, tuple[Array, Array | None]]:
        sums, dtable, dbias = carry
        x, targets, facts = piece
        losses, gradient = objective.of_chunk(x, table, bias, targets, shard)
        weights = objective.weights(losses, facts)
        dlogits = gradient(weights, facts).astype(x.dtype)
        dx = jnp.einsum("cv,vd->cd", dlogits, table)
        dtable = dtable + jnp.einsum("cv,cd->vd", dlogits, x, preferred_element_type=jnp.float32)
        dbias = None if dbias is None else dbias + dlogits.sum(0, dtype=jnp.float32)
        sums = {name: sums[name] + weighted(loss, weights) for name, loss in losses.items()}
        return (sums, dtable, dbias), (dx, objective.scores(losses))

    pieces = chunked(x, chunk), chunked(targets, chunk), chunked(weights, chunk)
    zero = {name: jnp.zeros((), jnp.float32) for name in objective.names}
    start = zero, jnp.zeros(table.shape, jnp.float32), None if bias is None else jnp.zeros(bias.shape, jnp.float32)
    (sums, dtable, dbias), (dx, scores) = jax.lax.scan(add_chunk, start, pieces)
    scores = None if scores is None else scores.reshape(-1, 2)[:tokens]
    return sums, dx.reshape(-1, x.shape[1])[:tokens], dtable, dbias, scores
