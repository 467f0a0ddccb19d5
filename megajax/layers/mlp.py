"""Feed-forward layers. B rows, S positions, D hidden, F ffn."""

import functools
import math
from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.ad_checkpoint import checkpoint_name

from megajax.layers.config import DenseMLPConfig, GatedMLPConfig
from megajax.layers.context import Context
from megajax.layers.fused import keeping_inputs
from megajax.layers.param import ZEROS, LayerSettings, Normal, matrix, param


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


class DenseMLP(nnx.Module):
    """activation(x up) down, [B, S, D] -> [B, S, D]."""

    def __init__(self, cfg: DenseMLPConfig, settings: LayerSettings):
        self.cfg, self.layout = cfg, settings.layout
        self.up = matrix(settings, (settings.hidden, cfg.ffn), ("embed", "mlp"))
        self.down = matrix(settings, (cfg.ffn, settings.hidden), ("mlp", "embed"), init=Normal(settings.output_std))
        if cfg.bias:
            self.up_bias = param((cfg.ffn,), ("mlp",), init=ZEROS, role="bias")
            self.down_bias = param((settings.hidden,), ("embed",), init=ZEROS, role="bias")

    def __call__(self, x: Array, ctx: Context) -> Array:
        del ctx
        up = self.layout.dot("bsd,df->bsf", x, self.up, "batch", "seq", "mlp")
        if self.cfg.bias:
            up = up + self.up_bias[...][None, None]
        activation = keeping_inputs(ACTIVATIONS[self.cfg.activation])
        inner = checkpoint_name(activation(checkpoint_name(up, "mlp")), "activation")
        y = self.layout.dot("bsf,fd->bsd", inner, self.down, "batch", "seq_residual", "embed")
        return self.layout.add_bias(y, self.down_bias[...]) if self.cfg.bias else y


class GatedMLP(nnx.Module):
    """(activation(x gate) * (x up + offset)) down, [B, S, D] -> [B, S, D]."""

    def __init__(self, cfg: GatedMLPConfig, settings: LayerSettings):
        self.cfg, self.layout = cfg, settings.layout
        self.gate = matrix(settings, (settings.hidden, cfg.ffn), ("embed", "mlp"))
        self.up = matrix(settings, (settings.hidden, cfg.ffn), ("embed", "mlp"))
        self.down = matrix(settings, (cfg.ffn, settings.hidden), ("mlp", "embed"), init=Normal(settings.output_std))
        if cfg.bias:
            self.gate_bias = param((cfg.ffn,), ("mlp",), init=ZEROS, role="bias")
            self.up_bias = param((cfg.ffn,), ("mlp",), init=ZEROS, role="bias")
            self.down_bias = param((settings.hidden,), ("embed",), init=ZEROS, role="bias")

    def __call__(self, x: Array, ctx: Context) -> Array:
        del ctx
        gate = self.layout.dot("bsd,df->bsf", x, self.gate, "batch", "seq", "mlp")
        up = self.layout.dot("bsd,df->bsf", x, self.up, "batch", "seq", "mlp")
        if self.cfg.bias:
            gate, up = gate + self.gate_bias[...][None, None], up + self.up_bias[...][None, None]
        gate, up = checkpoint_name(gate, "mlp"), checkpoint_name(up, "mlp")
        if self.cfg.clamp is not None:
            gate, up = jnp.minimum(gate, self.cfg.clamp), jnp.clip(up, -self.cfg.clamp, self.cfg.clamp)
        inner = checkpoint_name(keeping_inputs(self.product)(gate, up), "activation")
        y = self.layout.dot("bsf,fd->bsd", inner, self.down, "batch", "seq_residual", "embed")
        return self.layout.add_bias(y, self.down_bias[...]) if self.cfg.bias else y

    def product(self, gate: Array, up: Array) -> Array:
        return ACTIVATIONS[self.cfg.activation](gate) * (up + self.cfg.offset)
