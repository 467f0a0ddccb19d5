"""Policy gradients of sampled answers, with clipped importance ratios, from log-probabilities of sampled tokens.

B rows with answers, S positions on this device, C tokens of a chunk. Losses are differentiable in `log_p`; what else
they read is constant.
"""

from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from megajax.batch import Rows
from megajax.models.answers.answers import AnswerTokens, mean_of
from megajax.models.answers.config import GRPOConfig
from megajax.models.answers.objectives import AnswerObjective, LossTerms, counted
from megajax.models.answers.preference_losses import kl_estimate


class SampledTokens(NamedTuple):
    """Sampled tokens, float32 [B, S]."""

    log_p: Array
    """Log-probability under the trained policy."""
    old_log_p: Array
    """Log-probability under the policy that sampled, or that the update started from."""
    advantages: Array
    """Advantage of the token's answer."""


class Clip(NamedTuple):
    """Limits of importance ratios."""

    low: float = 0.2
    """Ratios below 1 - low are clipped where the advantage is negative."""
    high: float = 0.2
    """Ratios above 1 + high are clipped where the advantage is positive; DAPO's "clip-higher" has 0.28."""


class Clipped(NamedTuple):
    """Losses of tokens before averaging, and what was clipped; float32 [B, S]."""

    losses: Array
    low: Array
    """1 where the lower limit stops the gradient, else 0."""
    high: Array


def importance_ratios(samples: SampledTokens, answers: AnswerTokens, level: Literal["token", "sequence"]) -> Array:
    """exp(log p - log p_old) [B, S] of each token; level sequence: of the mean over the token's answer.

    Sequence: Zheng et al. 2025, GSPO; the gradient of an answer's ratio reaches all of its tokens.
    """
    difference = samples.log_p - samples.old_log_p
    if level == "sequence":
        means = map(mean_of, answers.sums(jnp.where(answers.inside, difference, 0)), answers.tokens)
        difference = answers.spread(*means)
    return jnp.exp(jnp.where(answers.inside, difference, 0))


def clipped_surrogate(ratios: Array, advantages: Array, clip: Clip) -> Clipped:
    """-min(ratio A, clipped ratio A) of PPO (Schulman et al. 2017), as in GRPO, DAPO and GSPO."""
    inside = jnp.clip(ratios, 1 - clip.low, 1 + clip.high)
    losses = -jnp.minimum(ratios * advantages, inside * advantages)
    low = (ratios < 1 - clip.low) & (advantages < 0)
    high = (ratios > 1 + clip.high) & (advantages > 0)
    return Clipped(losses, low.astype(jnp.float32), high.astype(jnp.float32))


def cispo(log_p: Array, ratios: Array, advantages: Array, cap: float) -> Clipped:
    """-min(ratio, cap) A log p, where the weight is not differentiated (MiniMax 2025): no token loses its gradient."""
    weights = lax.stop_gradient(jnp.minimum(ratios, cap))
    high = (ratios > cap) & (advantages > 0)
    return Clipped(-weights * advantages * log_p, jnp.zeros_like(ratios), high.astype(jnp.float32))


def with_kl(losses: Array, log_p: Array, reference: Array, weight: float) -> Array:
    """Losses of tokens plus `weight` times the k3 estimate of KL(policy || reference), which is not clipped."""
    return losses + weight * kl_estimate(log_p, reference)


class Average(NamedTuple):
    """A device's parts of a sum of losses and of its divisor, float32 []."""

    total: Array
    weight: Array


def averaged(
    losses: Array, answers: AnswerTokens, over: Literal["answers", "tokens", "length"], length: int = 1
) -> Average:
    """The sum of token losses and its divisor.

    over: answers: mean over answers of means over their tokens (GRPO, GSPO); tokens: mean over all tokens (DAPO, BNPO);
    length: sums over answers, divided by a fixed `length` and by the number of answers (Dr. GRPO).
    """
    if over == "tokens":
        return Average(answers.token_total(losses), answers.token_total(jnp.ones_like(losses)))
    count = answers.total((jnp.stack(answers.tokens) > 0).astype(jnp.float32))
    if over == "length":
        return Average(answers.token_total(losses) / length, count)
    share = answers.spread(*(mean_of(jnp.ones_like(tokens), tokens) for tokens in answers.tokens))
    return Average(answers.token_total(losses * share), count)


def entropies(logits: Array, temperature: float = 1.0) -> Array:
    """Entropy in nats of softmax(logits / temperature): [..., V] -> float32 [...]."""
    scaled = logits.astype(jnp.float32) / temperature
    shifted = scaled - lax.stop_gradient(scaled.max(-1, keepdims=True))
    exponentials = jnp.exp(shifted)
    total = exponentials.sum(-1)
    return jnp.log(total) - (exponentials * shifted).sum(-1) / total


SMALL = 1e-20
"""Least divisor of metrics, which are 0 and not undefined in a step whose answers all do not count."""


def policy_gradient(cfg: GRPOConfig) -> AnswerObjective:
    """The objective of a config."""
    return TokenPolicy(cfg) if cfg.ratio == "token" else AnswerPolicy(cfg)


class AnswerPolicy:
    """GRPO and its variants. The ratio of a token may depend on the whole answer."""

    def __init__(self, cfg: GRPOConfig):
        self.cfg = cfg

    def __call__(self, log_p: Array, batch: Rows) -> LossTerms:
        """See `AnswerObjective`."""
        cfg, answers = self.cfg, answers_of(batch)
        log_p = jnp.where(answers.inside, log_p, 0)
        samples = SampledTokens(log_p, jnp.where(answers.inside, batch["old_log_p"], 0), batch["advantage"])
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
        return LossTerms(total, weight, {"loss": (total, jnp.maximum(weight, SMALL)), **metrics})

    def clipped(self, samples: SampledTokens, ratios: Array) -> Clipped:
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
            samples = SampledTokens(log_p, old, advantages)
            losses = self.clipped(samples, jnp.exp(log_p - old)).losses
            losses = with_kl(losses, log_p, reference, self.cfg.kl_weight) if self.cfg.kl_weight else losses
            return jnp.sum(losses * factors)

        return jnp.where(counts, -jax.grad(total)(jnp.where(counts, log_p, old)), 0)

    def _average(self, batch: Rows, losses: Array) -> Average:
        return averaged(losses, answers_of(batch), self.cfg.average, self.cfg.length)


def answers_of(batch: Rows) -> AnswerTokens:
    """The answers of a microbatch that count."""
    return AnswerTokens(counted(batch, "answers"), 1)
