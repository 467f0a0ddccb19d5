"""The feed-forward layers of a mixture of experts, stacked, on rows sorted by expert.

R rows, the first sum(sizes) of them in use; L experts of a device, D width, F ffn of a device.
"""

from collections.abc import Mapping

import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.ad_checkpoint import checkpoint_name

from megajax.kernels.grouped.capability import GroupedKernel
from megajax.layers.mlp.config import MLPConfig
from megajax.layers.mlp.module import activated
from megajax.layers.param import ZEROS, LayerSettings, Matrix, Normal, matrix, param


class Experts(nnx.Module):
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

    def leaves(self) -> dict[str, nnx.Variable]:
        """Weights and observations by name; those of an adapter as "up.lora_a"."""
        names = (*self.cfg.inner, "down")
        leaves = {name + end: leaf for name in names for end, leaf in getattr(self, name).leaves().items()}
        return leaves | {f"{name}_bias": getattr(self, f"{name}_bias") for name in names if self.cfg.bias}

    def weights(self) -> dict[str, Array]:
        """Arrays by name."""
        return {name: leaf[...] for name, leaf in self.leaves().items()}

    def axes(self) -> dict[str, tuple[str | None, ...]]:
        """Logical axes of the weights of one layer, by name."""
        return {name: leaf.axes[len(leaf.axes) - leaf[...].ndim :] for name, leaf in self.leaves().items()}

    def apply(
        self,
        kernel: GroupedKernel,
        weights: Mapping[str, Array],
        rows: Array,
        sizes: Array,
        scale: Array,
        shards: int,
    ) -> Array:
        """Rows [R, D] -> outputs [R, D] times scale float32 [R, 1]. shards: number of shards of the ffn.

        The factor is applied to the inner activation, so its gradient does not need the output.
        """
        products = ((name, self.product(kernel, weights, name, rows, sizes)) for name in self.cfg.inner)
        inputs = [checkpoint_name(self.biased(x, weights, name, sizes), "mlp") for name, x in products]
        inner = checkpoint_name(activated(self.cfg, inputs, scale), "activation")
        y = self.product(kernel, weights, "down", inner, sizes)
        if not self.cfg.bias:
            return y
        bias = weights["down_bias"][_experts(sizes, rows.shape[0])].astype(jnp.float32) * scale / shards
        return y + bias.astype(y.dtype)

    def product(
        self, kernel: GroupedKernel, weights: Mapping[str, Array], name: str, rows: Array, sizes: Array
    ) -> Array:
        """Product of rows and the matrix of this name, plus the output of its adapter.

        If the ffn is sharded, it is a partial sum or a shard of the columns.
        """
        multiplied: Matrix = getattr(self, name)
        return multiplied.grouped(rows, sizes, kernel, {end: weights[name + end] for end in multiplied.leaves()})

    def biased(self, x: Array, weights: Mapping[str, Array], name: str, sizes: Array) -> Array:
        if not self.cfg.bias:
            return x
        return x + weights[f"{name}_bias"][_experts(sizes, x.shape[0])].astype(x.dtype)


def _experts(sizes: Array, rows: int) -> Array:
    """Expert of each row, int32 [R]; the last expert for unused rows."""
    return jnp.minimum(jnp.sum(jnp.arange(rows)[:, None] >= jnp.cumsum(sizes)[None], axis=1), sizes.size - 1)
