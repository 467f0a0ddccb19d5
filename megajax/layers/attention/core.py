"""Attention of queries to keys and values, shared by all kinds of attention layers."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import jax.numpy as jnp
from flax import nnx
from jax import Array, lax

from megajax.kernels.attention.attention import Mask, attend, local_device
from megajax.kernels.attention.capability import choose
from megajax.kernels.attention.dropout import AttentionDropout
from megajax.kernels.attention.request import Kernel, KernelRequest
from megajax.kernels.context.gathered import whole_keys
from megajax.kernels.context.strategy import over_context
from megajax.layers.attention.config import AttentionConfig
from megajax.layers.attention.latent_config import SelfAttentionConfig
from megajax.layers.context import Context, fold_rows
from megajax.layers.param import ZEROS, LayerSettings, observation, param
from megajax.layers.position.module import biases
from megajax.mesh.layer_metrics import Measure
from megajax.mesh.layer_observations import Latest, Observed

DROPOUT_PLACE = 1


@dataclass(frozen=True, slots=True)
class ScoreBounds(Latest):
    """Updater: the bounds of the scores of each head in the last step, see `score_bounds`."""

    def measures(self) -> tuple[Measure, ...]:
        bound = Measure(
            name="attention_score_bound", of=lambda bounds: bounds.max(-1), over_layers="max", label="scores up to"
        )
        return (bound,)


def choose_kernel(cfg: SelfAttentionConfig, request: KernelRequest) -> Kernel:
    """The attention backend. `auto`: the fastest that the first JAX device supports. request: facts of the arrays.

    A backend chosen by name is not checked against that device: programs are also compiled for virtual devices.
    """
    return choose(cfg.kernel, cfg.request(request), local_device() if cfg.kernel == "auto" else None).kernel


class CoreAttention(nnx.Module):
    """The attention kernel in an island: each device has some heads of whole sequences."""

    def __init__(self, cfg: SelfAttentionConfig, settings: LayerSettings, *, scale: float):
        self.cfg, self.layout, self.scale = cfg, settings.layout, scale
        plain = cfg if isinstance(cfg, AttentionConfig) else None  # a latent one has none of these settings
        self.chunk = None if plain is None else plain.chunk
        # The padding after a text is a document of its own if chunks are.
        self.padded = settings.padded and self.chunk is None
        if cfg.sink == "learned":
            self.sink = param((cfg.heads,), ("heads",), init=ZEROS, role="bias")
        if settings.layout.observes_scores:
            declared = Observed(shape=(cfg.heads,), axes=("heads",), reduction="max", updater=ScoreBounds())
            self.scores = observation(declared)
        relative, self.causal = (None, True) if plain is None else (plain.relative, plain.causal)
        self.bias, self.cap = relative, None if plain is None else plain.score_cap
        self.relative = None if relative is None or relative.shared else relative.build(settings, heads=cfg.heads)

    def __call__(
        self,
        q: Array,
        k: Array,
        v: Array,
        ctx: Context,
        key_index: Array | None = None,
        key_segments: Array | None = None,
    ) -> Array:
        """q [B, S, N, H], k [B, T, K, H], v [B, T, K, U] -> [B, S, N, U].

        key_index int32 [T], key_segments int32 [B, T]: of the keys; None: those of the queries.
        """
        ctx = self.in_chunks(ctx)
        if key_index is None:
            key_index, key_segments = ctx.index, ctx.segments
        cfg, bias, causal = self.cfg, self.bias, self.causal
        isolated = ctx.segments is not None and key_segments is not None
        head_axes, sequence_sharding = self.layout.free_axes("heads"), self.layout.sequence_sharding()
        parts = self.layout.manual_devices("seq")
        request = KernelRequest(
            dtype=jnp.dtype(q.dtype).name,
            key_dim=q.shape[-1],
            length=q.shape[1] * parts,
            key_length=k.shape[1] * parts,
            sharding=sequence_sharding,
        )
        request = replace(request, documents=isolated and not self.padded, padded=isolated and self.padded)
        kernel = choose_kernel(cfg, request)
        rate = 0.0 if ctx.row_keys is None else cfg.dropout
        keys = (
            jnp.zeros((q.shape[0], 2), jnp.uint32) if ctx.row_keys is None else fold_rows(ctx.row_keys, DROPOUT_PLACE)
        )
        ids = (ctx.segments, key_segments) if isolated else None
        weights = self.weights(ctx)

        def local(
            q: Array,
            k: Array,
            v: Array,
            indices: tuple[Array, Array],
            ids: tuple[Array, Array] | None,
            keys: Array,
            weights: Mapping[str, Array],
        ) -> Array:
            index, key_index = indices
            first = lax.axis_index(head_axes) * q.shape[2] if head_axes else 0
            length = k.shape[1] * sequence_sharding.devices
            drop = AttentionDropout(rate, keys, first + jnp.arange(q.shape[2]), index, length) if rate else None
            mask = Mask(index, key_index, *((None, None) if ids is None else ids), cfg.window, causal, self.padded)
            backend = kernel if sequence_sharding.devices == 1 else over_context(sequence_sharding, kernel, self.cap)
            if bias is not None and sequence_sharding.devices > 1:
                # Only the reference kernel supports biases; autodiff gives their gradient and that of the gather.
                backend, (k, v, mask) = kernel, whole_keys(sequence_sharding, k, v, mask)
            return attend(
                backend,
                q,
                k,
                v,
                mask,
                scale=self.scale,
                dropout=drop,
                sink=jnp.zeros(q.shape[2]) if cfg.sink == "zero" else weights.get("sink"),
                bias=None if bias is None else biases(bias, weights["table"], index, mask.key_index),
                cap=self.cap,
                bounds=weights.get("scores"),
            )

        queries, keyed = ("batch", "seq", "heads", "head_dim"), ("batch", "seq", "kv_heads", "head_dim")
        axes = {name: (*[None] * (w.ndim - 1), "heads") for name, w in weights.items()}
        rows = None if ids is None else (("batch", "seq"), ("batch", "seq"))
        ins = (queries, keyed, keyed, (("seq",), ("seq",)), rows, ("batch", None), axes)
        return self.layout.island(local, ins, queries)(q, k, v, (ctx.index, key_index), ids, keys, weights)

    def in_chunks(self, ctx: Context) -> Context:
        """The context with a document for each chunk of each document, which every kernel isolates."""
        if self.chunk is None:
            return ctx
        count = ctx.index.size * self.layout.manual_devices("seq") // self.chunk + 1
        segments = 0 if ctx.segments is None else ctx.segments * count
        return ctx._replace(segments=segments + ctx.positions // self.chunk)

    def weights(self, ctx: Context) -> dict[str, Array]:
        """Weights of the kernel itself, sharded with the heads."""
        weights = {"sink": self.sink[...]} if self.cfg.sink == "learned" else {}
        weights |= {"scores": self.scores[...]} if self.layout.observes_scores else {}
        if self.bias is None:
            return weights
        table = ctx.bias if self.relative is None else self.relative.table[...]
        if table is None:
            raise ValueError("ctx.bias is None: the stack must pass the table of biases that its layers share")
        return {**weights, "table": table}
