"""Delayed scaling: scales of 8-bit tensors from their largest magnitudes (amax) in previous steps.

Each matrix product observes three magnitudes: of x, w and the gradient of the result.
"""

from dataclasses import dataclass

import jax.numpy as jnp
from jax import Array

from megajax.mesh.measures import Measure
from megajax.precision.config import DelayedScalingConfig

STARTS = (32.0, 4.0, 32.0)
"""Initial amax of activations, weights and gradients of one token's loss, used until there is a history. Several times
that of an untrained model: 8-bit floats have range to spare below, and larger values are clipped."""


@dataclass(frozen=True, slots=True)
class AmaxHistory:
    """Keeps the observed amax of the last steps: an updater, see megajax.mesh.observations."""

    cfg: DelayedScalingConfig
    token_share: float
    """Approximate weight of one token's loss in the differentiated loss."""

    def shape(self, observed: tuple[int, ...]) -> tuple[int, ...]:
        """[..., 3] -> [..., 3, history], the latest step first."""
        return (*observed, self.cfg.history)

    def used(self, state: Array, scale: Array) -> Array:
        """[..., 3, history] -> [..., 3], the amax that scales are computed for; scale: of the loss, float32 []."""
        amax = state[..., 0] if self.cfg.algorithm == "most_recent" else state.max(-1)
        x, w, gradient = STARTS
        start = jnp.broadcast_to(jnp.array([x, w, gradient * self.token_share], jnp.float32), amax.shape)
        return jnp.where(amax > 0, amax, start) * _units(scale, amax.shape)

    def updated(self, state: Array, observed: Array, scale: Array) -> Array:
        """[..., 3, history] after a step that observed [..., 3]; scale: the loss scale.

        The history of gradients is for the unscaled loss. Products not computed in 8 bits and tensors of zeros leave
        their history unchanged.
        """
        observed = (observed / _units(scale, observed.shape))[..., None]
        return jnp.where(observed > 0, jnp.concatenate([observed, state[..., :-1]], axis=-1), state)

    def measures(self) -> tuple[Measure, ...]:
        return ()


def _units(scale: Array, shape: tuple[int, ...]) -> Array:
    return jnp.broadcast_to(jnp.stack([jnp.float32(1), jnp.float32(1), scale]), shape)
