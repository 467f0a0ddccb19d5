"""Metrics of routers: the load of experts, dropped tokens, losses. See megajax.mesh.measures.

L layers, E experts. Computed with numpy, on the host.
"""

from functools import partial

import numpy as np

from megajax.layers.moe.config import MoEConfig
from megajax.layers.moe.router import LOSSES, REPORTED
from megajax.mesh.measures import Measure


def load_measures() -> tuple[Measure, ...]:
    """Metrics of the state [L, 2, E] of ExpertLoad."""
    return (
        Measure(name="expert_load_max_over_mean", of=max_over_mean, over_layers="max", label="load", format="{:.2f}x"),
        Measure(name="expert_load_entropy", of=entropy, over_layers="min"),
        Measure(name="expert_tokens", of=tokens),
    )


def report_measures(losses: tuple[str, ...], setting: str) -> tuple[Measure, ...]:
    """Metrics of the state [L, len(REPORTED)] of RouterReport.

    losses: names of the router's losses; setting: raised to drop fewer tokens, "" if none is dropped.
    """
    warning = f"{{value:.2%}} of token-expert assignments were dropped: the experts were full; raise {setting}"
    return (
        Measure(
            name="dropped_share",
            of=partial(over, "dropped", "chosen"),
            label="dropped",
            format="{:.1%}",
            above=0.0,
            warning=warning if setting else "",
        ),
        *(Measure(name=f"router_{name}_loss", of=partial(over, name, "parts")) for name in losses),
        Measure(
            name="router_not_finite",
            of=partial(column, "not_finite"),
            over_layers="sum",
            fault="logits of the router",
        ),
    )


def losses_of(cfg: MoEConfig) -> tuple[str, ...]:
    """The losses of a router, a subset of LOSSES."""
    return tuple(name for name in LOSSES if getattr(cfg.router, f"{name}_loss"))


def setting_of_room(cfg: MoEConfig) -> str:
    """The settings that limit the tokens of experts; "" if no token is ever dropped."""
    settings = ["router.capacity.factor"] * (cfg.router.capacity is not None)
    return " and ".join([*settings, *["dispatch.room"] * (cfg.dispatch.room is not None)])


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
