"""QK-clip: bounds the attention scores of each head by its matrices of queries and keys (Kimi team 2025, section 2.1).

After an update, a head whose scores reach s > limit in its step has its queries and keys scaled so that their products
are multiplied by limit / s. In multi-head attention both get the square root. Key heads that several query heads share
stay, and queries get the whole factor. In latent attention, the parts without positions get the square root; the rotary
part of keys is shared, so that of queries gets the whole factor. Other heads do not change.

L layers, N heads, H head size.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import jax.numpy as jnp
from jax import Array

from megajax.batch import Params
from megajax.layers.param import ParamSpec

OBSERVATION = "core.scores.max"
"""Path below an attention layer of the bounds of its scores, [L, N]."""


@dataclass(frozen=True, slots=True)
class ClippedWeight:
    """Heads of a weight, and the power of their factor."""

    path: str
    observed: str
    """Path of the bounds."""
    powers: tuple[tuple[int, float], ...]
    """(elements of a head, power of the factor) in the order of the last dimension."""

    def scaled(self, weight: Array, factors: Array) -> Array:
        """weight [L, ..., N, H], factors [L, N]."""
        by_element = [jnp.repeat((factors**power)[..., None], size, axis=-1) for size, power in self.powers]
        factor = jnp.concatenate(by_element, axis=-1)
        return weight * factor.reshape(factor.shape[0], *[1] * (weight.ndim - 3), *factor.shape[1:])


def head_parts(declared: Mapping[str, ParamSpec]) -> list[ClippedWeight]:
    """The parts of all attention layers of stacks. declared: weights by path."""
    parts = []
    for path, spec in declared.items():
        layer, _, name = path.rpartition(".")
        key = declared.get(f"{layer}.key")
        if name == "query" and spec.layers and key is not None and f"{layer}.output" in declared:
            parts += _of_layer(layer, spec, key, declared)
    return parts


def _of_layer(layer: str, query: ParamSpec, key: ParamSpec, declared: Mapping[str, ParamSpec]) -> list[ClippedWeight]:
    content, size = key.shape[-1], query.shape[-1]
    shared = key.shape[-2] != query.shape[-2]
    powers = {"query": ((content, 1.0 if shared else 0.5), (size - content, 1.0)), "key": ((content, 0.5),)}
    return [
        ClippedWeight(f"{layer}.{name}{end}", f"{layer}.{OBSERVATION}", tuple(part for part in powers[name] if part[0]))
        for name in ("query", "key")[: 1 if shared else 2]
        for end in ("", "_bias")
        if f"{layer}.{name}{end}" in declared
    ]


def clipped(params: Params, observed: Params, parts: list[ClippedWeight], limit: float) -> Params:
    """The weights with the heads of `parts` scaled. observed: bounds of scores by path."""
    new = dict(params)
    for part in parts:
        factors = limit / jnp.maximum(observed[part.observed], limit)
        new[part.path] = part.scaled(params[part.path], factors)
    return new
