"""Grouped-query attention. B rows, S positions, D hidden, N query heads, K key-value heads, H head size."""

import jax.numpy as jnp
from flax import nnx
from jax import Array, lax
from jax.ad_checkpoint import checkpoint_name

from megajax.kernels.attention import KERNELS, AttentionDropout, Mask, cudnn_refusal
from megajax.layers.config import AttentionConfig
from megajax.layers.context import Context, fold_rows
from megajax.layers.param import ZEROS, Normal, Site, param

DROPOUT_PLACE = 1


def choose_kernel(cfg: AttentionConfig, dtype: jnp.dtype | str, *, head_dim: int, length: int) -> str:
    """What `auto` means here: cuDNN's kernel where it can run, the reference otherwise.

    dtype: of queries, keys and values; length: positions in a row. The start banner prints the answer.
    """
    if cfg.kernel != "auto":
        return cfg.kernel
    refusal = cudnn_refusal(dtype=dtype, head_dim=head_dim, length=length, dropout=cfg.dropout)
    return "cudnn" if refusal is None else "reference"


class Attention(nnx.Module):
    """Causal self-attention, [B, S, D] -> [B, S, D]."""

    def __init__(self, cfg: AttentionConfig, site: Site):
        hidden, heads, groups, size = site.hidden, cfg.heads, cfg.groups(), cfg.size(site.hidden)
        self.cfg, self.layout, self.scale = cfg, site.layout, size**-0.5
        inner, outer = Normal(site.std), Normal(site.output_std)
        self.query = param((hidden, heads, size), ("embed", "heads", "head_dim"), init=inner)
        self.key = param((hidden, groups, size), ("embed", "kv_heads", "head_dim"), init=inner)
        self.value = param((hidden, groups, size), ("embed", "kv_heads", "head_dim"), init=inner)
        self.output = param((heads, size, hidden), ("heads", "head_dim", "embed"), init=outer)
        if cfg.bias:
            self.query_bias = param((heads, size), ("heads", "head_dim"), init=ZEROS, role="bias")
            self.key_bias = param((groups, size), ("kv_heads", "head_dim"), init=ZEROS, role="bias")
            self.value_bias = param((groups, size), ("kv_heads", "head_dim"), init=ZEROS, role="bias")
            self.output_bias = param((hidden,), ("embed",), init=ZEROS, role="bias")
        self.rope = None if cfg.rope is None else cfg.rope.build(size)

    def __call__(self, x: Array, ctx: Context) -> Array:
        q, k, v = self.project(x)
        if self.rope is not None:
            q, k = self.rope(q, ctx.positions), self.rope(k, ctx.positions)
        q, k, v = checkpoint_name(q, "query"), checkpoint_name(k, "key"), checkpoint_name(v, "value")
        mixed = self.mix(q, k, v, ctx)  # named "attention" in the kernel, beside what else its backward needs
        y = self.layout.dot("bsnh,nhd->bsd", mixed, self.output[...], "batch", "seq_residual", "embed")
        return self.layout.add_bias(y, self.output_bias[...]) if self.cfg.bias else y

    def project(self, x: Array) -> tuple[Array, Array, Array]:
        """[B, S, D] -> queries [B, S, N, H], keys and values [B, S, K, H]."""
        dot = self.layout.dot
        q = dot("bsd,dnh->bsnh", x, self.query[...], "batch", "seq", "heads", "head_dim")
        k = dot("bsd,dkh->bskh", x, self.key[...], "batch", "seq", "kv_heads", "head_dim")
        v = dot("bsd,dkh->bskh", x, self.value[...], "batch", "seq", "kv_heads", "head_dim")
        if not self.cfg.bias:
            return q, k, v
        return (
            q + self.query_bias[...][None, None],
            k + self.key_bias[...][None, None],
            v + self.value_bias[...][None, None],
        )

    def mix(self, q: Array, k: Array, v: Array, ctx: Context) -> Array:
        """The kernel, in an island: each device has whole sequences of some heads. -> [B, S, N, H]."""
        kernel = KERNELS[choose_kernel(self.cfg, q.dtype, head_dim=q.shape[-1], length=q.shape[1])]
        head_axes = self.layout.summed("heads")
        rate = 0.0 if ctx.row_keys is None else self.cfg.dropout
        keys = (
            jnp.zeros((q.shape[0], 2), jnp.uint32) if ctx.row_keys is None else fold_rows(ctx.row_keys, DROPOUT_PLACE)
        )
        segments = jnp.zeros(q.shape[:2], jnp.int32) if ctx.segments is None else ctx.segments

        def local(q: Array, k: Array, v: Array, index: Array, segments: Array, keys: Array) -> Array:
            ids = None if ctx.segments is None else segments
            first = lax.axis_index(head_axes) * q.shape[2] if head_axes else 0
            drop = AttentionDropout(rate, keys, first + jnp.arange(q.shape[2]), index) if rate else None
            return kernel(q, k, v, Mask(index, index, ids, ids), scale=self.scale, dropout=drop)

        queries, keyed = ("batch", "seq", "heads", "head_dim"), ("batch", "seq", "kv_heads", "head_dim")
        ins = (queries, keyed, keyed, ("seq",), ("batch", "seq"), ("batch", None))
        return self.layout.island(local, ins, queries)(q, k, v, ctx.index, segments, keys)
