"""Grouped-query attention, and attention to another section.

B rows, S positions, T keys, D hidden, N query heads, K key-value heads, H head size.
"""

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.ad_checkpoint import checkpoint_name

from megajax.layers.attention.cached import attend_to_cache, attend_to_memory, write_memory
from megajax.layers.attention.config import AttentionConfig
from megajax.layers.attention.core import CoreAttention
from megajax.layers.context import Context
from megajax.layers.decoding import Cache
from megajax.layers.param import ZEROS, LayerSettings, Normal, matrix, param, with_head_copies
from megajax.layers.position.module import tempered


class Attention(nnx.Module):
    """Self-attention, [B, S, D] -> [B, S, D]."""

    def __init__(self, cfg: AttentionConfig, settings: LayerSettings):
        hidden, heads, groups, size = settings.hidden, cfg.heads, cfg.groups(), cfg.size(settings.hidden)
        self.cfg, self.layout = cfg, settings.layout
        shared = (settings.layout.plan.kv_heads(groups), "head_dim")
        self.query = matrix(settings, (hidden, heads, size), ("embed", "heads", "head_dim"))
        self.key = matrix(settings, (hidden, groups, size), ("embed", *shared))
        self.value = matrix(settings, (hidden, groups, size), ("embed", *shared))
        outer = Normal(settings.output_std)
        self.output = matrix(settings, (heads, size, hidden), ("heads", "head_dim", "embed"), init=outer, inputs=2)
        if cfg.gate:
            self.gate = matrix(settings, (hidden, heads, size), ("embed", "heads", "head_dim"))
        if cfg.has_qkv_bias():
            self.query_bias = param((heads, size), ("heads", "head_dim"), init=ZEROS, role="bias")
            self.key_bias = param((groups, size), shared, init=ZEROS, role="bias")
            self.value_bias = param((groups, size), shared, init=ZEROS, role="bias")
        if cfg.has_qkv_bias() and cfg.gate:
            self.gate_bias = param((heads, size), ("heads", "head_dim"), init=ZEROS, role="bias")
        if cfg.bias:
            self.output_bias = param((hidden,), ("embed",), init=ZEROS, role="bias")
        if cfg.qk_norm is not None:
            # Heads are sharded here: the compiler reduces the gradients of the gains layer by layer.
            self.query_norm, self.key_norm = (
                cfg.qk_norm.build(settings, size=over, axis=axis) for over, axis in cfg.qk_norm_sides(hidden)
            )
        self.rope = None if cfg.rope is None else cfg.rope.build(size, settings.length)
        self.core = CoreAttention(cfg, settings, scale=settings.score_scale(size) if cfg.scale is None else cfg.scale)

    def __call__(self, x: Array, ctx: Context) -> Array:
        q, k, v = self.project_rotated(x, ctx)
        q, k, v = checkpoint_name(q, "query"), checkpoint_name(k, "key"), checkpoint_name(v, "value")
        return self.project_output(self.core(q, k, v, ctx), x)

    def step(self, x: Array, cache: Cache, ctx: Context) -> tuple[Array, Cache]:
        """A decoding step, [T, 1, D] -> [T, 1, D]. Cache leaves: "key" and "value"."""
        q, k, v = self.project_rotated(x, ctx)
        new, axis = {"key": k, "value": v}, "kv_heads"
        mixed, cache = attend_to_cache(self.core, q, new, cache, ctx, axis, v.shape[-1])
        return self.project_output(mixed, x), cache

    def project_rotated(self, x: Array, ctx: Context) -> tuple[Array, Array, Array]:
        """`project`, followed by normalisation and rotation of queries and keys, and the temperature of queries."""
        q, k, v = self.project(x)
        q, k = (q, k) if self.cfg.qk_norm_after_rope else self.normalised(q, k)
        if (clip := self.cfg.qkv_clip) is not None:
            q, k, v = (jnp.clip(array, -clip, clip) for array in (q, k, v))
        if self.rope is not None:
            positions = ctx.positions if ctx.rotary is None else ctx.rotary
            q, k = self.rope(q, positions), self.rope(k, positions)
        q, k = self.normalised(q, k) if self.cfg.qk_norm_after_rope else (q, k)
        q = q if self.cfg.temperature is None else tempered(q, ctx.positions, self.cfg.temperature)
        return q, k, v

    def normalised(self, q: Array, k: Array) -> tuple[Array, Array]:
        """Queries [B, S, N, H] and keys [B, T, K, H] after `qk_norm`."""
        return self.head_norm("query_norm", q), self.head_norm("key_norm", k)

    def head_norm(self, name: str, x: Array) -> Array:
        """Queries or keys [B, S, N, H] after the norm of this name."""
        if self.cfg.qk_norm is None:
            return x
        norm = getattr(self, name)
        return norm(x) if self.cfg.qk_norm_over == "head" else norm(x.reshape(*x.shape[:2], -1)).reshape(x.shape)

    def project_output(self, mixed: Array, x: Array) -> Array:
        """Output of the kernel [B, S, N, H] and input of the layer -> output of the layer [B, S, D].

        The kernel itself names its output "attention" for the save policy.
        """
        if self.cfg.gate:
            mixed = mixed * jax.nn.sigmoid(self.gate_logits(x).astype("float32")).astype(mixed.dtype)
        y = self.layout.dot("bsnh,nhd->bsd", mixed, self.output, "batch", "seq_residual", "embed")
        return self.layout.add_bias(y, self.output_bias[...]) if self.cfg.bias else y

    def project(self, x: Array) -> tuple[Array, Array, Array]:
        """[B, S, D] -> queries [B, S, N, H], keys and values [B, S, K, H]."""
        return self.queries(x), *self.keys_and_values(x)

    def queries(self, x: Array) -> Array:
        """[B, S, D] -> [B, S, N, H]."""
        q = self.layout.dot("bsd,dnh->bsnh", x, self.query, "batch", "seq", "heads", "head_dim")
        return _add_head_bias(q, self.query_bias[...]) if self.cfg.has_qkv_bias() else q

    def keys_and_values(self, x: Array) -> tuple[Array, Array]:
        """[B, T, D] -> [B, T, K, H] each; K includes copies of heads."""
        dot, keyed = self.layout.dot, ("batch", "seq", "kv_heads", "head_dim")
        k, v = dot("bsd,dkh->bskh", x, self.key, *keyed), dot("bsd,dkh->bskh", x, self.value, *keyed)
        if not self.cfg.has_qkv_bias():
            return k, v
        key_bias, value_bias = (with_head_copies(self.layout, bias) for bias in (self.key_bias, self.value_bias))
        return _add_head_bias(k, key_bias), _add_head_bias(v, value_bias)

    def gate_logits(self, x: Array) -> Array:
        """Logits of the gate: [B, S, D] -> [B, S, N, H]."""
        gate = self.layout.dot("bsd,dnh->bsnh", x, self.gate, "batch", "seq", "heads", "head_dim")
        gate = gate + self.gate_bias[...][None, None] if self.cfg.has_qkv_bias() else gate
        return checkpoint_name(gate, "gate")


class CrossAttention(Attention):
    """Queries of x, keys and values of `ctx.memory` [B, T, D]: [B, S, D] -> [B, S, D]."""

    def __call__(self, x: Array, ctx: Context) -> Array:
        q, (k, v) = self.head_norm("query_norm", self.queries(x)), self.keys_and_values_of(ctx)
        q, k, v = checkpoint_name(q, "query"), checkpoint_name(k, "key"), checkpoint_name(v, "value")
        return self.project_output(self.core(q, k, v, ctx, self.layout.row_index(k.shape[1]), ctx.memory_segments), x)

    def step(self, x: Array, cache: Cache, ctx: Context) -> tuple[Array, Cache]:
        """The tokens of a decoding step, [T, 1, D] -> [T, 1, D]; cache: see `CrossAttentionConfig.cache_leaves`."""
        q = self.head_norm("query_norm", self.queries(x))
        return self.project_output(attend_to_memory(self.core, q, cache, ctx), x), cache

    def remember(self, cache: Cache, ctx: Context) -> Cache:
        """The cache with keys and values of `ctx.memory` [R, L, D], for the rows of the step."""
        k, v = self.keys_and_values_of(ctx)
        return write_memory(self.layout, {"key": k, "value": v}, cache, ctx)

    def keys_and_values_of(self, ctx: Context) -> tuple[Array, Array]:
        """Keys and values of `ctx.memory`, [B, T, K, H] each."""
        k, v = self.keys_and_values(self.layout.act(self.memory(ctx), "batch", "seq", "embed"))
        return self.head_norm("key_norm", k), v

    def memory(self, ctx: Context) -> Array:
        """The output of the preceding section. Raises ValueError if there is none."""
        if ctx.memory is None:
            raise ValueError("cross-attention needs the output of a preceding section, but ctx.memory is None")
        return ctx.memory


def _add_head_bias(x: Array, bias: Array) -> Array:
    """x [B, S, N, H] + bias [N, H], with the bias flattened so that the compiler fuses the sum into the matmul."""
    return (x.reshape(*x.shape[:2], bias.size) + bias.reshape(1, 1, bias.size)).reshape(x.shape)
