"""Mamba-2 (Dao and Gu 2024). B rows, S positions, D hidden, N heads, P head size, G groups, Z state size, K filter."""

from collections.abc import Mapping
from functools import partial
from typing import ClassVar

import jax
import jax.numpy as jnp
from jax import Array
from jax.ad_checkpoint import checkpoint_name

from megajax.kernels.context.recurrence import RowChunks
from megajax.kernels.ssm.ssd import Scan, gated_norm, ssd, ssd_transition
from megajax.layers.mamba.config import Mamba2Config
from megajax.layers.mamba.recurrent import (
    GROUPS,
    HEADS,
    Filter,
    Inputs,
    LogOfUniform,
    RecurrentMixer,
    StepBias,
    apply_gate,
    masked_steps,
)
from megajax.layers.param import ONES, ZEROS, LayerSettings, Normal, matrix, param, with_head_copies
from megajax.layers.remat import save_only_inputs


class Mamba2(RecurrentMixer):
    """A state-space layer, [B, S, D] -> [B, S, D].

    Inputs: x [B, S, N, P], b and c [B, S, G, Z] before convolutions, dt [B, S, N].
    """

    convolved = ("x", "b", "c")
    rates = ("dt_bias", "a_log", "skip")
    input_axes: ClassVar = {"x": HEADS, "b": GROUPS, "c": GROUPS, "dt": ("batch", "seq", "heads")}

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
        self.conv_x = Filter(cfg.conv_kernel, settings, head, per_head, bias=cfg.conv_bias)
        self.conv_b = Filter(cfg.conv_kernel, settings, group, per_group, bias=cfg.conv_bias)
        self.conv_c = Filter(cfg.conv_kernel, settings, group, per_group, bias=cfg.conv_bias)
        steps, rates = StepBias(cfg.dt_min, cfg.dt_max, cfg.dt_floor), LogOfUniform(cfg.decay_min, cfg.decay_max)
        self.dt_bias = param((cfg.heads,), ("heads",), init=steps, role="rate")
        self.a_log = param((cfg.heads,), ("heads",), init=rates, role="rate")
        self.skip = param((cfg.heads,), ("heads",), init=ONES, role="rate")
        if cfg.normalised:
            self.norm_gain = param(head, per_head, init=ONES, role="gain")

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
        if self.cfg.input_factors is not None:
            factors = zip((z, y, b, c, dt), self.cfg.input_factors, strict=True)
            z, y, b, c, dt = (part * jnp.asarray(factor, part.dtype) for part, factor in factors)
        y, b, c = checkpoint_name(y, "value"), checkpoint_name(b, "key"), checkpoint_name(c, "query")
        return {"x": y, "b": b, "c": c, "dt": checkpoint_name(dt, "value")}, checkpoint_name(z, "gate")

    def recurrence(
        self,
        inputs: Inputs,
        rates: Mapping[str, Array],
        runs: Array | None,
        state: Array | None,
        counts: Array | None,
        row_chunks: RowChunks | None,
    ) -> tuple[Array, Array]:
        """See `RecurrentMixer.recurrence`; the last state is [B, N, P, Z]."""
        dt = jax.nn.softplus(inputs["dt"].astype(jnp.float32) + rates["dt_bias"].astype(jnp.float32)[None, None])
        a, skip = -jnp.exp(rates["a_log"].astype(jnp.float32)), rates["skip"].astype(jnp.float32)
        dt = masked_steps(jnp.clip(dt, *self.cfg.dt_limit), counts)
        scan = Scan(inputs["x"], dt, a, inputs["b"], inputs["c"], skip, runs, state)
        if row_chunks is not None and not row_chunks.unsharded:
            decay, added = ssd_transition(scan)
            first = row_chunks.first_states(decay[..., None], added.reshape(*decay.shape, -1))
            scan = scan._replace(state=first.reshape(added.shape))
        return ssd(scan, self.cfg.chunk)

    def project_output(self, y: Array, z: Array) -> Array:
        """The recurrence's output and the gate [B, S, N, P] -> the layer's output [B, S, D]."""
        cfg = self.cfg
        norm = partial(gated_norm, groups=cfg.groups, epsilon=cfg.norm_epsilon, before_gate=cfg.norm_before_gate)
        y = save_only_inputs(norm)(y, z, self.norm_gain[...]) if cfg.normalised else save_only_inputs(apply_gate)(y, z)
        y = self.layout.act(y, *HEADS)
        y = self.layout.dot("bsnp,npd->bsd", y, self.output, "batch", "seq_residual", "embed")
        return self.layout.add_bias(y, self.output_bias[...]) if cfg.bias else y
