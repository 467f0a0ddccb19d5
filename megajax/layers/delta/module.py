"""Gated delta nets (Yang et al. 2024). B rows, S positions, D hidden, N heads of V, G key heads of K."""

from collections.abc import Mapping
from functools import partial
from typing import ClassVar

import jax
import jax.numpy as jnp
from jax import Array
from jax.ad_checkpoint import checkpoint_name

from megajax.kernels.context.recurrence import RowChunks
from megajax.kernels.ssm.gated_delta import DeltaRule, gated_delta, gated_delta_transition, unit_length
from megajax.kernels.ssm.ssd import gated_norm
from megajax.layers.delta.config import GatedDeltaNetConfig
from megajax.layers.mamba.recurrent import (
    GROUPS,
    HEADS,
    Filter,
    Inputs,
    LogOfUniform,
    RecurrentMixer,
    StepBias,
    masked_steps,
)
from megajax.layers.param import ONES, LayerSettings, Normal, matrix, param
from megajax.layers.remat import save_only_inputs

PER_HEAD = ("batch", "seq", "heads")


class GatedDeltaNet(RecurrentMixer):
    """A layer with a state per head, [B, S, D] -> [B, S, D].

    Inputs: q and k [B, S, G, K], v [B, S, N, V] before convolutions; a and b [B, S, N], from which decays and
    corrections are made.
    """

    convolved = ("q", "k", "v")
    rates = ("dt_bias", "a_log")
    gate_activation = staticmethod(jax.nn.silu)
    input_axes: ClassVar = {"q": GROUPS, "k": GROUPS, "v": HEADS, "a": PER_HEAD, "b": PER_HEAD}

    def __init__(self, cfg: GatedDeltaNetConfig, settings: LayerSettings):
        hidden, head, group = settings.hidden, (cfg.heads, cfg.head_dim), (cfg.groups, cfg.key_dim)
        self.cfg, self.layout = cfg, settings.layout
        per_head, per_group = ("heads", "head_dim"), (settings.layout.plan.kv_heads(cfg.groups), "state")
        self.in_q = matrix(settings, (hidden, *group), ("embed", *per_group))
        self.in_k = matrix(settings, (hidden, *group), ("embed", *per_group))
        self.in_v = matrix(settings, (hidden, *head), ("embed", *per_head))
        self.in_b = param((hidden, cfg.heads), ("embed", "heads"), init=Normal(settings.std))
        outer = Normal(settings.output_std)
        self.output = matrix(settings, (*head, hidden), (*per_head, "embed"), init=outer, inputs=2)
        self.conv_q = Filter(cfg.conv_kernel, settings, group, per_group, bias=False)
        self.conv_k = Filter(cfg.conv_kernel, settings, group, per_group, bias=False)
        self.conv_v = Filter(cfg.conv_kernel, settings, head, per_head, bias=False)
        steps, rates = StepBias(cfg.dt_min, cfg.dt_max, cfg.dt_floor), LogOfUniform(cfg.decay_min, cfg.decay_max)
        self.dt_bias = param(cfg.decays, self.input_axes["a"][2:], init=steps, role="rate")
        self.a_log = param((cfg.heads,), ("heads",), init=rates, role="rate")
        self.norm_gain = param((cfg.head_dim,), ("head_dim",), init=ONES, role="gain")
        self.declare_gates(settings)

    def declare_gates(self, settings: LayerSettings) -> None:
        """The weights of `gates`."""
        hidden, cfg = settings.hidden, self.cfg
        self.in_z = matrix(settings, (hidden, cfg.heads, cfg.head_dim), ("embed", "heads", "head_dim"))
        self.in_a = param((hidden, cfg.heads), ("embed", "heads"), init=Normal(settings.std))

    def gates(self, x: Array) -> tuple[Array, Array]:
        """[B, S, D] -> what decays are made from, [B, S, N], and the gate [B, S, N, V]."""
        # Not in 8 bits: those matmuls need dimensions that are multiples of 16.
        a = self.layout.plain().dot("bsd,dn->bsn", x, self.in_a[...], *PER_HEAD)
        return a, self.layout.dot("bsd,dnv->bsnv", x, self.in_z, *HEADS)

    def project(self, x: Array) -> tuple[Inputs, Array]:
        """[B, S, D] -> the inputs of the convolutions and the recurrence, and the gate [B, S, N, V]."""
        dot, (a, z) = self.layout.dot, self.gates(x)
        q, k = dot("bsd,dgk->bsgk", x, self.in_q, *GROUPS), dot("bsd,dgk->bsgk", x, self.in_k, *GROUPS)
        v, b = (
            dot("bsd,dnv->bsnv", x, self.in_v, *HEADS),
            self.layout.plain().dot("bsd,dn->bsn", x, self.in_b[...], *PER_HEAD),
        )
        names = {"q": "query", "k": "key", "v": "value", "a": "value", "b": "value"}
        inputs = {"q": q, "k": k, "v": v, "a": a, "b": b}
        return {name: checkpoint_name(y, names[name]) for name, y in inputs.items()}, checkpoint_name(z, "gate")

    def recurrence(
        self,
        inputs: Inputs,
        rates: Mapping[str, Array],
        runs: Array | None,
        state: Array | None,
        counts: Array | None,
        row_chunks: RowChunks | None,
    ) -> tuple[Array, Array]:
        """See `RecurrentMixer.recurrence`; y [B, S, N, V], and the last state [B, N, K, V]."""
        full = {name: w.astype(jnp.float32) for name, w in rates.items()}
        steps = jax.nn.softplus(inputs["a"].astype(jnp.float32) + full["dt_bias"][None, None])
        rate = jnp.exp(full["a_log"]).reshape(1, 1, -1, *[1] * (steps.ndim - 3))
        g = masked_steps(-rate * steps, counts)
        beta = masked_steps(jax.nn.sigmoid(inputs["b"].astype(jnp.float32)), counts)
        q, k = (save_only_inputs(unit_length)(inputs[name]) for name in ("q", "k"))
        rule, chunk = DeltaRule(q, k, inputs["v"], g, beta, runs, state), self.cfg.chunk
        if row_chunks is not None and not row_chunks.unsharded:
            rule = rule._replace(state=row_chunks.first_matrices(*gated_delta_transition(rule, chunk)))
        return gated_delta(rule, chunk)

    def project_output(self, y: Array, z: Array) -> Array:
        """The recurrence's output and the gate [B, S, N, V] -> the layer's output [B, S, D]."""
        cfg = self.cfg
        norm = partial(
            gated_norm, groups=cfg.heads, epsilon=cfg.norm_epsilon, before_gate=True, activation=self.gate_activation
        )
        y = self.layout.act(save_only_inputs(norm)(y, z, self.norm_gain[...][None]), *HEADS)
        return self.layout.dot("bsnv,nvd->bsd", y, self.output, "batch", "seq_residual", "embed")


class KimiDelta(GatedDeltaNet):
    """A layer whose states decay by channel of the key; what makes decays and the gate has low rank.

    Kimi Team 2025, "Kimi Linear", sections 3 and 4. Inputs as of `GatedDeltaNet`, but a [B, S, N, K].
    """

    gate_activation = staticmethod(jax.nn.sigmoid)
    input_axes: ClassVar = {**GatedDeltaNet.input_axes, "a": HEADS}
    rate_axes: ClassVar = {"dt_bias": HEADS[2:]}

    def declare_gates(self, settings: LayerSettings) -> None:
        """See `GatedDeltaNet`."""
        hidden, cfg, up = settings.hidden, self.cfg, (None, "heads", "head_dim")
        self.a_down = matrix(settings, (hidden, cfg.rank), ("embed", None))
        self.a_up = matrix(settings, (cfg.rank, cfg.heads, cfg.key_dim), up)
        self.z_down = matrix(settings, (hidden, cfg.rank), ("embed", None))
        self.z_up = matrix(settings, (cfg.rank, cfg.heads, cfg.head_dim), up)

    def gates(self, x: Array) -> tuple[Array, Array]:
        """[B, S, D] -> what decays are made from, [B, S, N, K], and the gate [B, S, N, V]."""
        dot = self.layout.dot
        a, z = (dot("bsd,dr->bsr", x, down, "batch", "seq", None) for down in (self.a_down, self.z_down))
        a, z = checkpoint_name(a, "latent"), checkpoint_name(z, "latent")
        return dot("bsr,rnk->bsnk", a, self.a_up, *HEADS), dot("bsr,rnv->bsnv", z, self.z_up, *HEADS)
