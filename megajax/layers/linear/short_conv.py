"""Gated short convolutions (Liquid AI 2025, LFM2). B rows, S positions, D hidden, I channels, K filter."""

from collections.abc import Mapping

from flax import nnx
from jax import Array
from jax.ad_checkpoint import checkpoint_name

from megajax.kernels.context.recurrence import RowChunks
from megajax.kernels.ssm.ssd import causal_conv
from megajax.layers.cache_spec import row_axes
from megajax.layers.context import Context
from megajax.layers.decoding import Cache, advance_rows, last_inputs
from megajax.layers.linear.config import ShortConvConfig
from megajax.layers.mamba.recurrent import Filter
from megajax.layers.param import ZEROS, LayerSettings, Normal, matrix, param
from megajax.layers.remat import save_only_inputs

CHANNELS = ("batch", "seq", "heads")
FACTORS = (CHANNELS, CHANNELS)


class ShortConv(nnx.Module):
    """output(c * conv(b * x)), [B, S, D] -> [B, S, D]."""

    def __init__(self, cfg: ShortConvConfig, settings: LayerSettings):
        hidden, channels = settings.hidden, cfg.channels
        self.cfg, self.layout = cfg, settings.layout
        for name in ("in_b", "in_c", "in_x"):
            setattr(self, name, matrix(settings, (hidden, channels), ("embed", "heads")))
            if cfg.bias:
                setattr(self, f"{name}_bias", param((channels,), ("heads",), init=ZEROS, role="bias"))
        self.conv = Filter(cfg.conv_kernel, settings, (channels,), ("heads",), bias=cfg.conv_bias)
        self.output = matrix(settings, (channels, hidden), ("heads", "embed"), init=Normal(settings.output_std))
        if cfg.bias:
            self.output_bias = param((hidden,), ("embed",), init=ZEROS, role="bias")

    def __call__(self, x: Array, ctx: Context) -> Array:
        sequence_sharding, reach = self.layout.sequence_sharding(), self.cfg.conv_kernel - 1
        factors, c = self.project(x)
        weights = self.conv.weights()

        def local(factors: tuple[Array, Array], weights: Mapping[str, Array], segments: Array | None) -> Array:
            rows, product = RowChunks.of(sequence_sharding, segments), save_only_inputs(_product)(*factors)
            before = rows.last_inputs(product, reach)
            return rows.join_chunks(save_only_inputs(_conv)(rows.split_chunks(product), weights, rows.runs(), before))

        of_rows = None if ctx.segments is None else ("batch", "seq")
        y = self.layout.island(local, (FACTORS, _axes(weights), of_rows), CHANNELS)(factors, weights, ctx.segments)
        return self.project_output(checkpoint_name(y, "attention"), c)

    def step(self, x: Array, cache: Cache, ctx: Context) -> tuple[Array, Cache]:
        """A decoding step, [T, 1, D] -> [T, 1, D]; cache: see `ShortConvConfig.cache_leaves`."""

        def advance(inputs: Cache, weights: Cache, before: Cache, counts: Array) -> tuple[Array, Cache]:
            x = inputs["x"]
            return _conv(x, weights, None, before["x"]), {"x": last_inputs(x, before["x"], counts)}

        factors, c = self.project(x)
        weights, inputs = self.conv.weights(), ({"x": _product(*factors)}, {"x": CHANNELS})
        leaves = cache, row_axes(self.cfg)
        y, cache = advance_rows(self.layout, advance, inputs, (weights, _axes(weights)), leaves, CHANNELS, ctx)
        return self.project_output(y, c), cache

    def project(self, x: Array) -> tuple[tuple[Array, Array], Array]:
        """[B, S, D] -> the factors b and x of the convolution's input, and the factor c of its output, [B, S, I]."""
        b, c, x = (self.product(name, x) for name in ("in_b", "in_c", "in_x"))
        return (checkpoint_name(b, "key"), checkpoint_name(x, "value")), checkpoint_name(c, "gate")

    def product(self, name: str, x: Array) -> Array:
        """[B, S, D] by the matrix of this name, with its bias -> [B, S, I]."""
        y = self.layout.dot("bsd,di->bsi", x, getattr(self, name), *CHANNELS)
        return y + getattr(self, f"{name}_bias")[...][None, None] if self.cfg.bias else y

    def project_output(self, y: Array, c: Array) -> Array:
        """The convolution's output and its factor [B, S, I] -> the layer's output [B, S, D]."""
        y = self.layout.dot(
            "bsi,id->bsd", save_only_inputs(_product)(c, y), self.output, "batch", "seq_residual", "embed"
        )
        return self.layout.add_bias(y, self.output_bias[...]) if self.cfg.bias else y


def _axes(weights: Mapping[str, Array]) -> dict[str, tuple[str | None, ...]]:
    return {name: (*[None] * (w.ndim - 1), "heads") for name, w in weights.items()}


def _product(a: Array, b: Array) -> Array:
    return a * b


def _conv(x: Array, weights: Mapping[str, Array], runs: Array | None, before: Array | None) -> Array:
    return causal_conv(x, weights["kernel"], weights.get("bias"), runs, before).astype(x.dtype)
