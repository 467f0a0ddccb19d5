"""Residual blocks."""

from collections.abc import Callable

import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.ad_checkpoint import checkpoint_name

from megajax.config.errors import UserError
from megajax.layers.block.cross_config import CrossBlockConfig
from megajax.layers.block.residual import ResidualBlock
from megajax.layers.cache_facts import below
from megajax.layers.configs import BlockConfig, FeedForwardBlockConfig, MixerBlockConfig
from megajax.layers.context import Context, dropout
from megajax.layers.decoding import Cache
from megajax.layers.param import LayerSettings

type Apply = Callable[[str, Array], Array]
"""(name of a sub-layer, its input) -> its output."""

MIXER_PLACE, MLP_PLACE, CROSS_PLACE = 2, 3, 4
PLACES = {MIXER_PLACE: "mixer", MLP_PLACE: "mlp", CROSS_PLACE: "cross"}
"""Number folded into the random keys of dropout -> the sub-layer."""


class Residual(nnx.Module):
    """Base of residual blocks, [B, S, D] -> [B, S, D], laid out (batch, seq_residual, embed)."""

    def __init__(self, cfg: ResidualBlock, settings: LayerSettings):
        self.rate, self.layout = cfg.dropout, settings.layout

    def __call__(self, x: Array, ctx: Context) -> Array:
        return self.residual(x, ctx, lambda name, x: getattr(self, name)(x, ctx))

    def step(self, x: Array, cache: Cache, ctx: Context) -> tuple[Array, Cache]:
        """The tokens of a decoding step, [T, 1, D] -> [T, 1, D]; cache: leaves by sub-layer and name, "mixer.key"."""
        cache = dict(cache)

        def apply(name: str, x: Array) -> Array:
            layer, layer_cache = getattr(self, name), below(cache, name)
            if not layer_cache:
                return layer(x, ctx)
            y, layer_cache = layer.step(x, layer_cache, ctx)
            cache.update({f"{name}.{leaf}": array for leaf, array in layer_cache.items()})
            return y

        return self.residual(x, ctx, apply), cache

    def remember(self, cache: Cache, ctx: Context) -> Cache:
        """The cache with the block's state from `ctx.memory`; unchanged without cross-attention."""
        del ctx
        return cache

    def residual(self, x: Array, ctx: Context, apply: Apply) -> Array:
        """The residual additions of the block, for training and decoding."""
        raise NotImplementedError

    def gather_sequence(self, normed: Array) -> Array:
        """Output of a norm, gathered along the sequence over `tensor`."""
        return self.layout.act(checkpoint_name(normed, "norm"), "batch", "seq", "embed")

    def layer_input(self, layer: nnx.Module, normed: Array) -> Array:
        """Output of a norm as the layer takes it: gathered, or sharded along the sequence."""
        takes_local = getattr(layer, "own_positions", False)
        return checkpoint_name(normed, "norm") if takes_local else self.gather_sequence(normed)

    def drop(self, y: Array, x: Array, ctx: Context, place: int) -> Array:
        """Dropout of a sub-layer's output. Raises UserError if shape or dtype do not fit the residual stream x."""
        if y.shape != x.shape or jnp.promote_types(x.dtype, y.dtype) != x.dtype:
            layer = type(getattr(self, PLACES[place])).__name__
            raise UserError(
                f"{layer} returns {y.dtype} {y.shape} for the residual stream, {x.dtype} {x.shape}\nlayout.dot "
                "multiplies by a weight in the dtype of x; elsewhere, write weight[...].astype(x.dtype): weights of "
                "layers may come in the wider dtype of gradients"
            )
        return dropout(y, self.rate, ctx, place, self.layout)


class Block(Residual):
    """Pre-normalised residual block."""

    def __init__(self, cfg: BlockConfig, settings: LayerSettings):
        super().__init__(cfg, settings)
        self.mixer_norm = cfg.norm.build(settings)
        self.mixer = cfg.mixer.build(settings)
        self.mlp_norm = cfg.norm.build(settings)
        self.mlp = cfg.mlp.build(settings)
        scale = cfg.layer_scale
        self.mixer_scale, self.mlp_scale = (None if scale is None else scale.build(settings) for _ in range(2))

    def residual(self, x: Array, ctx: Context, apply: Apply) -> Array:
        mixed = apply("mixer", self.gather_sequence(self.mixer_norm(x)))
        mixed = mixed if self.mixer_scale is None else self.mixer_scale(mixed)
        x = checkpoint_name(x + self.drop(mixed, x, ctx, MIXER_PLACE), "residual")
        y = apply("mlp", self.layer_input(self.mlp, self.mlp_norm(x)))
        return x + self.drop(y if self.mlp_scale is None else self.mlp_scale(y), x, ctx, MLP_PLACE)


class MixerBlock(Residual):
    """Pre-normalised residual block of one mixer."""

    def __init__(self, cfg: MixerBlockConfig, settings: LayerSettings):
        super().__init__(cfg, settings)
        self.mixer_norm = cfg.norm.build(settings)
        self.mixer = cfg.mixer.build(settings)

    def residual(self, x: Array, ctx: Context, apply: Apply) -> Array:
        return x + self.drop(apply("mixer", self.gather_sequence(self.mixer_norm(x))), x, ctx, MIXER_PLACE)


class FeedForwardBlock(Residual):
    """Pre-normalised residual block of one feed-forward."""

    def __init__(self, cfg: FeedForwardBlockConfig, settings: LayerSettings):
        super().__init__(cfg, settings)
        self.mlp_norm = cfg.norm.build(settings)
        self.mlp = cfg.mlp.build(settings)

    def residual(self, x: Array, ctx: Context, apply: Apply) -> Array:
        return x + self.drop(apply("mlp", self.layer_input(self.mlp, self.mlp_norm(x))), x, ctx, MLP_PLACE)


class PostNormBlock(Block):
    """Post-normalised residual block, [B, S, D] -> [B, S, D], laid out (batch, seq_residual, embed)."""

    def residual(self, x: Array, ctx: Context, apply: Apply) -> Array:
        mixed = apply("mixer", self.layout.act(x, "batch", "seq", "embed"))
        x = checkpoint_name(self.mixer_norm(x + self.drop(mixed, x, ctx, MIXER_PLACE)), "residual")
        entering = x if getattr(self.mlp, "own_positions", False) else self.layout.act(x, "batch", "seq", "embed")
        return self.mlp_norm(x + self.drop(apply("mlp", entering), x, ctx, MLP_PLACE))


class CrossBlock(Block):
    """Block with cross-attention to the preceding section, [B, S, D] -> [B, S, D]."""

    def __init__(self, cfg: CrossBlockConfig, settings: LayerSettings):
        super().__init__(cfg, settings)
        self.cross_norm = cfg.norm.build(settings)
        self.cross = cfg.cross.build(settings)

    def remember(self, cache: Cache, ctx: Context) -> Cache:
        """The cache with keys and values of `ctx.memory`."""
        layer_cache = self.cross.remember(below(cache, "cross"), ctx)
        return {**cache, **{f"cross.{name}": leaf for name, leaf in layer_cache.items()}}

    def residual(self, x: Array, ctx: Context, apply: Apply) -> Array:
        mixed = apply("mixer", self.gather_sequence(self.mixer_norm(x)))
        x = checkpoint_name(x + self.drop(mixed, x, ctx, MIXER_PLACE), "residual")
        crossed = apply("cross", self.gather_sequence(self.cross_norm(x)))
        x = checkpoint_name(x + self.drop(crossed, x, ctx, CROSS_PLACE), "residual")
        return x + self.drop(apply("mlp", self.layer_input(self.mlp, self.mlp_norm(x))), x, ctx, MLP_PLACE)
