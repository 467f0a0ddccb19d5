"""Losses of whole answers as functions of the log-probabilities of the labels of a microbatch.

B rows, S positions on this device, G pairs or groups of a row. See `megajax.models.answers.config` for the leaves.
"""

from collections.abc import Mapping
from typing import NamedTuple, Protocol, runtime_checkable

import jax.numpy as jnp
from jax import Array, lax

from megajax.batch import Rows
from megajax.mesh.collectives import token_axes
from megajax.models.answers.answers import AnswerTokens, mean_of
from megajax.models.answers.config import JUDGED_KINDS, PAIR_KINDS, DPOConfig, KTOConfig, ORPOConfig, SimPOConfig
from megajax.models.answers.preference_losses import (
    DIVERGENCES,
    PAIR_LOSSES,
    PairScores,
    kto,
    odds_ratio,
    simpo,
    squared_ratio,
)

type Sums = Mapping[str, tuple[Array, Array]]


class LossTerms(NamedTuple):
    """This device's parts of the sums over the answers of a microbatch, float32 []."""

    loss: Array
    weight: Array
    """The divisor of `loss`."""
    metrics: Sums
    """name -> (sum, weight) to report, `loss` among them."""


class AnswerObjective(Protocol):
    """A loss of answers."""

    def __call__(self, log_p: Array, batch: Rows) -> LossTerms:
        """log_p float32 [B, S]: log-probability of each label; `LossTerms.loss` is differentiable in it."""
        ...


@runtime_checkable
class TokenObjective(Protocol):
    """A loss of answers whose gradient at a token depends on that token's log-probability alone."""

    entropy_weight: float
    """This times the entropies, as a mean like that of the losses, is subtracted from the loss."""

    def __call__(self, log_p: Array, batch: Rows) -> LossTerms:
        """See `AnswerObjective`. The batch also has `entropy`, float32 [B, S]."""
        ...

    def weight(self, batch: Rows) -> Array:
        """`LossTerms.weight`, float32 []."""
        ...

    def facts(self, batch: Rows) -> Array:
        """What `weigh` reads, float32 [B, S, E]; the first fact is a factor on the weight, 0 outside answers."""
        ...

    def weigh(self, log_p: Array, facts: Array) -> Array:
        """log p float32 [C], facts [C, E] -> -dloss/dlog p, float32 [C]."""
        ...


class PairObjective:
    """The pairs of a microbatch: sums over answers, and their metrics."""

    def __init__(self, batch: Rows):
        self.answers = AnswerTokens(counted(batch, "pairs"), PAIR_KINDS)
        chosen, rejected = self.answers.tokens
        self.valid = (chosen > 0) & (rejected > 0)
        self.count = self.total(jnp.ones_like(chosen))
        self.lengths = jnp.maximum(chosen, 1), jnp.maximum(rejected, 1)

    def total(self, of_pairs: Array) -> Array:
        """This device's part of the sum over pairs; of_pairs: [B, G]."""
        return self.answers.total(jnp.where(self.valid, of_pairs, 0))

    def means(self, x: Array) -> list[Array]:
        """Means over the tokens of the chosen and of the rejected answers [B, G]; x float32 [B, S]."""
        return [total / tokens for total, tokens in zip(self.answers.sums(x), self.lengths, strict=True)]

    def terms(self, losses: Array, rewards: tuple[Array, Array], log_p: Array, more: Sums) -> LossTerms:
        """Losses and rewards of chosen and rejected answers [B, G] -> sums. more: further metrics."""
        log_ps, total, count = self.answers.sums(log_p), self.total(losses), self.count
        chosen, rejected = rewards
        metrics = {
            "loss": total,
            "accuracy": self.total((chosen > rejected).astype(jnp.float32)),
            "margin": self.total(chosen - rejected),
            "reward_chosen": self.total(chosen),
            "reward_rejected": self.total(rejected),
            "log_p_chosen": self.total(log_ps[0]),
            "log_p_rejected": self.total(log_ps[1]),
        }
        return LossTerms(total, count, {**{name: (value, count) for name, value in metrics.items()}, **more})


class DPO:
    """DPO and its variants."""

    def __init__(self, cfg: DPOConfig):
        self.cfg = cfg

    def __call__(self, log_p: Array, batch: Rows) -> LossTerms:
        """See `AnswerObjective`."""
        cfg, pairs, reference = self.cfg, PairObjective(batch), batch["reference"]
        answers = pairs.answers
        weights = self.token_weights(answers, batch["positions"])
        ratios = answers.sums(weights * inside(answers, log_p - reference))
        scores = map(DIVERGENCES[cfg.divergence], ratios)
        losses = PAIR_LOSSES[cfg.loss](PairScores(*scores, *pairs.lengths), cfg.beta, cfg.label_smoothing)
        losses = losses - cfg.sft_weight * pairs.means(inside(answers, log_p))[0]
        rewards = cfg.beta * ratios[0], cfg.beta * ratios[1]
        return pairs.terms(losses, rewards, weights * inside(answers, log_p), kl_metric(answers, log_p, reference))

    def token_weights(self, answers: AnswerTokens, positions: Array) -> Array:
        """The weight of each token in the sums over its answer, float32 [B, S]."""
        shorter = jnp.minimum(*answers.tokens)
        beyond = positions - answers.first_positions(positions) >= answers.spread(shorter, shorter)
        return jnp.where(beyond, self.cfg.length_weight, 1.0)


class ORPO:
    """Odds ratio preference optimization."""

    def __init__(self, cfg: ORPOConfig):
        self.cfg = cfg

    def __call__(self, log_p: Array, batch: Rows) -> LossTerms:
        """See `AnswerObjective`."""
        weight, pairs = self.cfg.weight, PairObjective(batch)
        log_p = inside(pairs.answers, log_p)
        chosen, rejected = pairs.means(log_p)
        odds = odds_ratio(chosen, rejected)
        more = {
            "cross_entropy_chosen": (pairs.total(-chosen), pairs.count),
            "odds_ratio": (pairs.total(odds), pairs.count),
        }
        return pairs.terms(weight * odds - chosen, (weight * chosen, weight * rejected), log_p, more)


class SimPO:
    """SimPO and CPO."""

    def __init__(self, cfg: SimPOConfig):
        self.cfg = cfg

    def __call__(self, log_p: Array, batch: Rows) -> LossTerms:
        """See `AnswerObjective`."""
        cfg, pairs = self.cfg, PairObjective(batch)
        log_p = inside(pairs.answers, log_p)
        means = pairs.means(log_p)
        chosen, rejected = means if cfg.average == "tokens" else pairs.answers.sums(log_p)
        losses = simpo(chosen, rejected, cfg.beta, cfg.gamma, cfg.label_smoothing) - cfg.sft_weight * means[0]
        return pairs.terms(losses, (cfg.beta * chosen, cfg.beta * rejected), log_p, {})


class KTO:
    """Kahneman-Tversky optimization. The KL baseline is a mean over the microbatch on all devices."""

    def __init__(self, cfg: KTOConfig):
        self.cfg = cfg

    def __call__(self, log_p: Array, batch: Rows) -> LossTerms:
        """See `AnswerObjective`."""
        cfg, answers, reference = self.cfg, AnswerTokens(counted(batch, "judged"), JUDGED_KINDS), batch["reference"]
        *ratios, mismatched = answers.sums(inside(answers, log_p - reference))
        *present, others = (tokens > 0 for tokens in answers.tokens)
        baseline = self.baseline(answers.total(mismatched), answers.total(others))
        losses = [kto(x, jnp.asarray(good), baseline, cfg.beta) for x, good in zip(ratios, (True, False), strict=True)]
        good, bad = (answers.total(jnp.where(valid, x, 0)) for valid, x in zip(present, losses, strict=True))
        total = cfg.desirable_weight * good + cfg.undesirable_weight * bad
        rewards = [answers.total(cfg.beta * x) for x in ratios]
        log_ps, (good, bad) = answers.sums(inside(answers, log_p)), map(answers.total, present)
        count = good + bad
        metrics = {
            "loss": (total, count),
            "kl": (baseline * count, count),
            "reward_chosen": (rewards[0], good),
            "reward_rejected": (rewards[1], bad),
            "log_p_chosen": (answers.total(log_ps[0]), good),
            "log_p_rejected": (answers.total(log_ps[1]), bad),
        }
        return LossTerms(total, count, metrics)

    def baseline(self, total: Array, count: Array) -> Array:
        """The mean log-ratio of answers to other prompts, at least 0; an estimate of KL(policy || reference)."""
        axes, sums = token_axes(), lax.stop_gradient((total, count))
        return jnp.maximum(mean_of(*(lax.psum(sums, axes) if axes else sums)), 0)


def counted(batch: Rows, name: str) -> Array:
    """The leaf of answer numbers, 0 where the label does not count."""
    return jnp.where(batch["loss_mask"] > 0, batch[name], 0)


def inside(answers: AnswerTokens, x: Array) -> Array:
    """x [B, S] with zeros outside answers, where it may be infinite."""
    return jnp.where(answers.inside, x, 0)


def kl_metric(answers: AnswerTokens, log_p: Array, reference: Array) -> Sums:
    """The k2 estimate of KL(policy || reference), a mean over the tokens of the given answers."""
    estimates = squared_ratio(inside(answers, log_p), inside(answers, reference))
    return {"kl": (answers.token_total(estimates), answers.token_total(jnp.ones_like(estimates)))}
