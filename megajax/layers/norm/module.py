"""Normalisation over the last dimension, computed in float32. The result has the dtype of the weights.

Weights are [D] with the axis "embed", as on the residual stream; `size` and `axis` override both for heads and latents.
"""

from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array, lax

from megajax.layers.norm.config import (
    FixedScaleConfig,
    IdentityNormConfig,
    L2NormConfig,
    LayerNormConfig,
    LayerScaleConfig,
    RMSNormConfig,
)
from megajax.layers.param import ONES, ZEROS, Constant, LayerSettings, param
from megajax.layers.remat import save_only_inputs


class LayerNorm(nnx.Module):
    """(x - mean) / sqrt(variance + epsilon) * gain + bias, [..., D] -> [..., D]; without gain in x's dtype."""

    def __init__(
        self, cfg: LayerNormConfig, settings: LayerSettings, *, size: int | None = None, axis: str | None = "embed"
    ):
        self.cfg, self.layout = cfg, settings.layout
        if cfg.gain:
            self.gain = _gain(cfg, size or settings.hidden, axis)
        if cfg.bias:
            self.bias = param((size or settings.hidden,), (axis,), init=ZEROS, role="bias")

    def __call__(self, x: Array) -> Array:
        gain = self.gain[...] if self.cfg.gain else jnp.ones(x.shape[-1:], x.dtype)
        return self.layout.per_token(self.normalise, x, gain, self.bias[...] if self.cfg.bias else jnp.zeros_like(gain))

    def normalise(self, x: Array, gain: Array, bias: Array) -> Array:
        return _normalised(self.cfg.epsilon, gain.dtype, x, _factor(self.cfg, gain, x), _row(bias, x))


class RMSNorm(nnx.Module):
    """x / sqrt(mean(x^2) + epsilon) * gain, [..., D] -> [..., D]."""

    def __init__(
        self, cfg: RMSNormConfig, settings: LayerSettings, *, size: int | None = None, axis: str | None = "embed"
    ):
        self.cfg, self.layout = cfg, settings.layout
        self.gain = _gain(cfg, size or settings.hidden, axis)

    def __call__(self, x: Array) -> Array:
        return self.layout.per_token(save_only_inputs(self.normalise), x, self.gain[...])

    def normalise(self, x: Array, gain: Array) -> Array:
        return (_scaled(x, self.cfg.epsilon) * _factor(self.cfg, gain, x)).astype(gain.dtype)


class IdentityNorm(nnx.Module):
    """x, [..., D] -> [..., D]."""

    def __init__(
        self, cfg: IdentityNormConfig, settings: LayerSettings, *, size: int | None = None, axis: str | None = "embed"
    ):
        del cfg, settings, size, axis

    def __call__(self, x: Array) -> Array:
        return x


class L2Norm(nnx.Module):
    """x / sqrt(mean(x^2) + epsilon), [..., D] -> [..., D] in x's dtype; no weights."""

    def __init__(
        self, cfg: L2NormConfig, settings: LayerSettings, *, size: int | None = None, axis: str | None = "embed"
    ):
        del settings, size, axis
        self.cfg = cfg

    def __call__(self, x: Array) -> Array:
        return _scaled(x, self.cfg.epsilon).astype(x.dtype)


class LayerScale(nnx.Module):
    """x * gain, [B, S, D] -> [B, S, D] in x's dtype."""

    def __init__(self, cfg: LayerScaleConfig, settings: LayerSettings):
        self.layout = settings.layout
        self.gain = param((settings.hidden,), ("embed",), init=Constant(cfg.initial), role="gain")

    def __call__(self, x: Array) -> Array:
        return self.layout.per_token(lambda x, gain: x * gain.astype(x.dtype)[None, None], x, self.gain[...])


class FixedScale(nnx.Module):
    """x * factor, [B, S, D] -> [B, S, D] in x's dtype."""

    def __init__(self, cfg: FixedScaleConfig, settings: LayerSettings):
        del settings
        self.factor = cfg.factor

    def __call__(self, x: Array) -> Array:
        return x * jnp.asarray(self.factor, x.dtype)


def _gain(cfg: LayerNormConfig | RMSNormConfig, size: int, axis: str | None) -> nnx.Param:
    return param((size,), (axis,), init=ZEROS if cfg.zero_centred else ONES, role="gain")


def _scaled(x: Array, epsilon: float) -> Array:
    full = x.astype(jnp.float32)
    return full * lax.rsqrt(jnp.square(full).mean(-1, keepdims=True) + epsilon)


def _factor(cfg: LayerNormConfig | RMSNormConfig, gain: Array, x: Array) -> Array:
    return 1 + _row(gain, x) if cfg.zero_centred else _row(gain, x)


def _row(weight: Array, x: Array) -> Array:
    return weight.astype(jnp.float32).reshape((1,) * (x.ndim - 1) + x.shape[-1:])


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _normalised(epsilon: float, dtype: jnp.dtype, x: Array, factor: Array, bias: Array) -> Array:
    """(x - mean) / sqrt(variance + epsilon) * factor + bias: x [..., D], factor and bias float32 [1, ..., D]."""
    return _forward(epsilon, dtype, x, factor, bias)[0]


def _forward(epsilon: float, dtype: jnp.dtype, x: Array, factor: Array, bias: Array) -> tuple[Array, tuple[Array, ...]]:
    full = x.astype(jnp.float32)
    mean = full.mean(-1, keepdims=True)
    scale = lax.rsqrt(jnp.square(full - mean).mean(-1, keepdims=True) + epsilon)
    return ((full - mean) * scale * factor + bias).astype(dtype), (x, factor, mean, scale)


def _backward(epsilon: float, dtype: jnp.dtype, saved: tuple[Array, ...], dy: Array) -> tuple[Array, Array, Array]:
    """The barrier keeps the compiler from fusing the statistics with the normalised values, which it would then write
    to memory in float32 for the sums over rows."""
    del epsilon, dtype
    x, factor, *statistics = saved
    mean, scale = lax.optimization_barrier(statistics)
    dy, centred = dy.astype(jnp.float32), x.astype(jnp.float32) - mean
    inner = dy * factor
    along = jnp.square(scale) * (inner * centred).mean(-1, keepdims=True)
    dx = (inner - centred * along - inner.mean(-1, keepdims=True)) * scale
    rows = tuple(range(x.ndim - 1))
    return dx.astype(x.dtype), (dy * centred * scale).sum(rows, keepdims=True), dy.sum(rows, keepdims=True)


_normalised.defvjp(_forward, _backward)
