"""Mamba (Gu and Dao 2023), for existing checkpoints. B rows, S positions, D hidden, I channels, Z state size."""

from collections.abc import Mapping
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.ad_checkpoint import checkpoint_name

from megajax.kernels.context.recurrence import RowChunks
from megajax.kernels.ssm.selective_scan import SelectiveScan, selective_scan, selective_transition
from megajax.layers.cache_spec import LATEST, POSITION, row_axes
from megajax.layers.context import Context
from megajax.layers.decoding import Advance, Cache, advance_rows, last_inputs
from megajax.layers.mamba.config import Mamba1Config
from megajax.layers.mamba.recurrent import Filter, StepBias, apply_gate, masked_steps, silu_conv
from megajax.layers.param import ONES, ZEROS, LayerSettings, Normal, Uniform, matrix, param
from megajax.layers.remat import save_only_inputs
from megajax.mesh.layout import AxesTree

CHANNELS = ("batch", "seq", "heads")
STATES = ("batch", "seq", "state")
type Scanned = tuple[Array, ...]
"""x and steps before softplus [B, S, I], b and c [B, S, Z]."""

SCANNED = {"x": CHANNELS, "dt": CHANNELS, "b": STATES, "c": STATES}
RATES: AxesTree = {"dt_bias": ("heads",), "a_log": ("heads", "state"), "skip": ("heads",)}


@dataclass(frozen=True, slots=True)
class LogOfRange:
    """Logarithms of 1, 2, ... along the last dimension: `a_log`."""

    def draw(self, key: Array, shape: tuple[int, ...]) -> Array:
        del key
        return jnp.broadcast_to(jnp.log(jnp.arange(1, shape[-1] + 1, dtype=jnp.float32)), shape)


class Mamba1(nnx.Module):
    """A state-space layer, [B, S, D] -> [B, S, D]."""

    def __init__(self, cfg: Mamba1Config, settings: LayerSettings):
        hidden, inner = settings.hidden, cfg.inner
        self.cfg, self.layout = cfg, settings.layout
        self.in_z = matrix(settings, (hidden, inner), ("embed", "heads"))
        self.in_x = matrix(settings, (hidden, inner), ("embed", "heads"))
        self.down_dt = matrix(settings, (inner, cfg.rank), ("heads", None))
        self.down_b = matrix(settings, (inner, cfg.state), ("heads", "state"))
        self.down_c = matrix(settings, (inner, cfg.state), ("heads", "state"))
        init = Uniform(-(cfg.rank**-0.5), cfg.rank**-0.5)
        self.up_dt = matrix(settings, (cfg.rank, inner), (None, "heads"), init=init)
        self.output = matrix(settings, (inner, hidden), ("heads", "embed"), init=Normal(settings.output_std))
        if cfg.inner_norm is not None:
            self.dt_norm = cfg.inner_norm.build(settings, size=cfg.rank, axis=None)
            self.b_norm = cfg.inner_norm.build(settings, size=cfg.state, axis=None)
            self.c_norm = cfg.inner_norm.build(settings, size=cfg.state, axis=None)
        if cfg.bias:
            self.in_z_bias = param((inner,), ("heads",), init=ZEROS, role="bias")
            self.in_x_bias = param((inner,), ("heads",), init=ZEROS, role="bias")
            self.output_bias = param((hidden,), ("embed",), init=ZEROS, role="bias")
        self.conv_x = Filter(cfg.conv_kernel, settings, (inner,), ("heads",), bias=cfg.conv_bias)
        self.dt_bias = param((inner,), ("heads",), init=StepBias(cfg.dt_min, cfg.dt_max, cfg.dt_floor), role="rate")
        self.a_log = param((inner, cfg.state), ("heads", "state"), init=LogOfRange(), role="rate")
        self.skip = param((inner,), ("heads",), init=ONES, role="rate")

    def __call__(self, x: Array, ctx: Context) -> Array:
        x, z = self.project(x)
        sequence_sharding, weights = self.layout.sequence_sharding(), self.conv_x.weights()

        def convolve(x: Array, weights: Mapping[str, Array], segments: Array | None) -> Array:
            rows = RowChunks.of(sequence_sharding, segments)
            before = rows.last_inputs(x, self.cfg.conv_kernel - 1)
            return rows.join_chunks(save_only_inputs(silu_conv)(rows.split_chunks(x), weights, rows.runs(), before))

        def scan(inputs: Scanned, rates: Mapping[str, Array], segments: Array | None) -> Array:
            rows = RowChunks.of(sequence_sharding, segments)
            inputs = tuple(rows.split_chunks(array) for array in inputs)
            return rows.join_chunks(self.recurrence(inputs, rates, rows.runs(), row_chunks=rows)[0])

        of_rows = None if ctx.segments is None else ("batch", "seq")
        filters: AxesTree = {name: (*[None] * (w.ndim - 1), "heads") for name, w in weights.items()}
        y = self.layout.island(convolve, (CHANNELS, filters, of_rows), CHANNELS)(x, weights, ctx.segments)
        island = self.layout.island(scan, (tuple(SCANNED.values()), RATES, of_rows), CHANNELS)
        y = island(self.scan_inputs(y), self.rates(), ctx.segments)
        return self.project_output(checkpoint_name(y, "attention"), z)

    def step(self, x: Array, cache: Cache, ctx: Context) -> tuple[Array, Cache]:
        """A decoding step, [T, 1, D] -> [T, 1, D]; cache: see `Mamba1Config.cache_leaves`."""
        axes = row_axes(self.cfg)

        def convolve(inputs: Cache, weights: Mapping[str, Array], before: Cache, counts: Array) -> tuple[Array, Cache]:
            x = inputs["input"]
            return silu_conv(x, weights, None, before["x"]), {"x": last_inputs(x, before["x"], counts)}

        def scan(inputs: Cache, rates: Mapping[str, Array], before: Cache, counts: Array) -> tuple[Array, Cache]:
            y, state = self.recurrence(tuple(inputs[name] for name in SCANNED), rates, None, before["state"], counts)
            return y, {"state": state}

        def advance(f: Advance, inputs: tuple, weights: tuple, name: str) -> tuple[Array, Cache]:
            latest = (LATEST + name for name in inputs[0])
            leaves = {name: cache[name] for name in (name, *latest, POSITION) if name in cache}
            return advance_rows(self.layout, f, inputs, weights, (leaves, axes), CHANNELS, ctx)

        x, z = self.project(x)
        weights = self.conv_x.weights()
        filters = {name: (*[None] * (w.ndim - 1), "heads") for name, w in weights.items()}
        y, inputs = advance(convolve, ({"input": x}, {"input": CHANNELS}), (weights, filters), "x")
        scanned = dict(zip(SCANNED, self.scan_inputs(y), strict=True))
        y, state = advance(scan, (scanned, SCANNED), (self.rates(), RATES), "state")
        return self.project_output(y, z), {**inputs, **state}

    def project(self, x: Array) -> tuple[Array, Array]:
        """[B, S, D] -> the input of the convolution, and the gate, [B, S, I] each."""
        dot = self.layout.dot
        z, x = dot("bsd,di->bsi", x, self.in_z, *CHANNELS), dot("bsd,di->bsi", x, self.in_x, *CHANNELS)
        if self.cfg.bias:
            z, x = z + self.in_z_bias[...][None, None], x + self.in_x_bias[...][None, None]
        return checkpoint_name(x, "value"), checkpoint_name(z, "gate")

    def scan_inputs(self, x: Array) -> Scanned:
        """The convolution's output x [B, S, I] -> x, steps before softplus [B, S, I], b and c [B, S, Z]."""
        dot = self.layout.dot
        b = checkpoint_name(dot("bsi,iz->bsz", x, self.down_b, *STATES), "latent")
        c = checkpoint_name(dot("bsi,iz->bsz", x, self.down_c, *STATES), "latent")
        dt = checkpoint_name(dot("bsi,ir->bsr", x, self.down_dt, "batch", "seq", None), "latent")
        if self.cfg.inner_norm is not None:
            dt, b, c = self.dt_norm(dt), self.b_norm(b), self.c_norm(c)
        return x, checkpoint_name(dot("bsr,ri->bsi", dt, self.up_dt, *CHANNELS), "value"), b, c

    def rates(self) -> dict[str, Array]:
        """Weights of the recurrence."""
        return {"dt_bias": self.dt_bias[...], "a_log": self.a_log[...], "skip": self.skip[...]}

    def recurrence(
        self,
        inputs: Scanned,
        rates: Mapping[str, Array],
        runs: Array | None,
        state: Array | None = None,
        counts: Array | None = None,
        row_chunks: RowChunks | None = None,
    ) -> tuple[Array, Array]:
        """The recurrence of the local channels: [B, S, I], and the last state [B, I, Z].

        counts: int32 [B], number of leading positions that update the state, None for all; row_chunks: how rows are
        split into the chunks in the inputs.
        """
        x, dt, b, c = inputs
        full = {name: w.astype(jnp.float32) for name, w in rates.items()}
        dt = masked_steps(jax.nn.softplus(dt.astype(jnp.float32) + full["dt_bias"][None, None]), counts)
        scan = SelectiveScan(x, dt, -jnp.exp(full["a_log"]), b, c, full["skip"], runs, state)
        if row_chunks is not None and not row_chunks.unsharded:
            scan = scan._replace(state=row_chunks.first_states(*selective_transition(scan, self.cfg.chunk)))
        return selective_scan(scan, self.cfg.chunk)

    def project_output(self, y: Array, z: Array) -> Array:
        """The recurrence's output and the gate [B, S, I] -> the layer's output [B, S, D]."""
        y = save_only_inputs(apply_gate)(y, z)
        y = self.layout.dot("bsi,id->bsd", y, self.output, "batch", "seq_residual", "embed")
        return self.layout.add_bias(y, self.output_bias[...]) if self.cfg.bias else y
