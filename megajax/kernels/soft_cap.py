"""Soft caps of scores and logits (Gemma team 2024, Gemma 2, section 2)."""

import jax.numpy as jnp
from jax import Array


def soft_capped(x: Array, cap: float | None) -> Array:
    """cap * tanh(x / cap), which lies between -cap and cap; None: x itself."""
    return x if cap is None else cap * jnp.tanh(x / cap)


def soft_cap_slope(capped: Array, cap: float | None) -> Array | float:
    """The derivative of `soft_capped`, from its result."""
    return 1.0 if cap is None else 1 - jnp.square(capped / cap)
