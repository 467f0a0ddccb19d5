"""What a mixture of experts observes in a step: the tokens of each expert, the losses of the router and its report."""

from dataclasses import dataclass, replace
from functools import partial
from typing import ClassVar

import jax.numpy as jnp
import numpy as np
from jax import Array

from megajax.layers.moe.config import MoEConfig
from megajax.mesh.layer_metrics import Measure
from megajax.mesh.layer_observations import Latest

LOSSES = ("aux", "row", "global", "z")
REPORTED = (*LOSSES, "dropped", "chosen", "not_finite", "routed")
"""A layer's report for a microbatch: sums over positions of losses without their coefficients; numbers of choices of
experts that were dropped and of all choices; number of logits that are not finite; number of routed positions."""


@dataclass(frozen=True, slots=True)
class ExpertLoad:
    """Updater: the bias that balances experts, and the tokens of each expert in the last step."""

    rate: float | None
    """Change of a bias per step; None: biases stay 0."""
    follows: ClassVar[str] = "router"

    def at_rest(self) -> "ExpertLoad":
        """The updater of a router that is not trained: its biases stay as they are."""
        return replace(self, rate=None if self.rate is None else 0.0)

    def shape(self, observed: tuple[int, ...]) -> tuple[int, ...]:
        """[..., 2, E]: biases, tokens."""
        return observed

    def used(self, state: Array, scale: Array) -> Array:
        del scale
        return state

    def updated(self, state: Array, observed: Array, scale: Array) -> Array:
        """observed [..., 2, E]: zeros, and the tokens of a step."""
        del scale
        tokens = observed[..., 1, :]
        if self.rate is None:
            return observed
        bias = state[..., 0, :] + self.rate * jnp.sign(tokens.mean(-1, keepdims=True) - tokens)
        return jnp.stack([bias, tokens], axis=-2)

    def measures(self) -> tuple[Measure, ...]:
        return (
            Measure(
                name="expert_load_max_over_mean", of=max_over_mean, over_layers="max", label="load", format="{:.2f}x"
            ),
            Measure(name="expert_load_entropy", of=entropy, over_layers="min"),
            Measure(name="expert_tokens", of=tokens),
        )


@dataclass(frozen=True, slots=True)
class RouterReport:
    """Updater: the report of a router for the last step. Layers read from it the factor on gradients of its losses, the
    loss scale times the weight of a position."""

    losses: tuple[str, ...] = ()
    """The losses of the router, a subset of LOSSES."""
    setting: str = ""
    """The setting to change for fewer dropped tokens; "" if no token is ever dropped."""

    @classmethod
    def of(cls, cfg: MoEConfig) -> "RouterReport":
        """The report of a layer's router."""
        limits = {"router.capacity.factor": cfg.router.capacity, "dispatch.room": cfg.dispatch.room}
        setting = " and ".join(name for name, limit in limits.items() if limit is not None)
        return cls(tuple(name for name in LOSSES if cfg.router.coefficients()[name]), setting)

    def over_positions(self) -> bool:
        """Whether the router has a loss, a sum over positions."""
        return bool(self.losses)

    def shape(self, observed: tuple[int, ...]) -> tuple[int, ...]:
        """[..., len(REPORTED)]."""
        return observed

    def used(self, state: Array, scale: Array) -> Array:
        return jnp.broadcast_to(scale, state.shape)

    def updated(self, state: Array, observed: Array, scale: Array) -> Array:
        del state, scale
        return observed

    def measures(self) -> tuple[Measure, ...]:
        warning = f"{{value:.2%}} of token-expert assignments were dropped: the experts were full; raise {self.setting}"
        return (
            Measure(
                name="dropped_share",
                of=partial(over, "dropped", "chosen"),
                label="dropped",
                format="{:.1%}",
                above=0.0,
                warning=warning if self.setting else "",
            ),
            *(Measure(name=f"router_{name}_loss", of=partial(over, name, "routed")) for name in self.losses),
            Measure(
                name="router_not_finite",
                of=partial(column, "not_finite"),
                over_layers="sum",
                fault="logits of the router",
            ),
        )


@dataclass(frozen=True, slots=True)
class ReplayReport(Latest):
    """Updater: the numbers of given choices of experts, and of those that the router would not make."""

    def measures(self) -> tuple[Measure, ...]:
        def share(numbers: np.ndarray) -> np.ndarray:
            return divided(numbers[:, 1], numbers[:, 0])

        return (Measure(name="router_replay_differs", of=share),)


def tokens(load: np.ndarray) -> np.ndarray:
    """[L, E]: tokens of each expert in the last step."""
    return load[:, 1]


def max_over_mean(load: np.ndarray) -> np.ndarray:
    """[L]: maximum over mean number of tokens per expert; nan before the first step."""
    return divided(tokens(load).max(-1), tokens(load).mean(-1))


def entropy(load: np.ndarray) -> np.ndarray:
    """[L]: entropy of the experts' shares of tokens, over log E: 1 for equal loads, 0 if one expert gets all tokens."""
    shares = divided(tokens(load), tokens(load).sum(-1, keepdims=True))
    # 0 log 0 is 0.
    terms = -shares * np.log(np.where(shares == 0, 1, shares))
    return divided(terms.sum(-1), np.full(len(load), np.log(load.shape[-1])))


def column(name: str, report: np.ndarray) -> np.ndarray:
    """[L]: an entry of REPORTED."""
    return report[:, REPORTED.index(name)]


def over(name: str, divisor: str, report: np.ndarray) -> np.ndarray:
    """[L]: an entry of REPORTED over another."""
    return divided(column(name, report), column(divisor, report))


def divided(x: np.ndarray, by: np.ndarray) -> np.ndarray:
    """x / by; nan where `by` is 0."""
    return np.divide(x, by, out=np.full(np.broadcast_shapes(x.shape, by.shape), np.nan), where=by != 0)
