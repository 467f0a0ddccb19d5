"""Mamba (Gu and Dao 2023), for checkpoints that have it. B rows, S positions, D hidden, I channels, Z state size."""

from collections.abc import Mapping
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.ad_checkpoint import checkpoint_name

from megajax.kernels.selective_scan import SelectiveScan, selective_scan
from megajax.kernels.ssd import runs_of
from megajax.layers.config import Mamba1Config
from megajax.layers.context import Context
from megajax.layers.fused import keeping_inputs
from megajax.layers.mamba import Cache, Filter, StepBias, filtered, last_inputs
from megajax.layers.param import ONES, ZEROS, LayerSettings, Normal, Uniform, matrix, param
from megajax.mesh.layout import AxesTree
from megajax.mesh.rules import LogicalAxes

CHANNELS = ("batch", "seq", "heads")
STATES = ("batch", "seq", "state")
CACHE_AXES: Mapping[str, LogicalAxes] = {"x": ("batch", None, "heads"), "state": ("batch", "heads", "state")}


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
        spread = Uniform(-(cfg.rank**-0.5), cfg.rank**-0.5)
        self.up_dt = matrix(settings, (cfg.rank, inner), (None, "heads"), init=spread)
        self.output = matrix(settings, (inner, hidden), ("heads", "embed"), init=Normal(settings.output_std))
        if cfg.bias:
            self.in_z_bias = param((inner,), ("heads",), init=ZEROS, role="bias")
            self.in_x_bias = param((inner,), ("heads",), init=ZEROS, role="bias")
            self.output_bias = param((hidden,), ("embed",), init=ZEROS, role="bias")
        self.conv_x = Filter(cfg, settings, (inner,), ("heads",))
        self.dt_bias = param((inner,), ("heads",), init=StepBias(cfg.dt_min, cfg.dt_max, cfg.dt_floor), role="rate")
        self.a_log = param((inner, cfg.state), ("heads", "state"), init=LogOfRange(), role="rate")
        self.skip = param((inner,), ("heads",), init=ONES, role="rate")

    def __call__(self, x: Array, ctx: Context) -> Array:
        y, z, _ = self.mixed(x, None, ctx)
        return self.combined(y, z)

    def step(self, x: Array, cache: Cache, ctx: Context) -> tuple[Array, Cache]:
        """The next positions of each row, [B, S, D] -> [B, S, D]: one, or several of a prompt."""
        y, z, cache = self.mixed(x, cache, ctx)
        return self.combined(y, z), cache

    def cache(self, rows: int, dtype: jnp.dtype) -> Cache:
        """Before the first position. dtype: of activations."""
        cfg = self.cfg
        return {
            "x": self.layout.zeros((rows, cfg.conv_kernel - 1, cfg.inner), dtype, *CACHE_AXES["x"]),
            "state": self.layout.zeros((rows, cfg.inner, cfg.state), jnp.float32, *CACHE_AXES["state"]),
        }

    def mixed(self, x: Array, cache: Cache | None, ctx: Context) -> tuple[Array, Array, Cache]:
        """[B, S, D] -> the recurrence's output and the gate [B, S, I], and what the next positions need."""
        dot, cfg = self.layout.dot, self.cfg
        runs, before = None if ctx.segments is None else runs_of(ctx.segments), cache or {}
        z, raw = dot("bsd,di->bsi", x, self.in_z, *CHANNELS), dot("bsd,di->bsi", x, self.in_x, *CHANNELS)
        if cfg.bias:
            z, raw = z + self.in_z_bias[...][None, None], raw + self.in_x_bias[...][None, None]
        z, raw = checkpoint_name(z, "gate"), checkpoint_name(raw, "value")
        y = keeping_inputs(filtered)(raw, self.conv_x.weights(), runs, before.get("x"))
        b = checkpoint_name(dot("bsi,iz->bsz", y, self.down_b, *STATES), "latent")
        c = checkpoint_name(dot("bsi,iz->bsz", y, self.down_c, *STATES), "latent")
        dt = checkpoint_name(dot("bsi,ir->bsr", y, self.down_dt, "batch", "seq", None), "latent")
        dt = checkpoint_name(dot("bsr,ri->bsi", dt, self.up_dt, *CHANNELS), "value")
        rates = {"dt_bias": self.dt_bias[...], "a_log": self.a_log[...], "skip": self.skip[...]}

        def local(
            inputs: tuple[Array, ...], runs: Array | None, rates: Mapping[str, Array], state: Array | None
        ) -> tuple[Array, Array]:
            x, dt, b, c = inputs
            full = {name: w.astype(jnp.float32) for name, w in rates.items()}
            dt = jax.nn.softplus(dt.astype(jnp.float32) + full["dt_bias"][None, None])
            scan = SelectiveScan(x, dt, -jnp.exp(full["a_log"]), b, c, full["skip"], runs, state)
            return selective_scan(scan, cfg.chunk)

        rows: AxesTree = None if runs is None else ("batch", "seq")
        axes: AxesTree = {"dt_bias": ("heads",), "a_log": ("heads", "state"), "skip": ("heads",)}
        states = CACHE_AXES["state"]
        ins = ((CHANNELS, CHANNELS, STATES, STATES), rows, axes, None if cache is None else states)
        out, state = self.layout.island(local, ins, (CHANNELS, states))((y, dt, b, c), runs, rates, before.get("state"))
        kept = {"x": last_inputs(raw, runs, before.get("x"), cfg.conv_kernel - 1), "state": state}
        return checkpoint_name(out, "attention"), z, kept

    def combined(self, y: Array, z: Array) -> Array:
        """The recurrence's output and the gate [B, S, I] -> the layer's output [B, S, D]."""
        y = keeping_inputs(_gated)(y, z)
        y = self.layout.dot("bsi,id->bsd", y, self.output, "batch", "seq_residual", "embed")
        return self.layout.add_bias(y, self.output_bias[...]) if self.cfg.bias else y


def _gated(y: Array, z: Array) -> Array:
    return (y.astype(jnp.float32) * jax.nn.silu(z.astype(jnp.float32))).astype(y.dtype)
