"""Divergences of a student from a teacher over a sharded vocabulary, for the chunks of `megajax.kernels.cross_entropy`.

The logits of both models exist for one chunk of tokens only. C tokens of a chunk, V rows of this shard of the table, D
hidden size of the teacher.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import ClassVar, NamedTuple, Self

import jax.numpy as jnp
from jax import Array

from megajax.kernels.cross_entropy import VocabularyShard, capped_logits
from megajax.kernels.soft_cap import soft_cap_slope


class TeacherTargets[T](NamedTuple):
    """The labels, and the output of a teacher with the same ids and the same padding."""

    labels: T
    """int32 [B, S]."""
    states: T
    """[B, S, D], laid out as the residual stream."""
    table: T
    """[V, D]."""


@dataclass(frozen=True, slots=True)
class Distillation:
    """A divergence from a teacher that runs beside the student, plus the cross-entropy of labels; a
    `megajax.kernels.cross_entropy.TokenLoss`."""

    mixture: float
    """0: KL(teacher || student), 1: KL(student || teacher); between: the generalised Jensen-Shannon divergence."""
    temperature: float
    """Divisor of both models' logits in the divergence."""
    weight: float
    label_weight: float
    logit_cap: float | None = None
    """Soft cap of the student's logits."""
    teacher_cap: float | None = None
    table: Array | None = None
    """The teacher's, once bound."""
    target_axes: ClassVar[TeacherTargets] = TeacherTargets(
        ("batch", "seq"), ("batch", "seq_residual", "embed"), ("vocab", "embed")
    )
    gives_scores: ClassVar[bool] = False
    names: ClassVar[tuple[str, ...]] = ("loss", "divergence")
    """The cross-entropy of labels, and the divergence, both without their weights."""

    def with_labels(
        self, divergence: Array, slope: Array, logits: Array, rows: Array, labels: Array, shard: VocabularyShard
    ) -> tuple[dict[str, Array], Callable[[Array, Array], Array]]:
        """The result of `TokenLoss.of_chunk`.

        divergence [C], its slope by the student's logits divided by the temperature [C, V]; logits [C, V] and rows [V]:
        of `capped_logits`; labels int32 [C].
        """
        one_hot = labels[:, None] == rows[None]
        log_s = log_softmax(logits, shard)
        cross_entropy = -shard.sum(jnp.where(one_hot, log_s, 0).sum(-1))
        gradient = self.weight / self.temperature * slope + self.label_weight * (jnp.exp(log_s) - one_hot)
        if self.logit_cap is not None:
            gradient = gradient * soft_cap_slope(jnp.where(rows < shard.size, logits, 0), self.logit_cap)
        return {"loss": cross_entropy, "divergence": divergence}, lambda weights, facts: gradient * weights[:, None]

    def minimised(self, losses: Mapping[str, Array]) -> Array:
        """See `TokenLoss`."""
        return self.weight * losses["divergence"] + self.label_weight * losses["loss"]

    def scores(self, losses: Mapping[str, Array]) -> None:
        """None: nothing reads them."""

    def weights(self, losses: Mapping[str, Array], facts: Array) -> Array:
        """See `TokenLoss`: the weights themselves."""
        del losses
        return facts

    def bound(self, targets: TeacherTargets, gather: Callable[[Array], Array]) -> tuple[Self, tuple[Array, Array]]:
        """See `TokenLoss`."""
        return replace(self, table=targets.table), (targets.labels, gather(targets.states))

    def of_chunk(
        self, x: Array, table: Array, bias: Array | None, targets: tuple[Array, Array], shard: VocabularyShard
    ) -> tuple[dict[str, Array], Callable[[Array, Array], Array]]:
        """See `TokenLoss`; targets: labels int32 [C] and the teacher's states [C, D]."""
        if self.table is None:
            raise ValueError("the loss is not bound to the table of a teacher")
        labels, states = targets
        logits, rows = capped_logits(x, table, bias, shard, self.logit_cap)
        teacher, _ = capped_logits(states, self.table, None, shard, self.teacher_cap)
        log_q, log_p = (log_softmax(z / self.temperature, shard) for z in (logits, teacher))
        divergence, slope = divergence_and_gradient(log_q, log_p, self.mixture, shard)
        return self.with_labels(divergence, slope, logits, rows, labels, shard)


def log_softmax(logits: Array, shard: VocabularyShard) -> Array:
    """Logits [C, V] -> log-probabilities over all shards [C, V]; -inf stays."""
    maximum = shard.max(logits.max(-1))[:, None]
    return logits - maximum - jnp.log(shard.sum(jnp.exp(logits - maximum).sum(-1)))[:, None]


def divergence_and_gradient(log_q: Array, log_p: Array, mixture: float, shard: VocabularyShard) -> tuple[Array, Array]:
    """The divergence of tokens [C], and its gradient by the student's logits [C, V]; log-probabilities [C, V].

    log_q: of the student, log_p: of the teacher, both -inf in padding. With b = mixture and m = b p + (1 - b) q it is
    b KL(p || m) + (1 - b) KL(q || m) (Agarwal et al. 2024, GKD); b = 0 stands for KL(p || q), b = 1 for KL(q || p). By
    the student's probabilities, the derivative is (1 - b) log(q / m) and a constant.
    """
    p, q = jnp.exp(log_p), jnp.exp(log_q)
    in_vocabulary = log_q > -jnp.inf

    def of_ids(weights: Array, log_ratio: Array) -> Array:
        return jnp.where(in_vocabulary, weights * log_ratio, 0)

    if mixture == 0:
        return shard.sum(of_ids(p, log_p - log_q).sum(-1)), q - p
    log_m = log_p if mixture == 1 else jnp.logaddexp(log_p + jnp.log(mixture), log_q + jnp.log1p(-mixture))
    of_student = of_ids(q, log_q - log_m)
    sums = shard.sum(jnp.stack([of_student.sum(-1), of_ids(p, log_p - log_m).sum(-1)]))
    share, other = (1.0, 0.0) if mixture == 1 else (1 - mixture, mixture)
    return share * sums[0] + other * sums[1], share * (of_student - q * sums[0][:, None])
