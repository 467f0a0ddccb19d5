"""Policy gradients of sampled answers. B rows, S positions on this device, C tokens of a chunk."""

import jax
import jax.numpy as jnp
from jax import Array

from megajax.batch import Rows
from megajax.models.answers.answers import Answers
from megajax.models.answers.config import GRPOConfig
from megajax.models.answers.objectives import Objective, Terms, counted
from megajax.models.answers.policy_losses import (
    Average,
    Clip,
    Clipped,
    Samples,
    averaged,
    cispo,
    clipped_surrogate,
    importance_ratios,
    with_kl,
)
from megajax.models.answers.preference_losses import kl_estimate

SMALL = 1e-20
"""Least divisor of metrics, which are 0 and not undefined in a step whose answers all do not count."""


def policy_gradient(cfg: GRPOConfig) -> Objective:
    """The objective of a config."""
    return TokenPolicy(cfg) if cfg.ratio == "token" else AnswerPolicy(cfg)


class AnswerPolicy:
    """GRPO and its variants. The ratio of a token may depend on the whole answer."""

    def __init__(self, cfg: GRPOConfig):
        self.cfg = cfg

    def __call__(self, log_p: Array, batch: Rows) -> Terms:
        """See `Objective`."""
        cfg, answers = self.cfg, answers_of(batch)
        log_p = jnp.where(answers.inside, log_p, 0)
        samples = Samples(log_p, jnp.where(answers.inside, batch["old_log_p"], 0), batch["advantage"])
        clipped = self.clipped(samples, importance_ratios(samples, answers, cfg.ratio))
        losses, reference = clipped.losses, batch.get("reference") if cfg.kl_weight else None
        more = {"clip_low": clipped.low, "clip_high": clipped.high, "policy_kl": kl_estimate(log_p, samples.old_log_p)}
        if reference is not None:
            losses = with_kl(losses, log_p, reference, cfg.kl_weight)
            more["kl"] = kl_estimate(log_p, reference)
        if "entropy" in batch:
            more["entropy"] = jnp.where(answers.inside, batch["entropy"], 0)
            losses = losses - cfg.entropy_weight * more["entropy"]
        total, weight = averaged(losses, answers, cfg.average, cfg.length)
        tokens = jnp.maximum(answers.token_total(jnp.ones_like(log_p)), SMALL)
        metrics = {name: (answers.token_total(values), tokens) for name, values in more.items()}
        return Terms(total, weight, {"loss": (total, jnp.maximum(weight, SMALL)), **metrics})

    def clipped(self, samples: Samples, ratios: Array) -> Clipped:
        """The losses of tokens of any shape, without that of the divergence from a reference."""
        if self.cfg.loss == "cispo":
            return cispo(samples.log_p, ratios, samples.advantages, self.cfg.clip_high)
        return clipped_surrogate(ratios, samples.advantages, Clip(self.cfg.clip_low, self.cfg.clip_high))


class TokenPolicy(AnswerPolicy):
    """Those with a ratio for each token: a `megajax.models.answers.objectives.TokenObjective`."""

    def __init__(self, cfg: GRPOConfig):
        super().__init__(cfg)
        self.entropy_weight = cfg.entropy_weight

    def weight(self, batch: Rows) -> Array:
        """See `TokenObjective`."""
        return self._average(batch, jnp.zeros_like(batch["advantage"])).weight

    def facts(self, batch: Rows) -> Array:
        """The factor of each token's loss in the sum, its old log p, its advantage, and its log p of the reference."""
        zeros = jnp.zeros_like(batch["advantage"])
        factors = jax.grad(lambda losses: self._average(batch, losses).total)(zeros)
        return jnp.stack([factors, batch["old_log_p"], batch["advantage"], batch.get("reference", zeros)], axis=-1)

    def weigh(self, log_p: Array, facts: Array) -> Array:
        """See `TokenObjective`."""
        factors, old, advantages, reference = jnp.moveaxis(facts, -1, 0)
        counts = factors != 0

        def total(log_p: Array) -> Array:
            samples = Samples(log_p, old, advantages)
            losses = self.clipped(samples, jnp.exp(log_p - old)).losses
            losses = with_kl(losses, log_p, reference, self.cfg.kl_weight) if self.cfg.kl_weight else losses
            return jnp.sum(losses * factors)

        return jnp.where(counts, -jax.grad(total)(jnp.where(counts, log_p, old)), 0)

    def _average(self, batch: Rows, losses: Array) -> Average:
        return averaged(losses, answers_of(batch), self.cfg.average, self.cfg.length)


def answers_of(batch: Rows) -> Answers:
    """The answers of a microbatch that count."""
    return Answers(counted(batch, "answers"), 1)
