"""Residual blocks."""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.ad_checkpoint import checkpoint_name

from megajax.config.errors import UserError
from megajax.layers.block.config import BlockConfig
from megajax.layers.cache_spec import below
from megajax.layers.context import Context, dropout, spliced
from megajax.layers.decoding import Cache
from megajax.layers.param import LayerSettings

type Apply = Callable[[str, Array], Array]
"""(name of a sub-layer, its input) -> its output."""

PLACES = {"mixer": 2, "mlp": 3, "cross": 4, "beside": 5}
"""Sub-layer -> number folded into the random keys of its dropout."""


class Block(nnx.Module):
    """Residual block, [B, S, D] -> [B, S, D], laid out (batch, seq_residual, embed)."""

    cross: Any
    norm: Any

    def __init__(self, cfg: BlockConfig, settings: LayerSettings):
        self.rate, self.placement, self.layout = cfg.dropout, cfg.norm_placement, settings.layout
        self.sum_weights, self.deepstack = cfg.sum_weights, cfg.deepstack
        self.names, self.named_sums = tuple(cfg.layers()), cfg.saved_sums()
        for name in cfg.norms():
            setattr(self, name, cfg.norm.build(settings))
        for name, layer in cfg.layers().items():
            setattr(self, name, layer.build(settings))
            if cfg.layer_scale is not None:
                setattr(self, f"{name}_scale", cfg.layer_scale.build(settings))

    def part(self, name: str) -> Any:
        """A sub-layer, norm or scale, by the name of the module that begins the paths of its weights."""
        return getattr(self, name)

    def __call__(self, x: Array, ctx: Context) -> Array:
        return self.residual(x, ctx, lambda name, x: self.part(name)(x, ctx))

    def step(self, x: Array, cache: Cache, ctx: Context) -> tuple[Array, Cache]:
        """The tokens of a decoding step, [T, 1, D] -> [T, 1, D]; cache: leaves by sub-layer and name, "mixer.key"."""
        cache = dict(cache)

        def apply(name: str, x: Array) -> Array:
            layer, layer_cache = self.part(name), below(cache, name)
            if not layer_cache:
                return layer(x, ctx)
            y, layer_cache = layer.step(x, layer_cache, ctx)
            cache.update({f"{name}.{leaf}": array for leaf, array in layer_cache.items()})
            return y

        return self.residual(x, ctx, apply), cache

    def remember(self, cache: Cache, ctx: Context) -> Cache:
        """The cache with the block's state from `ctx.memory`; unchanged without cross-attention."""
        if "cross" not in self.names:
            return cache
        layer_cache = self.cross.remember(below(cache, "cross"), ctx)
        return {**cache, **{f"cross.{name}": leaf for name, leaf in layer_cache.items()}}

    def residual(self, x: Array, ctx: Context, apply: Apply) -> Array:
        """The residual additions of the block, for training and decoding."""

        def added(name: str, x: Array) -> Array:
            stream = x = self.stream(name, x)
            normalised = self.normalised(name, x)
            for part in (name, "beside") if name == "mixer" and "beside" in self.names else (name,):
                y = self.leave(part, apply(part, self.enter(part, normalised)), stream, ctx)
                x = x + y if self.sum_weights is None else _weighted(self.sum_weights.of(part), x, y)
            return x

        if self.placement == "parallel":
            normalised = checkpoint_name(self.norm(x), "norm")
            return x + sum(self.leave(name, apply(name, self.enter(name, normalised)), x, ctx) for name in self.names)
        if self.placement == "parallel_norms":
            entered = {name: self.enter(name, self.normalised(name, x)) for name in self.names}
            return x + sum(self.leave(name, apply(name, y), x, ctx) for name, y in entered.items())
        if "mixer" in self.names:
            x = self.summed("mixer", added("mixer", x))
        if "cross" in self.names:
            x = self.summed("cross", added("cross", x))
        if "mlp" in self.names:
            x = self.summed("mlp", added("mlp", x))
        return self.with_features(x, ctx) if self.deepstack else x

    def with_features(self, x: Array, ctx: Context) -> Array:
        """The output with the states of images for this layer, which follow those that replace the embeddings."""
        states = spliced(ctx, 1 if ctx.layer is None else ctx.layer + 1, x.shape[-1])
        return x if states is None else x + self.layout.act(states.astype(x.dtype), "batch", "seq_residual", "embed")

    def stream(self, name: str, x: Array) -> Array:
        """The residual stream that a sub-layer's output is added to."""
        if self.placement != "input":
            return x
        return checkpoint_name(self.part(f"{name}_norm")(x), "norm").astype(x.dtype)

    def normalised(self, name: str, x: Array) -> Array:
        """The residual stream as the sub-layer reads it, with its norm."""
        if self.placement not in ("pre", "sandwich", "parallel_norms"):
            return x
        return checkpoint_name(self.part(f"{name}_norm")(x), "norm")

    def enter(self, name: str, x: Array) -> Array:
        """Input of a sub-layer: gathered along the sequence, or sharded for layers that take their own positions."""
        return x if getattr(self.part(name), "own_positions", False) else self.layout.act(x, "batch", "seq", "embed")

    def leave(self, name: str, y: Array, x: Array, ctx: Context) -> Array:
        """Output of a sub-layer as it is added to x: normalised, scaled, with dropout.

        Raises UserError if shape or dtype do not fit the residual stream x.
        """
        if y.shape != x.shape or jnp.promote_types(x.dtype, y.dtype) != x.dtype:
            raise UserError(
                f"{type(self.part(name)).__name__} returns {y.dtype} {y.shape} for the residual stream, "
                f"{x.dtype} {x.shape}\nlayout.dot multiplies by a weight in the dtype of x; elsewhere, write "
                "weight[...].astype(x.dtype): weights of layers may come in the wider dtype of gradients"
            )
        if self.placement in ("output", "sandwich"):
            norm = f"{name}_norm" if self.placement == "output" else f"{name}_output_norm"
            y = self.part(norm)(checkpoint_name(y, "residual"))
        y = self.part(f"{name}_scale")(y) if hasattr(self, f"{name}_scale") else y
        return dropout(y, self.rate, ctx, PLACES[name], self.layout)

    def summed(self, name: str, x: Array) -> Array:
        """The residual stream after a sub-layer."""
        x = self.part(f"{name}_norm")(x) if self.placement == "post" else x
        return checkpoint_name(x, "residual") if name in self.named_sums else x


def _weighted(factors: tuple[float, float], x: Array, y: Array) -> Array:
    """The weighted sum of the residual stream x and an output y, in x's dtype."""
    stream, output = factors
    return x * jnp.asarray(stream, x.dtype) + y * jnp.asarray(output, y.dtype)
