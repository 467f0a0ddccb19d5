"""The largest magnitudes of tensors that are multiplied in 8 bits, remembered from step to step: delayed scaling.

Within a step they travel as weights and gradients do, under paths with a part `maxima`: in come the three that are
expected of a product's x, w and gradient, out come the three there were. They add up by the larger of two.
"""

from dataclasses import dataclass

import jax.numpy as jnp
from jax import Array

from megajax.precision.config import DelayedScalingConfig

STARTS = (32.0, 4.0, 32.0)
"""Expected before anything is remembered of activations, weights, and gradients of one token's loss. Several times what
they are in a model that is not trained yet: 8-bit floats have range to spare below, and are clipped above."""


@dataclass(frozen=True, slots=True)
class Histories:
    """How maxima are remembered and used."""

    cfg: DelayedScalingConfig
    share: float
    """About what a token's loss weighs in the loss that is differentiated."""

    def expected(self, history: Array, scale: Array) -> Array:
        """[..., 3, history], the latest first -> [..., 3], what scales are made for; scale: of the loss, float32 []."""
        seen = history[..., 0] if self.cfg.algorithm == "most_recent" else history.max(-1)
        x, w, gradient = STARTS
        start = jnp.broadcast_to(jnp.array([x, w, gradient * self.share], jnp.float32), seen.shape)
        return jnp.where(seen > 0, seen, start) * _units(scale, seen.shape)

    def remembered(self, history: Array, seen: Array, scale: Array) -> Array:
        """[..., 3, history] after a step that saw [..., 3]; scale: as above.

        Gradients are remembered as of a loss that is not scaled. Of what was not multiplied in 8 bits, and of what was
        zero everywhere, there is nothing to remember.
        """
        seen = (seen / _units(scale, seen.shape))[..., None]
        return jnp.where(seen > 0, jnp.concatenate([seen, history[..., :-1]], axis=-1), history)


def is_maxima(path: str) -> bool:
    """Whether this is the path of maxima, rather than of a weight."""
    return "maxima" in path.split(".")


def added(path: str, total: Array, new: Array) -> Array:
    """A sum of gradients with one more, in the sum's dtype; of maxima the larger ones, NaN where one is NaN."""
    new = new.astype(total.dtype)
    return jnp.maximum(total, new) if is_maxima(path) else total + new


def _units(scale: Array, shape: tuple[int, ...]) -> Array:
    return jnp.broadcast_to(jnp.stack([jnp.float32(1), jnp.float32(1), scale]), shape)
