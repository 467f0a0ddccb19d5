"""The casts between stored and computing weights."""

import jax.numpy as jnp
from jax import Array

from megajax.precision.config import PrecisionConfig


def to_compute(w: Array, cfg: PrecisionConfig) -> Array:
    """A master weight -> the dtype it computes in."""
    return w.astype(jnp.dtype(cfg.compute))


def to_reduce(g: Array, cfg: PrecisionConfig) -> Array:
    """A device's accumulated gradient -> the dtype it crosses the network in."""
    return g.astype(jnp.dtype(cfg.reduce or cfg.gradients))


def to_optimizer(g: Array) -> Array:
    """A reduced gradient -> float32, in which it is unscaled, clipped and used."""
    return g.astype(jnp.float32)


def to_gradient(g: Array, cfg: PrecisionConfig) -> Array:
    """A microbatch's gradient -> the dtype gradients are accumulated in."""
    return g.astype(jnp.dtype(cfg.gradients))
