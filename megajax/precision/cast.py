"""The casts of weights, gradients and moments between storage and computation."""

import jax.numpy as jnp
from jax import Array

from megajax.precision.config import PrecisionConfig

SMALLEST_FLOAT16 = 2.0**-24
LARGEST_SHIFT = 100
"""Arrays below 2^-100 are scaled as if their largest element were 2^-100: scale and inverse stay within float32."""


def to_compute(w: Array, cfg: PrecisionConfig) -> Array:
    """A master weight -> the dtype of computation."""
    return w.astype(jnp.dtype(cfg.compute))


def to_reduce(g: Array, cfg: PrecisionConfig) -> Array:
    """A device's accumulated gradient -> the dtype of communication."""
    return g.astype(jnp.dtype(cfg.reduced_in()))


def to_optimizer(g: Array) -> Array:
    """A reduced gradient -> float32, for unscaling, clipping and the update."""
    return g.astype(jnp.float32)


def to_float16(x: Array, *, divisor: bool = False) -> tuple[Array, Array]:
    """float32 -> (float16 of the same shape, its scale float32 []), to be read by `from_float16`.

    The scale is a power of two that brings the largest element to between 2^14 and 2^15: elements down to 2^-28 of it
    keep 11 bits, down to 2^-39 fewer, and rounded values are not rounded again under another scale. divisor: x has no
    negative elements, and positive elements stay positive.
    """
    exponent = jnp.maximum(jnp.frexp(jnp.max(jnp.abs(x)))[1], -LARGEST_SHIFT)
    scaled = x * jnp.ldexp(jnp.float32(1), 15 - exponent)
    if divisor:
        scaled = jnp.where(x > 0, jnp.maximum(scaled, SMALLEST_FLOAT16), 0)
    return scaled.astype(jnp.float16), jnp.ldexp(jnp.float32(1), exponent - 15)


def from_float16(x: Array, scale: Array) -> Array:
    """float16 and its scale float32 [] -> float32."""
    return x.astype(jnp.float32) * scale
