"""Normalisation over the hidden dimension, computed in float32."""

import jax.numpy as jnp
from flax import nnx
from jax import Array, lax

from megajax.layers.config import LayerNormConfig, RMSNormConfig
from megajax.layers.param import ONES, ZEROS, Site, param


class LayerNorm(nnx.Module):
    """(x - mean) / sqrt(variance + epsilon) * gain + bias, [..., D] -> [..., D] in x's dtype."""

    def __init__(self, cfg: LayerNormConfig, site: Site):
        self.epsilon, self.layout = cfg.epsilon, site.layout
        self.gain = param((site.hidden,), ("embed",), init=ONES, role="gain")
        self.bias = param((site.hidden,), ("embed",), init=ZEROS, role="bias")

    def __call__(self, x: Array) -> Array:
        return self.layout.rowwise(self.normalise, x, self.gain[...], self.bias[...])

    def normalise(self, x: Array, gain: Array, bias: Array) -> Array:
        full = x.astype(jnp.float32)
        centred = full - full.mean(-1, keepdims=True)
        scale = lax.rsqrt(jnp.square(centred).mean(-1, keepdims=True) + self.epsilon)
        return (centred * scale * _row(gain, x) + _row(bias, x)).astype(x.dtype)


class RMSNorm(nnx.Module):
    """x / sqrt(mean(x^2) + epsilon) * gain, [..., D] -> [..., D] in x's dtype."""

    def __init__(self, cfg: RMSNormConfig, site: Site):
        self.epsilon, self.layout = cfg.epsilon, site.layout
        self.gain = param((site.hidden,), ("embed",), init=ONES, role="gain")

    def __call__(self, x: Array) -> Array:
        return self.layout.rowwise(self.normalise, x, self.gain[...])

    def normalise(self, x: Array, gain: Array) -> Array:
        full = x.astype(jnp.float32)
        scale = lax.rsqrt(jnp.square(full).mean(-1, keepdims=True) + self.epsilon)
        return (full * scale * _row(gain, x)).astype(x.dtype)


def _row(weight: Array, x: Array) -> Array:
    return weight.astype(jnp.float32).reshape((1,) * (x.ndim - 1) + x.shape[-1:])
