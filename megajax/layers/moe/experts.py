"""The experts of a mixture: feed-forward layers that compute on rows sorted by expert.

R rows, the first sum(sizes) of them in use; L experts of a device, D hidden, F ffn of a device.
"""

from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.ad_checkpoint import checkpoint_name

from megajax.kernels.grouped.capability import GroupedKernel
from megajax.layers.mlp.config import MLPConfig
from megajax.layers.mlp.module import activated
from megajax.layers.moe.dispatch import ExchangedTokens
from megajax.layers.param import ROUNDED, ZEROS, LayerSettings, Matrix, Normal, matrix, operand_axes, param


class ExpertMLPs(nnx.Module):
    """An `MLP` for each expert."""

    def __init__(self, cfg: MLPConfig, settings: LayerSettings, *, number: int, width: int):
        self.cfg = cfg
        # The width of latent tokens is not `embed`: ZeRO and FSDP do not shard it.
        embed = "embed" if width == settings.hidden else None
        for name in cfg.inner:
            axes = ("expert", embed, "expert_mlp")
            setattr(self, name, matrix(settings, (number, width, cfg.ffn), axes))
        axes = ("expert", "expert_mlp", embed)
        self.down = matrix(settings, (number, cfg.ffn, width), axes, init=Normal(settings.output_std))
        if cfg.bias:
            for name in cfg.inner:
                shape, axes = (number, cfg.ffn), ("expert", "expert_mlp")
                setattr(self, f"{name}_bias", param(shape, axes, init=ZEROS, role="bias"))
            self.down_bias = param((number, width), ("expert", embed), init=ZEROS, role="bias")

    def matrix(self, name: str) -> Matrix:
        """The matrix of this name, of all experts."""
        return getattr(self, name)

    def leaves(self) -> dict[str, nnx.Variable]:
        """Weights and observations by name; those of an adapter as "up.lora_a"."""
        names = (*self.cfg.inner, "down")
        leaves = {name + end: leaf for name in names for end, leaf in self.matrix(name).leaves().items()}
        return leaves | {f"{name}_bias": getattr(self, f"{name}_bias") for name in names if self.cfg.bias}

    def weights(self) -> dict[str, Any]:
        """Arrays by name, and the operands that the step has made of them."""
        return {name: leaf[...] for name, leaf in self.leaves().items()} | self._rounded()

    def _rounded(self) -> dict[str, Any]:
        rounded = {name + ROUNDED: self.matrix(name).rounded for name in (*self.cfg.inner, "down")}
        return {name: operands for name, operands in rounded.items() if operands is not None}

    def axes(self) -> dict[str, Any]:
        """Logical axes of the `weights` of one layer, by name."""
        axes = {name: leaf.axes[len(leaf.axes) - leaf[...].ndim :] for name, leaf in self.leaves().items()}
        rounded = {name: operand_axes(of, axes[name.removesuffix(ROUNDED)]) for name, of in self._rounded().items()}
        return axes | rounded

    def __call__(
        self, sent: ExchangedTokens, weights: Mapping[str, Array], kernel: GroupedKernel, shards: int
    ) -> Array:
        """Outputs of the rows, each times its weight [R, D]. weights: of this device; shards: of the ffn.

        The factor is applied to the inner activation, so its gradient does not need the output.
        """
        rows, sizes, scale = sent.rows, sent.sizes, sent.weights

        def product(name: str, rows: Array) -> Array:
            """With the output of the matrix's adapter. If the ffn is sharded, a partial sum or a shard of the
            columns."""
            multiplied = self.matrix(name)
            ends = (*multiplied.leaves(), *[ROUNDED] * (multiplied.rounded is not None))
            return multiplied.grouped(rows, sizes, kernel, {end: weights[name + end] for end in ends})

        def bias(name: str) -> Array:
            return weights[f"{name}_bias"][_experts(sizes, rows.shape[0])]

        inputs = []
        for name in self.cfg.inner:
            x = product(name, rows)
            x = x + bias(name).astype(x.dtype) if self.cfg.bias else x
            inputs.append(checkpoint_name(x, "mlp"))
        y = product("down", checkpoint_name(activated(self.cfg, inputs, scale), "activation"))
        return y + (bias("down").astype(jnp.float32) * scale / shards).astype(y.dtype) if self.cfg.bias else y


def _experts(sizes: Array, rows: int) -> Array:
    """Expert of each row, int32 [R]; the last expert for unused rows."""
    return jnp.minimum(jnp.sum(jnp.arange(rows)[:, None] >= jnp.cumsum(sizes)[None], axis=1), sizes.size - 1)
