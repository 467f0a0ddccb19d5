"""Mamba-2 (Dao and Gu 2024). B rows, S positions, D hidden, N heads, P head size, G groups, Z state size, K filter."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.ad_checkpoint import checkpoint_name

from megajax.kernels.context.recurrence import RowChunks
from megajax.kernels.ssm.ssd import Scan, causal_conv, gated_norm, ssd, ssd_transition
from megajax.layers.cache_spec import row_axes
from megajax.layers.context import Context
from megajax.layers.decoding import Cache, advance_rows, last_inputs
from megajax.layers.mamba.config import Mamba1Config, Mamba2Config
from megajax.layers.param import ONES, ZEROS, LayerSettings, Normal, Uniform, matrix, param, with_head_copies
from megajax.layers.remat import save_only_inputs
from megajax.mesh.layout import AxesTree
from megajax.mesh.rules import LogicalAxes

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
        self,
        cfg: Mamba2Config | Mamba1Config,
        settings: LayerSettings,
        shape: tuple[int, ...],
        axes: tuple[str | None, ...],
    ):
        self.layout = settings.layout
        init = Uniform(-(cfg.conv_kernel**-0.5), cfg.conv_kernel**-0.5)
        self.kernel = param((cfg.conv_kernel, *shape), (None, *axes), init=init, role="filter")
        self.bias = param(shape, axes, init=init, role="bias") if cfg.conv_bias else None

    def weights(self) -> dict[str, Array]:
        """Weights by name, with groups copied where there are more devices than groups."""
        params = {"kernel": self.kernel} if self.bias is None else {"kernel": self.kernel, "bias": self.bias}
        return {name: with_head_copies(self.layout, w) for name, w in params.items()}


def silu_conv(x: Array, weights: Mapping[str, Array], runs: Array | None, before: Array | None) -> Array:
    """silu of the convolution of x [B, S, ...], in x's dtype; before [B, K - 1, ...]: the inputs before x."""
    return jax.nn.silu(causal_conv(x, weights["kernel"], weights.get("bias"), runs, before)).astype(x.dtype)


type Inputs = Mapping[str, Array]
"""Projections of the residual stream: x [B, S, N, P], b and c [B, S, G, Z] before convolutions, dt [B, S, N]."""

INPUT_AXES: Mapping[str, LogicalAxes] = {"x": HEADS, "b": GROUPS, "c": GROUPS, "dt": ("batch", "seq", "heads")}


class Mamba2(nnx.Module):
    """A state-space layer, [B, S, D] -> [B, S, D]."""

    def __init__(self, cfg: Mamba2Config, settings: LayerSettings):
        hidden, head, group = settings.hidden, (cfg.heads, cfg.head_dim), (cfg.groups, cfg.state)
        self.cfg, self.layout = cfg, settings.layout
        per_head, per_group = ("heads", "head_dim"), (settings.layout.plan.kv_heads(cfg.groups), "state")
        self.in_z = matrix(settings, (hidden, *head), ("embed", *per_head))
        self.in_x = matrix(settings, (hidden, *head), ("embed", *per_head))
        self.in_b = matrix(settings, (hidden, *group), ("embed", *per_group))
        self.in_c = matrix(settings, (hidden, *group), ("embed", *per_group))
        self.in_dt = param((hidden, cfg.heads), ("embed", "heads"), init=Normal(settings.std))
        self.output = matrix(
            settings, (*head, hidden), (*per_head, "embed"), init=Normal(settings.output_std), inputs=2
        )
        if cfg.bias:
            self.in_z_bias = param(head, per_head, init=ZEROS, role="bias")
            self.in_x_bias = param(head, per_head, init=ZEROS, role="bias")
            self.in_b_bias = param(group, per_group, init=ZEROS, role="bias")
            self.in_c_bias = param(group, per_group, init=ZEROS, role="bias")
            self.in_dt_bias = param((cfg.heads,), ("heads",), init=ZEROS, role="bias")
            self.output_bias = param((hidden,), ("embed",), init=ZEROS, role="bias")
        self.conv_x = Filter(cfg, settings, head, per_head)
        self.conv_b = Filter(cfg, settings, group, per_group)
        self.conv_c = Filter(cfg, settings, group, per_group)
        steps, rates = StepBias(cfg.dt_min, cfg.dt_max, cfg.dt_floor), LogOfUniform(cfg.decay_min, cfg.decay_max)
        self.dt_bias = param((cfg.heads,), ("heads",), init=steps, role="rate")
        self.a_log = param((cfg.heads,), ("heads",), init=rates, role="rate")
        self.skip = param((cfg.heads,), ("heads",), init=ONES, role="rate")
        self.norm_gain = param(head, per_head, init=ONES, role="gain")

    def __call__(self, x: Array, ctx: Context) -> Array:
        inputs, z = self.project(x)
        sequence_sharding, reach = self.layout.sequence_sharding(), self.cfg.conv_kernel - 1

        def local(inputs: Inputs, weights: Mapping[str, Mapping[str, Array]], segments: Array | None) -> Array:
            rows = RowChunks.of(sequence_sharding, segments)
            before = {name: rows.last_inputs(inputs[name], reach) for name in ("x", "b", "c")}
            inputs = {name: rows.split_chunks(array) for name, array in inputs.items()}
            return rows.join_chunks(self.recurrence(inputs, weights, rows.runs(), before, row_chunks=rows)[0])

        of_rows = None if ctx.segments is None else ("batch", "seq")
        island = self.layout.island(local, (INPUT_AXES, self.axes(), of_rows), HEADS)
        y = island(inputs, self.weights(), ctx.segments)
        return self.project_output(checkpoint_name(y, "attention"), z)

    def step(self, x: Array, cache: Cache, ctx: Context) -> tuple[Array, Cache]:
        """A decoding step, [T, 1, D] -> [T, 1, D]; cache: see `Mamba2Config.cache_leaves`."""

        def advance(inputs: Inputs, weights: Any, before: Cache, counts: Array) -> tuple[Array, Cache]:
            y, state = self.recurrence(inputs, weights, None, before, counts)
            last = {name: last_inputs(inputs[name], before[name], counts) for name in ("x", "b", "c")}
            return y, {**last, "state": state}

        inputs, z = self.project(x)
        weights, leaves = (self.weights(), self.axes()), (cache, row_axes(self.cfg))
        y, cache = advance_rows(self.layout, advance, (inputs, INPUT_AXES), weights, leaves, HEADS, ctx)
        return self.project_output(y, z), cache

    def project(self, x: Array) -> tuple[Inputs, Array]:
        """[B, S, D] -> the inputs of the convolutions and the recurrence, and the gate [B, S, N, P]."""
        dot = self.layout.dot
        z, y = dot("bsd,dnp->bsnp", x, self.in_z, *HEADS), dot("bsd,dnp->bsnp", x, self.in_x, *HEADS)
        b, c = dot("bsd,dgz->bsgz", x, self.in_b, *GROUPS), dot("bsd,dgz->bsgz", x, self.in_c, *GROUPS)
        # Not in 8 bits: those matmuls need dimensions that are multiples of 16.
        dt = self.layout.plain().dot("bsd,dn->bsn", x, self.in_dt[...], "batch", "seq", "heads")
        if self.cfg.bias:
            z, y = z + self.in_z_bias[...][None, None], y + self.in_x_bias[...][None, None]
            b = b + with_head_copies(self.layout, self.in_b_bias)[None, None]
            c = c + with_head_copies(self.layout, self.in_c_bias)[None, None]
            dt = dt + self.in_dt_bias[...][None, None]
        y, b, c = checkpoint_name(y, "value"), checkpoint_name(b, "key"), checkpoint_name(c, "query")
        return {"x": y, "b": b, "c": c, "dt": checkpoint_name(dt, "value")}, checkpoint_name(z, "gate")

    def recurrence(
        self,
        inputs: Inputs,
        weights: Mapping[str, Mapping[str, Array]],
        runs: Array | None,
        before: Mapping[str, Array | None],
        counts: Array | None = None,
        row_chunks: RowChunks | None = None,
    ) -> tuple[Array, Array]:
        """Convolutions and recurrence of the local heads: y [B, S, N, P], and the last state [B, N, P, Z].

        counts: int32 [B], number of leading positions that update the state, None for all; row_chunks: how rows are
        split into the chunks in the inputs.
        """
        rates, names = weights["rates"], ("x", "b", "c")
        x, b, c = (save_only_inputs(silu_conv)(inputs[name], weights[name], runs, before.get(name)) for name in names)
        dt = jax.nn.softplus(inputs["dt"].astype(jnp.float32) + rates["dt_bias"].astype(jnp.float32)[None, None])
        a, skip = -jnp.exp(rates["a_log"].astype(jnp.float32)), rates["skip"].astype(jnp.float32)
        dt = masked_steps(jnp.clip(dt, *self.cfg.dt_limit), counts)
        scan = Scan(x, dt, a, b, c, skip, runs, before.get("state"))
        if row_chunks is not None and not row_chunks.unsharded:
            decay, added = ssd_transition(scan)
            first = row_chunks.first_states(decay[..., None], added.reshape(*decay.shape, -1))
            scan = scan._replace(state=first.reshape(added.shape))
        return ssd(scan, self.cfg.chunk)

    def project_output(self, y: Array, z: Array) -> Array:
        """The recurrence's output and the gate [B, S, N, P] -> the layer's output [B, S, D]."""
        cfg = self.cfg
        norm = partial(gated_norm, groups=cfg.groups, epsilon=cfg.norm_epsilon, before_gate=cfg.norm_before_gate)
        y = self.layout.act(save_only_inputs(norm)(y, z, self.norm_gain[...]), *HEADS)
        y = self.layout.dot("bsnp,npd->bsd", y, self.output, "batch", "seq_residual", "embed")
        return self.layout.add_bias(y, self.output_bias[...]) if cfg.bias else y

    def weights(self) -> dict[str, dict[str, Array]]:
        """Weights of the convolutions and the recurrence."""
        convs = {"x": self.conv_x, "b": self.conv_b, "c": self.conv_c}
        rates = {"dt_bias": self.dt_bias[...], "a_log": self.a_log[...], "skip": self.skip[...]}
        return {**{name: conv.weights() for name, conv in convs.items()}, "rates": rates}

    def axes(self) -> Mapping[str, AxesTree]:
        """Logical axes of `weights`."""
        inner = {"x": ("heads", "head_dim"), "b": ("kv_heads", "state"), "c": ("kv_heads", "state")}
        names = ("kernel", "bias") if self.cfg.conv_bias else ("kernel",)
        convs = {name: {part: (None, *axes)[part == "bias" :] for part in names} for name, axes in inner.items()}
        return {**convs, "rates": dict.fromkeys(("dt_bias", "a_log", "skip"), ("heads",))}


def masked_steps(dt: Array, counts: Array | None) -> Array:
    """Steps [B, S, ...], set to 0 from position `counts` int32 [B] on, which keeps the state. None: unchanged."""
    if counts is None:
        return dt
    present = jnp.arange(dt.shape[1])[None] < counts[:, None]
    return jnp.where(present[..., None], dt, 0)
