"""Losses of policy gradients with clipped importance ratios, from log-probabilities of sampled tokens.

B rows with answers, S positions. All functions are differentiable in `log_p`; what else they read is constant.
"""

from typing import Literal, NamedTuple

import jax.numpy as jnp
from jax import Array, lax

from megajax.models.answers.answers import Answers, mean_of
from megajax.models.answers.preference_losses import kl_estimate


class Samples(NamedTuple):
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


def importance_ratios(samples: Samples, answers: Answers, level: Literal["token", "sequence"]) -> Array:
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


def averaged(losses: Array, answers: Answers, over: Literal["answers", "tokens", "length"], length: int = 1) -> Average:
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
