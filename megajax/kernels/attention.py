"""Attention over whole rows: the reference, and the fused kernel of cuDNN behind the same signature.

Both name their result for recomputation, so that a layer need not: cuDNN's backward kernel wants the result, and can
only be handed it if the name was given inside the kernel's own rule. A second name outside would save it twice.

B rows, S queries, T keys, N query heads, K key-value heads (N a multiple of K), H head size, U size of a value head.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.ad_checkpoint import checkpoint_name

from megajax.kernels.cudnn import OUTPUT, fused_attention


class Mask(NamedTuple):
    """Which keys a query sees: those at or before it in the row, in its window and in its document where it has any."""

    query_index: Array
    """int32 [S]: place of each query in its row."""
    key_index: Array
    """int32 [T]: place of each key in its row."""
    query_segments: Array | None
    """int32 [B, S], or None when a row is one document."""
    key_segments: Array | None
    """int32 [B, T]."""
    window: int | None = None
    """How many keys before its own a query sees: with 8 it sees 9 tokens; None for all."""

    def visible(self) -> Array:
        """bool [B or 1, S, T]."""
        before = self.query_index[:, None] - self.key_index[None, :]
        causal = (before >= 0)[None] if self.window is None else ((before >= 0) & (before <= self.window))[None]
        if self.query_segments is None or self.key_segments is None:
            return causal
        return causal & (self.query_segments[:, :, None] == self.key_segments[:, None, :])


class AttentionDropout(NamedTuple):
    """Dropout of attention weights that is the same on every layout: one key for each (row, head, query)."""

    rate: float
    row_keys: Array
    """uint32 [B, 2]: key data of each row."""
    head_index: Array
    """int32 [N]: number of each head in the whole model."""
    query_index: Array
    """int32 [S]: place of each query in its row."""

    def apply(self, weights: Array) -> Array:
        """[B, N, S, T] -> the same with a share `rate` of the weights zeroed and the rest scaled up."""
        fold = jax.random.fold_in

        def kept(row: Array, head: Array, query: Array) -> Array:
            key = fold(fold(jax.random.wrap_key_data(row), head), query)
            return jax.random.bernoulli(key, 1 - self.rate, weights.shape[-1:])

        over_queries = jax.vmap(kept, (None, None, 0))
        over_heads = jax.vmap(over_queries, (None, 0, None))
        keep = jax.vmap(over_heads, (0, None, None))(self.row_keys, self.head_index, self.query_index)
        return jnp.where(keep, weights / (1 - self.rate), 0)


def reference_attention(
    q: Array,
    k: Array,
    v: Array,
    mask: Mask,
    *,
    scale: float,
    dropout: AttentionDropout | None = None,
    sink: Array | None = None,
    bias: Array | None = None,
) -> Array:
    """softmax(q k^T * scale + bias) v with scores and softmax in float32 (Vaswani et al. 2017, section 3.2.1).

    q [B, S, N, H], k [B, T, K, H], v [B, T, K, U] -> [B, S, N, U] in q's dtype. Holds all B * N * S * T scores.
    sink [N]: a score of each head that takes part in the softmax and brings no value (Xiao et al. 2023, section 3.3);
    bias [N, S, T].
    """
    batch, queries, heads, size = q.shape
    groups = k.shape[2]
    q = q.reshape(batch, queries, groups, heads // groups, size)
    scores = jnp.einsum("bskgh,btkh->bkgst", q, k, preferred_element_type=jnp.float32) * scale
    if bias is not None:
        scores = scores + bias.astype(jnp.float32).reshape(1, *scores.shape[1:])
    scores = jnp.where(mask.visible()[:, None, None], scores, jnp.finfo(jnp.float32).min)
    weights = jax.nn.softmax(scores, axis=-1) if sink is None else _softmax_with_sink(scores, sink)
    if dropout is not None:
        flat = weights.reshape(batch, heads, queries, k.shape[1])
        weights = dropout.apply(flat).reshape(weights.shape)
    out = jnp.einsum("bkgst,btkh->bskgh", weights.astype(v.dtype), v)
    return checkpoint_name(out.reshape(batch, queries, heads, v.shape[-1]), OUTPUT)


def _softmax_with_sink(scores: Array, sink: Array) -> Array:
    """scores float32 [B, K, N/K, S, T], sink [N] -> weights that sum to less than 1."""
    each = sink.astype(jnp.float32).reshape(1, *scores.shape[1:3], 1, 1)
    column = jnp.broadcast_to(each, (*scores.shape[:-1], 1))
    return jax.nn.softmax(jnp.concatenate([scores, column], axis=-1), axis=-1)[..., :-1]


def cudnn_attention(
    q: Array,
    k: Array,
    v: Array,
    mask: Mask,
    *,
    scale: float,
    dropout: AttentionDropout | None = None,
    sink: Array | None = None,
    bias: Array | None = None,
) -> Array:
    """The same by cuDNN's fused kernel: bf16 or fp16 on an NVIDIA GPU; segments go in as a dense mask.

    Never holds the scores. Values narrower than keys go in with zeros at their end. Raises ValueError for dropout of
    attention weights, which it would draw layout by layout, and for sinks and biases, which it is not given.
    """
    if sink is not None or bias is not None:
        raise ValueError("cudnn attention has no sinks and is given no bias of scores: set kernel=reference")
    if dropout is not None:
        raise ValueError(
            "cudnn attention has no layout-independent dropout: set attention dropout to 0 or kernel=reference"
        )
    dense = None if mask.query_segments is None else mask.visible()[:, None]
    # A dense mask holds the window already; the kernel's own goes with none.
    window = mask.window if dense is None else None
    narrower = q.shape[-1] - v.shape[-1]
    if not narrower:
        return fused_attention(q, k, v, dense, scale, window)
    wide = jnp.pad(v, ((0, 0), (0, 0), (0, 0), (0, narrower)))
    return fused_attention(q, k, wide, dense, scale, window)[..., : v.shape[-1]]


def cudnn_limits(*, dtype: jnp.dtype | str, head_dim: int, length: int, dropout: float) -> str | None:
    """Why cuDNN's kernel can't be counted on for this, whatever the NVIDIA GPU, or None where it can; asks no device.

    dtype: of queries, keys and values; length: positions in a row.
    """
    if jnp.dtype(dtype) not in (jnp.bfloat16, jnp.float16):
        return f"computes in bfloat16 or float16, not in {jnp.dtype(dtype).name}"
    if head_dim % 8 or head_dim > 128:
        return f"takes heads of a multiple of 8 up to 128, not of {head_dim}"
    if length % 2:
        return f"takes rows of even length, not of {length}"
    return f"has no dropout of attention weights, which is {dropout:g}" if dropout else None


def cudnn_refusal(*, dtype: jnp.dtype | str, head_dim: int, length: int, dropout: float) -> str | None:
    """Why cuDNN's kernel can't be had on the devices jax found, or None where it can; arguments as of cudnn_limits."""
    device = jax.devices()[0]
    if device.platform != "gpu" or "cuda" not in device.client.platform_version.lower():
        return f"needs an NVIDIA GPU, jax found {device.device_kind}"
    return cudnn_limits(dtype=dtype, head_dim=head_dim, length=length, dropout=dropout)


KERNELS = {"reference": reference_attention, "cudnn": cudnn_attention}
