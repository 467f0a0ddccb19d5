"""Feed-forward layers. B rows, S positions, D hidden, F ffn."""

import functools

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.ad_checkpoint import checkpoint_name

from megajax.layers.config import DenseMLPConfig, GatedMLPConfig
from megajax.layers.param import ZEROS, Normal, Site, param

ACTIVATIONS = {
    "gelu": functools.partial(jax.nn.gelu, approximate=False),
    "gelu_tanh": functools.partial(jax.nn.gelu, approximate=True),
    "quick_gelu": lambda x: x * jax.nn.sigmoid(1.702 * x),
    "relu": jax.nn.relu,
    "squared_relu": lambda x: jax.nn.relu(x) ** 2,
    "silu": jax.nn.silu,
}


class DenseMLP(nnx.Module):
    """activation(x up) down, [B, S, D] -> [B, S, D]."""

    def __init__(self, cfg: DenseMLPConfig, site: Site):
        self.cfg, self.layout = cfg, site.layout
        self.up = param((site.hidden, cfg.ffn), ("embed", "mlp"), init=Normal(site.std))
        self.down = param((cfg.ffn, site.hidden), ("mlp", "embed"), init=Normal(site.output_std))
        if cfg.bias:
            self.up_bias = param((cfg.ffn,), ("mlp",), init=ZEROS, role="bias")
            self.down_bias = param((site.hidden,), ("embed",), init=ZEROS, role="bias")

    def __call__(self, x: Array) -> Array:
        up = self.layout.dot("bsd,df->bsf", x, self.up[...], "batch", "seq", "mlp")
        if self.cfg.bias:
            up = up + self.up_bias[...][None, None]
        inner = checkpoint_name(ACTIVATIONS[self.cfg.activation](checkpoint_name(up, "mlp")), "activation")
        y = self.layout.dot("bsf,fd->bsd", inner, self.down[...], "batch", "seq_residual", "embed")
        return self.layout.add_bias(y, self.down_bias[...]) if self.cfg.bias else y


class GatedMLP(nnx.Module):
    """(activation(x gate) * (x up + offset)) down, [B, S, D] -> [B, S, D]."""

    def __init__(self, cfg: GatedMLPConfig, site: Site):
        self.cfg, self.layout = cfg, site.layout
        self.gate = param((site.hidden, cfg.ffn), ("embed", "mlp"), init=Normal(site.std))
        self.up = param((site.hidden, cfg.ffn), ("embed", "mlp"), init=Normal(site.std))
        self.down = param((cfg.ffn, site.hidden), ("mlp", "embed"), init=Normal(site.output_std))
        if cfg.bias:
            self.gate_bias = param((cfg.ffn,), ("mlp",), init=ZEROS, role="bias")
            self.up_bias = param((cfg.ffn,), ("mlp",), init=ZEROS, role="bias")
            self.down_bias = param((site.hidden,), ("embed",), init=ZEROS, role="bias")

    def __call__(self, x: Array) -> Array:
        gate = self.layout.dot("bsd,df->bsf", x, self.gate[...], "batch", "seq", "mlp")
        up = self.layout.dot("bsd,df->bsf", x, self.up[...], "batch", "seq", "mlp")
        if self.cfg.bias:
            gate, up = gate + self.gate_bias[...][None, None], up + self.up_bias[...][None, None]
        gate, up = checkpoint_name(gate, "mlp"), checkpoint_name(up, "mlp")
        if self.cfg.clamp is not None:
            gate, up = jnp.minimum(gate, self.cfg.clamp), jnp.clip(up, -self.cfg.clamp, self.cfg.clamp)
        inner = checkpoint_name(ACTIVATIONS[self.cfg.activation](gate) * (up + self.cfg.offset), "activation")
        y = self.layout.dot("bsf,fd->bsd", inner, self.down[...], "batch", "seq_residual", "embed")
        return self.layout.add_bias(y, self.down_bias[...]) if self.cfg.bias else y
