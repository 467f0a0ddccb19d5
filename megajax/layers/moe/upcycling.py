"""Mixtures of experts from dense feed-forward layers (He et al. 2024, "Upcycling large language models into mixture
of experts").

Each expert is a copy of the dense layer. If its ffn is smaller, it is one of G = dense ffn / expert ffn parts of the
dense layer. Experts then form groups of G that together make up a dense layer and start with equal router logits
("virtual group initialisation"), so that a token chooses whole groups.

L layers, D hidden, F ffn of the dense layer, f of an expert; E experts, k chosen by each token.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from math import log, sqrt

import jax
import jax.numpy as jnp
from jax import Array

from megajax.layers.mlp.config import GatedMLPConfig
from megajax.layers.moe.config import MoEConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class Derived:
    """How to compute a weight from a weight of another run, or why that is impossible."""

    source: str | None = None
    """Path of the other run's weight; None if the weight is computed from its own initial value."""
    shape: tuple[int, ...] = ()
    """Shape of the source weight, without the layer dimension."""
    make: Callable[[Array], Array] = lambda x: x
    """Array [L, ...] -> array [L, ...]."""
    problem: str = ""
    """Why the weight cannot be computed; "" if it can."""

    def made_shape(self, layers: int) -> tuple[int, ...]:
        """Shape of the result of `make` for this many layers of the source weight."""
        return jax.eval_shape(self.make, jax.ShapeDtypeStruct((layers, *self.shape), jnp.float32)).shape


def derived(cfg: MoEConfig, name: str, stored: Mapping[str, tuple[int, ...]]) -> Derived | None:
    """How to compute weight `name` of a mixture of experts; None if a dense layer has no counterpart.

    stored: shapes [L, ...] of the dense layer's weights by name.
    """
    kind, _, inner = name.rpartition(".")
    expert = kind == "experts" and cfg.latent is None
    if "down" not in stored or not (expert or name in ("router", "router_bias")):
        return None
    if expert and inner not in stored:
        return Derived(problem=f"the dense layer there has no {inner}; it has {', '.join(sorted(stored))}")
    dense, ffn = stored["down"][1], cfg.expert.ffn
    parts, rest = divmod(dense, ffn)
    if rest or not parts:
        return Derived(problem=f"ffn={dense} of the dense layer there is no multiple of ffn={ffn} of an expert here")
    group = f"the {parts} experts that make a dense layer: ffn={dense} there, {ffn} here"
    for setting, value in {"experts": cfg.experts, "top_k": cfg.top_k}.items():
        if value % parts:
            return Derived(problem=f"{setting}={value} is no multiple of {group}")
    if not expert:
        return Derived(make=partial(grouped, parts=parts))
    make = _maker(cfg, inner, parts)
    return Derived(source=inner, shape=stored[inner][1:], make=make)


def _maker(cfg: MoEConfig, name: str, parts: int) -> Callable[[Array], Array]:
    """[L, shape of the dense weight] -> [L, E, shape of an expert's].

    The router multiplies the outputs of the parts by small weights, for which a factor on the matrices compensates, so
    that the mixture computes the same function as the dense layer. If the layer is linear in `up`, `up` and `down` each
    get the square root of the factor; otherwise `down` gets all of it. Megatron-LM also puts a third of it on the gate,
    which changes the function.
    """
    scale = 1 / weight_sum(cfg)
    linear = isinstance(cfg.expert, GatedMLPConfig) and cfg.expert.clamp is None and cfg.expert.offset == 0
    up = sqrt(parts * scale) if linear else 1.0
    factors = {"up": up, "up_bias": up, "down": parts * scale / up, "down_bias": scale}
    dimension = {"gate": 2, "up": 2, "gate_bias": 1, "up_bias": 1, "down": 1}.get(name)
    return partial(copied, experts=cfg.experts, parts=parts, dimension=dimension, factor=factors.get(name, 1.0))


def copied(x: Array, *, experts: int, parts: int, dimension: int | None, factor: float) -> Array:
    """A weight [L, ...] of dense layers -> [L, E, ...]: expert e gets part e modulo `parts` along `dimension`, or the
    whole weight if that is None."""
    pieces = [x] * parts if dimension is None else jnp.split(x, parts, axis=dimension)
    stacked = jnp.stack(pieces, axis=1) * jnp.asarray(factor, x.dtype)
    return jnp.tile(stacked, (1, experts // parts, *[1] * (stacked.ndim - 2)))


def grouped(x: Array, *, parts: int) -> Array:
    """Initial router weights [..., E] -> equal weights within groups of `parts`, from the first E / parts."""
    return jnp.repeat(x[..., : x.shape[-1] // parts], parts, axis=-1)


def weight_sum(cfg: MoEConfig) -> float:
    """Sum of the weights of a token's experts if all logits are 0; for any logits if normalised over the chosen."""
    router, k = cfg.router, cfg.top_k
    if router.sinkhorn:
        weight = 0.5 if k == 1 else 1 / cfg.experts
    elif router.normalise == "chosen" and (router.score == "softmax" or k > 1):
        weight = 1 / k
    else:
        weight = {"softmax": 1 / cfg.experts, "sigmoid": 0.5, "sqrt_softplus": sqrt(log(2))}[router.score]
    return k * weight * router.scale
