"""Losses of preferences from log-probabilities of whole answers; differentiable, elementwise over pairs or answers.

p is the trained policy, r the reference. The log-ratio of an answer y to a prompt x is log p(y | x) - log r(y | x).
Without an index, log p(y | x) is the sum over the tokens of the answer.
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

log_sigmoid = jax.nn.log_sigmoid
SURE = -1e-6
"""Largest mean log-probability of an answer in `odds_ratio`: at 0 the odds are infinite."""


class PairScores(NamedTuple):
    """Scores of pairs, float32 of equal shapes."""

    chosen: Array
    """Score of the preferred answer: its log-ratio, or a function of it from `DIVERGENCES`."""
    rejected: Array
    chosen_tokens: Array
    """Tokens of the preferred answer."""
    rejected_tokens: Array

    @property
    def margin(self) -> Array:
        """The difference of the scores."""
        return self.chosen - self.rejected


DIVERGENCES: Mapping[str, Callable[[Array], Array]] = MappingProxyType(
    {"reverse_kl": lambda ratio: ratio, "forward_kl": lambda ratio: -jnp.exp(-ratio), "jensen_shannon": log_sigmoid}
)
"""Divergence of p from r that is penalised -> log-ratio -> score, up to a constant (Wang et al. 2023, f-DPO)."""


def sigmoid(pairs: PairScores, beta: float, smoothing: float) -> Array:
    """DPO (Rafailov et al. 2023); with smoothing conservative DPO: that share of the pairs is taken to be swapped."""
    logit = beta * pairs.margin
    return -(1 - smoothing) * log_sigmoid(logit) - smoothing * log_sigmoid(-logit)


def robust(pairs: PairScores, beta: float, smoothing: float) -> Array:
    """DPO, unbiased if `smoothing` of the pairs are swapped (Chowdhury et al. 2024)."""
    logit = beta * pairs.margin
    return (-(1 - smoothing) * log_sigmoid(logit) + smoothing * log_sigmoid(-logit)) / (1 - 2 * smoothing)


def hinge(pairs: PairScores, beta: float, smoothing: float) -> Array:
    """SLiC's hinge on the margin (Zhao et al. 2023)."""
    del smoothing
    return jax.nn.relu(1 - beta * pairs.margin)


def ipo(pairs: PairScores, beta: float, smoothing: float) -> Array:
    """IPO (Azar et al. 2023), of mean scores per token: the margin is drawn to 1 / (2 beta)."""
    del smoothing
    margin = pairs.chosen / pairs.chosen_tokens - pairs.rejected / pairs.rejected_tokens
    return jnp.square(margin - 1 / (2 * beta))


def exo_pair(pairs: PairScores, beta: float, smoothing: float) -> Array:
    """EXO for pairs (Ji et al. 2024): KL(sigmoid of the margin || smoothed preference); needs smoothing above 0."""
    logit = beta * pairs.margin
    won = jax.nn.sigmoid(logit) * (log_sigmoid(logit) - jnp.log1p(-smoothing))
    return won + jax.nn.sigmoid(-logit) * (log_sigmoid(-logit) - jnp.log(smoothing))


def nca_pair(pairs: PairScores, beta: float, smoothing: float) -> Array:
    """Noise contrastive alignment of pairs (Chen et al. 2024)."""
    del smoothing
    chosen, rejected = beta * pairs.chosen, beta * pairs.rejected
    return -log_sigmoid(chosen) - 0.5 * log_sigmoid(-chosen) - 0.5 * log_sigmoid(-rejected)


def apo_zero(pairs: PairScores, beta: float, smoothing: float) -> Array:
    """Anchored preference optimization (D'Oosterlinck et al. 2024) for chosen answers better than the policy's."""
    del smoothing
    return 1 - jax.nn.sigmoid(beta * pairs.chosen) + jax.nn.sigmoid(beta * pairs.rejected)


def apo_down(pairs: PairScores, beta: float, smoothing: float) -> Array:
    """Anchored preference optimization for chosen answers worse than the policy's."""
    del smoothing
    return jax.nn.sigmoid(beta * pairs.chosen) + 1 - jax.nn.sigmoid(beta * pairs.margin)


def sppo_hard(pairs: PairScores, beta: float, smoothing: float) -> Array:
    """Self-play preference optimization with known winners (Wu et al. 2024)."""
    del smoothing
    return jnp.square(pairs.chosen - 0.5 / beta) + jnp.square(pairs.rejected + 0.5 / beta)


PAIR_LOSSES: Mapping[str, Callable[[PairScores, float, float], Array]] = MappingProxyType(
    {loss.__name__: loss for loss in (sigmoid, robust, hinge, ipo, exo_pair, nca_pair, apo_zero, apo_down, sppo_hard)}
)
"""Name -> (scores of pairs, beta, label smoothing) -> loss of each pair."""


def odds_ratio(chosen: Array, rejected: Array) -> Array:
    """The term of ORPO (Hong et al. 2024): -log sigmoid of the log odds ratio of two mean log-probabilities."""

    def log_odds(mean: Array) -> Array:
        mean = jnp.minimum(mean, SURE)
        return mean - jnp.log(-jnp.expm1(mean))

    return -log_sigmoid(log_odds(chosen) - log_odds(rejected))


def simpo(chosen: Array, rejected: Array, beta: float, gamma: float, smoothing: float) -> Array:
    """SimPO (Meng et al. 2024) of mean log-probabilities; of sums with gamma=0: CPO (Xu et al. 2024).

    gamma: the margin that beta times the difference should exceed.
    """
    logit = beta * (chosen - rejected) - gamma
    return -(1 - smoothing) * log_sigmoid(logit) - smoothing * log_sigmoid(-logit)


def kto(ratio: Array, desirable: Array, baseline: Array | float, beta: float) -> Array:
    """KTO (Ethayarajh et al. 2024): 1 - sigmoid of the gain over the baseline, or for bad answers of the loss below it.

    ratio: log-ratios; desirable: bool, whether each answer is good; baseline: estimate of the KL divergence, at least
    0 and not differentiated. With a baseline of 0: APO-zero of single answers.
    """
    gain = beta * (ratio - baseline)
    return 1 - jax.nn.sigmoid(jnp.where(desirable, gain, -gain))


def squared_ratio(log_p: Array, reference: Array) -> Array:
    """The k2 estimate of KL(p || r) at sampled tokens (Schulman 2020): half the squared log-ratio.

    Unlike `kl_estimate`, it stays moderate at tokens that the policy has learned to avoid.
    """
    return 0.5 * jnp.square(log_p - reference)


def kl_estimate(log_p: Array, reference: Array) -> Array:
    """The k3 estimate of KL(p || r) at sampled tokens (Schulman 2020): exp(log r - log p) - (log r - log p) - 1."""
    difference = reference - log_p
    return jnp.exp(difference) - difference - 1
