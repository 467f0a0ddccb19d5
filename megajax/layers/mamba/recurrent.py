"""Layers of short convolutions and a recurrence with a state per head: Mamba-2 and gated delta nets.

B rows, S positions, D hidden, N heads, P head size, G groups of heads, Z state size.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.ad_checkpoint import checkpoint_name

from megajax.kernels.context.recurrence import RowChunks
from megajax.kernels.ssm.ssd import causal_conv
from megajax.layers.cache_spec import row_axes
from megajax.layers.context import Context
from megajax.layers.decoding import Cache, advance_rows, last_inputs
from megajax.layers.param import LayerSettings, Uniform, param, with_head_copies
from megajax.layers.remat import save_only_inputs
from megajax.mesh.layout import AxesTree, Layout
from megajax.mesh.sharding_rules import LogicalAxes

HEADS = ("batch", "seq", "heads", "head_dim")
GROUPS = ("batch", "seq", "kv_heads", "state")


@dataclass(frozen=True, slots=True)
class LogOfUniform:
    """Logarithms of numbers drawn uniformly between low and high: `a_log`."""

    low: float
    high: float

    def draw(self, key: Array, shape: tuple[int, ...]) -> Array:
        return jnp.log(Uniform(self.low, self.high).draw(key, shape))


@dataclass(frozen=True, slots=True)
class StepBias:
    """Inverse softplus of step sizes, log-uniform between low and high and at least `floor`: `dt_bias`."""

    low: float
    high: float
    floor: float

    def draw(self, key: Array, shape: tuple[int, ...]) -> Array:
        steps = jnp.exp(Uniform(math.log(self.low), math.log(self.high)).draw(key, shape))
        steps = jnp.maximum(steps, self.floor)
        return steps + jnp.log(-jnp.expm1(-steps))


class Filter(nnx.Module):
    """The weights of a causal depthwise convolution: kernel [K, ...], bias [...]. Initialised as in PyTorch."""

    def __init__(
        self, width: int, settings: LayerSettings, shape: tuple[int, ...], axes: tuple[str | None, ...], *, bias: bool
    ):
        """width: K; shape, axes: of the channels."""
        self.layout = settings.layout
        init = Uniform(-(width**-0.5), width**-0.5)
        self.kernel = param((width, *shape), (None, *axes), init=init, role="filter")
        self.bias = param(shape, axes, init=init, role="bias") if bias else None

    def weights(self) -> dict[str, Array]:
        """Weights by name, with groups copied where there are more devices than groups."""
        params = {"kernel": self.kernel} if self.bias is None else {"kernel": self.kernel, "bias": self.bias}
        return {name: with_head_copies(self.layout, w) for name, w in params.items()}


def silu_conv(x: Array, weights: Mapping[str, Array], runs: Array | None, before: Array | None) -> Array:
    """silu of the convolution of x [B, S, ...], in x's dtype; before [B, K - 1, ...]: the inputs before x."""
    return jax.nn.silu(causal_conv(x, weights["kernel"], weights.get("bias"), runs, before)).astype(x.dtype)


type Inputs = Mapping[str, Array]
"""Projections of the residual stream, [B, S, N, P], [B, S, G, Z] or [B, S, N]."""


class RecurrentMixer(nnx.Module):
    """A mixer with a state per head, [B, S, D] -> [B, S, D].

    A subclass has a `Filter` conv_NAME for each name of `convolved`, and a weight [N, ...] for each name of `rates`.
    """

    convolved: ClassVar[tuple[str, ...]]
    """Inputs that pass a convolution and silu."""
    rates: ClassVar[tuple[str, ...]]
    """Weights of the recurrence."""
    rate_axes: ClassVar[Mapping[str, LogicalAxes]] = {}
    """Logical axes of those that are not one number per head."""
    input_axes: ClassVar[Mapping[str, LogicalAxes]]
    """Logical axes of all inputs."""
    cfg: Any
    layout: Layout

    def project(self, x: Array) -> tuple[Inputs, Array]:
        """[B, S, D] -> the inputs of the convolutions and the recurrence, and the gate [B, S, N, P]."""
        raise NotImplementedError

    def recurrence(
        self,
        inputs: Inputs,
        rates: Mapping[str, Array],
        runs: Array | None,
        state: Array | None,
        counts: Array | None,
        row_chunks: RowChunks | None,
    ) -> tuple[Array, Array]:
        """The recurrence of the local heads: [B, S, N, P], and the last state, float32.

        inputs: after the convolutions; state: before the first position; counts: int32 [B], number of leading positions
        that update the state, None for all; row_chunks: how rows are split into the chunks in the inputs.
        """
        raise NotImplementedError

    def project_output(self, y: Array, z: Array) -> Array:
        """The recurrence's output and the gate [B, S, N, P] -> the layer's output [B, S, D]."""
        raise NotImplementedError

    def __call__(self, x: Array, ctx: Context) -> Array:
        inputs, z = self.project(x)
        sequence_sharding, reach = self.layout.sequence_sharding(), self.cfg.conv_kernel - 1

        def local(inputs: Inputs, weights: Mapping[str, Mapping[str, Array]], segments: Array | None) -> Array:
            rows = RowChunks.of(sequence_sharding, segments)
            before = {name: rows.last_inputs(inputs[name], reach) for name in self.convolved}
            inputs = {name: rows.split_chunks(array) for name, array in inputs.items()}
            return rows.join_chunks(self.mixed(inputs, weights, rows.runs(), before, row_chunks=rows)[0])

        of_rows = None if ctx.segments is None else ("batch", "seq")
        island = self.layout.island(local, (self.input_axes, self.axes(), of_rows), HEADS)
        y = island(inputs, self.weights(), ctx.segments)
        return self.project_output(checkpoint_name(y, "attention"), z)

    def step(self, x: Array, cache: Cache, ctx: Context) -> tuple[Array, Cache]:
        """A decoding step, [T, 1, D] -> [T, 1, D]; cache: see `cache_leaves` of the config."""

        def advance(inputs: Inputs, weights: Mapping, before: Cache, counts: Array) -> tuple[Array, Cache]:
            y, state = self.mixed(inputs, weights, None, before, counts)
            last = {name: last_inputs(inputs[name], before[name], counts) for name in self.convolved}
            return y, {**last, "state": state}

        inputs, z = self.project(x)
        weights, leaves = (self.weights(), self.axes()), (cache, row_axes(self.cfg))
        y, cache = advance_rows(self.layout, advance, (inputs, self.input_axes), weights, leaves, HEADS, ctx)
        return self.project_output(y, z), cache

    def mixed(
        self,
        inputs: Inputs,
        weights: Mapping[str, Mapping[str, Array]],
        runs: Array | None,
        before: Mapping[str, Array | None],
        counts: Array | None = None,
        row_chunks: RowChunks | None = None,
    ) -> tuple[Array, Array]:
        """Convolutions and recurrence of the local heads. before: the last inputs before the rows, and the state."""
        convolve = save_only_inputs(silu_conv)
        convolved = {name: convolve(inputs[name], weights[name], runs, before.get(name)) for name in self.convolved}
        state = before.get("state")
        return self.recurrence({**inputs, **convolved}, weights["rates"], runs, state, counts, row_chunks)

    def weights(self) -> dict[str, dict[str, Array]]:
        """Weights of the convolutions and the recurrence."""
        filters = {name: getattr(self, f"conv_{name}").weights() for name in self.convolved}
        return {**filters, "rates": {name: getattr(self, name)[...] for name in self.rates}}

    def axes(self) -> Mapping[str, AxesTree]:
        """Logical axes of `weights`."""
        filters: dict[str, AxesTree] = {}
        for name in self.convolved:
            parts, axes = getattr(self, f"conv_{name}").weights(), self.input_axes[name][2:]
            filters[name] = {part: (None, *axes)[part == "bias" :] for part in parts}
        return {**filters, "rates": {name: self.rate_axes.get(name, ("heads",)) for name in self.rates}}


def masked_steps(dt: Array, counts: Array | None) -> Array:
    """Steps [B, S, ...], set to 0 from position `counts` int32 [B] on, which keeps the state. None: unchanged."""
    if counts is None:
        return dt
    present = jnp.arange(dt.shape[1])[None] < counts[:, None]
    return jnp.where(present.reshape(*present.shape, *[1] * (dt.ndim - 2)), dt, 0)


def apply_gate(y: Array, z: Array) -> Array:
    """y silu(z) in y's dtype, in float32 within."""
    return (y.astype(jnp.float32) * jax.nn.silu(z.astype(jnp.float32))).astype(y.dtype)
