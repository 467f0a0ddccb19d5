"""Feed-forward layers. B rows, S positions, D hidden, F ffn."""

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.ad_checkpoint import checkpoint_name

from megajax.layers.context import Context
from megajax.layers.mlp.config import DenseMLPConfig, MLPConfig, XieluMLPConfig
from megajax.layers.param import ZEROS, Constant, LayerSettings, Normal, matrix, param
from megajax.layers.remat import save_only_inputs


def gelu_tanh(x: Array) -> Array:
    """0.5 x (1 + tanh(u)) with u = sqrt(2 / pi) (x + 0.044715 x^3) (Hendrycks and Gimpel 2016), in float32 within.

    Written as x sigmoid(2 u): of a tanh the compiler makes a kernel of its own in the backward pass.
    """
    full, factor = x.astype("float32"), 2 * math.sqrt(2 / math.pi)
    return (full * jax.nn.sigmoid(full * (factor + factor * 0.044715 * full * full))).astype(x.dtype)


ACTIVATIONS: Mapping[str, Callable[[Array], Array]] = {
    "gelu": functools.partial(jax.nn.gelu, approximate=False),
    "gelu_tanh": gelu_tanh,
    "quick_gelu": lambda x: x * jax.nn.sigmoid(1.702 * x),
    "relu": jax.nn.relu,
    "squared_relu": lambda x: jax.nn.relu(x) ** 2,
    "silu": jax.nn.silu,
}


def activated(cfg: MLPConfig, inputs: Sequence[Array], scale: Array | None = None) -> Array:
    """The input of `down`, from the products of the layer's input with the matrices `cfg.inner`; times `scale`."""
    activation = ACTIVATIONS[cfg.activation]

    def scaled(x: Array) -> Array:
        return x if scale is None else x * scale.astype(x.dtype)

    if isinstance(cfg, DenseMLPConfig):
        return save_only_inputs(lambda x: scaled(activation(x)))(*inputs)

    def gated(gate: Array, up: Array) -> Array:
        if cfg.clamp is not None:
            gate, up = jnp.minimum(gate, cfg.clamp), jnp.clip(up, -cfg.clamp, cfg.clamp)
        gate = gate if cfg.gate_factor == 1 else gate * jnp.asarray(cfg.gate_factor, gate.dtype)
        return scaled(activation(gate) * (up + cfg.offset))

    return save_only_inputs(gated)(*inputs)


class MLP(nnx.Module):
    """activation(x up) down, or gated: (activation(x gate) * (x up + offset)) down; [B, S, D] -> [B, S, D]."""

    def __init__(self, cfg: MLPConfig | XieluMLPConfig, settings: LayerSettings):
        self.cfg, self.layout = cfg, settings.layout
        for name in cfg.inner:
            setattr(self, name, matrix(settings, (settings.hidden, cfg.ffn), ("embed", "mlp")))
        self.down = matrix(settings, (cfg.ffn, settings.hidden), ("mlp", "embed"), init=Normal(settings.output_std))
        if cfg.bias:
            for name in cfg.inner:
                setattr(self, f"{name}_bias", param((cfg.ffn,), ("mlp",), init=ZEROS, role="bias"))
            self.down_bias = param((settings.hidden,), ("embed",), init=ZEROS, role="bias")

    def __call__(self, x: Array, ctx: Context) -> Array:
        del ctx
        inputs = [checkpoint_name(self.product(name, x), "mlp") for name in self.cfg.inner]
        inner = checkpoint_name(self.activate(inputs), "activation")
        y = self.layout.dot("bsf,fd->bsd", inner, self.down, "batch", "seq_residual", "embed")
        return self.layout.add_bias(y, self.down_bias[...]) if self.cfg.bias else y

    def activate(self, inputs: Sequence[Array]) -> Array:
        """The products of `cfg.inner`, [B, S, F] each -> the input of `down`."""
        cfg: Any = self.cfg
        return activated(cfg, inputs)

    def product(self, name: str, x: Array) -> Array:
        """[B, S, D] by the matrix of this name, with its bias -> [B, S, F]."""
        y = self.layout.dot("bsd,df->bsf", x, getattr(self, name), "batch", "seq", "mlp")
        return y + getattr(self, f"{name}_bias")[...][None, None] if self.cfg.bias else y


class XieluMLP(MLP):
    """xielu(x up) down, [B, S, D] -> [B, S, D]."""

    def __init__(self, cfg: XieluMLPConfig, settings: LayerSettings):
        super().__init__(cfg, settings)
        # softplus of these, plus CURVE for the negative side, is 0.8.
        self.positive = param((1,), (None,), init=Constant(math.log(math.expm1(0.8))), role="bias")
        self.negative = param((1,), (None,), init=Constant(math.log(math.expm1(0.8 - CURVE))), role="bias")

    def activate(self, inputs: Sequence[Array]) -> Array:
        return save_only_inputs(xielu)(*inputs, self.positive[...], self.negative[...])


CURVE = 0.5
"""Slope of xIELU at 0."""


def xielu(x: Array, positive: Array, negative: Array) -> Array:
    """a x^2 + x / 2 above 0, else b (exp(min(x, -1e-6)) - 1 - x) + x / 2 (Huang and Schlag 2024), in float32 within.

    a is the softplus of `positive` [1], b that of `negative` [1], plus 1/2.
    """
    full, shape = x.astype(jnp.float32), (1,) * x.ndim
    a = jax.nn.softplus(positive.astype(jnp.float32)).reshape(shape)
    b = CURVE + jax.nn.softplus(negative.astype(jnp.float32)).reshape(shape)
    below = b * (jnp.expm1(jnp.minimum(full, -1e-6)) - full)
    return (jnp.where(full > 0, a * jnp.square(full), below) + CURVE * full).astype(x.dtype)
