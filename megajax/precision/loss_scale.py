"""Scaling the loss so that small gradients survive in float16 (Micikevicius et al. 2018).

The state is two arrays: the scale, float32 [], and counters, int32 [2].
"""

from dataclasses import dataclass

import jax.numpy as jnp
from jax import Array


@dataclass(frozen=True, slots=True)
class ConstantScale:
    """The same factor for every step."""

    scale: float = 1.0

    def start(self) -> tuple[Array, Array]:
        """(scale, counters) before the first step."""
        return jnp.float32(self.scale), jnp.zeros(2, jnp.int32)

    def update(self, scale: Array, counters: Array, finite: Array) -> tuple[Array, Array]:
        """(scale, counters) after a step whose gradients were finite, or not."""
        del finite
        return scale, counters


@dataclass(frozen=True, slots=True)
class DynamicScale:
    """A factor that falls when gradients overflow and grows after `window` steps without overflow.

    Megatron-LM's rule: the first `hysteresis` - 1 overflows after the last growth are ignored, and each further one
    lowers the scale; only growth resets the count. Counters: steps without overflow, remaining hysteresis.
    """

    initial: float
    floor: float
    window: int
    hysteresis: int
    growth: float = 2.0
    backoff: float = 0.5

    def start(self) -> tuple[Array, Array]:
        """(scale, counters) before the first step."""
        return jnp.float32(self.initial), jnp.array([0, self.hysteresis], jnp.int32)

    def update(self, scale: Array, counters: Array, finite: Array) -> tuple[Array, Array]:
        """(scale, counters) after a step whose gradients were finite, or not."""
        streak, remaining = counters
        remaining_after = remaining - 1
        lowered = jnp.where(remaining_after <= 0, jnp.maximum(scale * self.backoff, self.floor), scale)
        grown = streak + 1 == self.window
        scale = jnp.where(finite, jnp.where(grown, scale * self.growth, scale), lowered)
        after_good = jnp.array([0, self.hysteresis]) * grown + jnp.stack([streak + 1, remaining]) * ~grown
        after_bad = jnp.stack([jnp.zeros_like(streak), remaining_after])
        return scale, jnp.where(finite, after_good, after_bad).astype(jnp.int32)


type LossScaler = ConstantScale | DynamicScale

UNSCALED = ConstantScale()


def in_range(weight: int) -> float:
    """A power of two that scales gradients of a sum of losses to about those of their mean, as loss scales assume.

    Without it, float16 would overflow at scales lower by the number of tokens; other dtypes are not affected.
    """
    return 2.0 ** -(weight.bit_length() - 1)
