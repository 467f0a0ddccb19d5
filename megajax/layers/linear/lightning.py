"""Lightning attention (Qin et al. 2024; MiniMax 2025). B rows, S positions, D hidden, N heads, H head size.

It is Mamba-2's recurrence with steps of 1, rates of decay that are not trained, and a state of H x H for each head:
values are its inputs, keys and queries its b and c.
"""

from collections.abc import Mapping

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.ad_checkpoint import checkpoint_name

from megajax.kernels.context.recurrence import RowChunks
from megajax.kernels.ssm.ssd import Scan, ssd, ssd_transition
from megajax.layers.cache_spec import row_axes
from megajax.layers.context import Context
from megajax.layers.decoding import Cache, advance_rows
from megajax.layers.linear.config import PROJECTIONS, LightningAttentionConfig
from megajax.layers.mamba.recurrent import masked_steps
from megajax.layers.mlp.module import ACTIVATIONS
from megajax.layers.param import LayerSettings, Normal, matrix
from megajax.layers.remat import save_only_inputs

HEADS = ("batch", "seq", "heads", "head_dim")
INPUTS = (HEADS, HEADS, HEADS)
NAMES = ("query", "key", "value")
type Inputs = tuple[Array, Array, Array]
"""Queries, keys and values before their activation function, [B, S, N, H] each."""


class LightningAttention(nnx.Module):
    """Causal linear attention, [B, S, D] -> [B, S, D]."""

    def __init__(self, cfg: LightningAttentionConfig, settings: LayerSettings):
        shape, axes = (settings.hidden, cfg.heads, cfg.head_dim), ("embed", "heads", "head_dim")
        self.cfg, self.layout = cfg, settings.layout
        for name in PROJECTIONS:
            setattr(self, name, matrix(settings, shape, axes))
        outer = Normal(settings.output_std)
        self.out = matrix(settings, (*shape[1:], settings.hidden), (*axes[1:], "embed"), init=outer, inputs=2)
        self.norm = cfg.norm.build(settings, size=cfg.inner, axis="heads")

    def __call__(self, x: Array, ctx: Context) -> Array:
        inputs, gate = self.project(x)
        sequence_sharding = self.layout.sequence_sharding()

        def local(inputs: Inputs, rates: Array, segments: Array | None) -> Array:
            rows = RowChunks.of(sequence_sharding, segments)
            q, k, v = map(rows.split_chunks, inputs)
            return rows.join_chunks(self.recurrence((q, k, v), rates, rows.runs(), row_chunks=rows)[0])

        of_rows = None if ctx.segments is None else ("batch", "seq")
        y = self.layout.island(local, (INPUTS, ("heads",), of_rows), HEADS)(inputs, self.rates(ctx), ctx.segments)
        return self.project_output(checkpoint_name(y, "attention"), gate)

    def step(self, x: Array, cache: Cache, ctx: Context) -> tuple[Array, Cache]:
        """A decoding step, [T, 1, D] -> [T, 1, D]; cache: see `LightningAttentionConfig.cache_leaves`."""

        def advance(inputs: Mapping[str, Array], rates: Array, before: Cache, counts: Array) -> tuple[Array, Cache]:
            q, k, v = (inputs[name] for name in NAMES)
            y, state = self.recurrence((q, k, v), rates, None, before["state"], counts)
            return y, {"state": state}

        inputs, gate = self.project(x)
        named = dict(zip(NAMES, inputs, strict=True)), dict.fromkeys(NAMES, HEADS)
        leaves = cache, row_axes(self.cfg)
        y, cache = advance_rows(self.layout, advance, named, (self.rates(ctx), ("heads",)), leaves, HEADS, ctx)
        return self.project_output(y, gate), cache

    def project(self, x: Array) -> tuple[Inputs, Array]:
        """[B, S, D] -> the inputs of the recurrence, and the logits of the gate, [B, S, N, H]."""
        q, k, v, gate = (self.layout.dot("bsd,dnh->bsnh", x, getattr(self, name), *HEADS) for name in PROJECTIONS)
        inputs = checkpoint_name(q, "query"), checkpoint_name(k, "key"), checkpoint_name(v, "value")
        return inputs, checkpoint_name(gate, "gate")

    def rates(self, ctx: Context) -> Array:
        """Rates of decay of the layer's heads, float32 [N]. Raises ValueError outside a stack."""
        if ctx.layer is None:
            raise ValueError("ctx.layer is None: lightning attention needs the number of its layer in a stack")
        cfg = self.cfg
        share = 1 - jnp.asarray(ctx.layer, jnp.float32) / (cfg.layers - 1 + 1e-5) + 1e-5
        return cfg.rate() ** (1 + jnp.arange(cfg.heads, dtype=jnp.float32)) * share

    def recurrence(
        self,
        inputs: Inputs,
        rates: Array,
        runs: Array | None,
        state: Array | None = None,
        counts: Array | None = None,
        row_chunks: RowChunks | None = None,
    ) -> tuple[Array, Array]:
        """The local heads: outputs [B, S, N, H], and the last state [B, N, H, H]. See `Mamba2.recurrence`."""
        q, k, v = (save_only_inputs(ACTIVATIONS[self.cfg.activation])(x) for x in inputs)
        steps = masked_steps(jnp.ones(q.shape[:3], jnp.float32), counts)
        scan = Scan(v, steps, -rates, k, q, jnp.zeros_like(rates), runs, state)
        if row_chunks is not None and not row_chunks.unsharded:
            decay, added = ssd_transition(scan)
            first = row_chunks.first_states(decay[..., None], added.reshape(*decay.shape, -1))
            scan = scan._replace(state=first.reshape(added.shape))
        return ssd(scan, self.cfg.chunk)

    def project_output(self, y: Array, gate: Array) -> Array:
        """The recurrence's output and the logits of the gate [B, S, N, H] -> the layer's output [B, S, D]."""
        normalised = self.norm(y.reshape(*y.shape[:2], -1)).reshape(y.shape)
        y = self.layout.act(save_only_inputs(_gated)(normalised, gate), *HEADS)
        return self.layout.dot("bsnh,nhd->bsd", y, self.out, "batch", "seq_residual", "embed")


def _gated(y: Array, gate: Array) -> Array:
    return y * jax.nn.sigmoid(gate.astype(jnp.float32)).astype(y.dtype)
