"""Attention: the reference, and fused backends with the same signature.

A backend is two functions: `forward` returns the output and its log-sum-exp, and `backward` computes gradients from
them. Ring attention can call both for parts of a row. `attend` combines them into a differentiable function with
sinks. It names the output and the log-sum-exp for recomputation policies. Layers must not name the output again: it
would be saved twice.

B rows, S queries, T keys, N query heads, K key-value heads (N a multiple of K), H head size, U size of a value head.
"""

from collections.abc import Callable, Mapping
from functools import partial, reduce
from types import MappingProxyType
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax._src.lib import cuda_versions
from jax.ad_checkpoint import checkpoint_name

from megajax.kernels.attention import blocks, cudnn, tiles
from megajax.kernels.attention import pallas as pallas_attention
from megajax.kernels.attention.dropout import AttentionDropout
from megajax.kernels.attention.mask import Mask
from megajax.kernels.attention.request import KernelDevice
from megajax.kernels.soft_cap import soft_cap_slope, soft_capped
from megajax.mesh.layer_observations import observe

__all__ = ["PASSES", "Mask", "Passes", "attend", "local_device", "passes_of", "reference_attention"]

OUTPUT, STATISTICS = "attention", "attention_statistics"
"""Checkpoint names of the residuals of a backward kernel beside q, k and v: the output and its log-sum-exp."""


def _scores(q: Array, k: Array, mask: Mask, scale: float, bias: Array | None, cap: float | None) -> Array:
    """float32 [B, K, N/K, S, T], soft-capped before the bias; masked entries hold the lowest finite number."""
    batch, queries, heads, size = q.shape
    groups = k.shape[2]
    q = q.reshape(batch, queries, groups, heads // groups, size)
    scores = jnp.einsum("bskgh,btkh->bkgst", q, k, preferred_element_type=jnp.float32) * scale
    scores = soft_capped(scores, cap)
    if bias is not None:
        scores = scores + bias.astype(jnp.float32).reshape(1, *scores.shape[1:])
    return jnp.where(mask.visible()[:, None, None], scores, jnp.finfo(jnp.float32).min)


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
    cap: float | None = None,
) -> Array:
    """softmax(q k^T * scale + bias) v with scores and softmax in float32 (Vaswani et al. 2017, section 3.2.1).

    q [B, S, N, H], k [B, T, K, H], v [B, T, K, U] -> [B, S, N, U] in q's dtype. Stores all B * N * S * T scores.
    sink [N]: one more score per head in the softmax, without a value (Xiao et al. 2023, section 3.3); bias [N, S, T].
    cap: soft cap of scores, before bias and mask; None: no cap.
    The result is 0 for a query that sees no key.
    """
    batch, queries, heads, _ = q.shape
    scores = _scores(q, k, mask, scale, bias, cap)
    weights = jax.nn.softmax(scores, axis=-1) if sink is None else _softmax_with_sink(scores, sink)
    if mask.query_segments is not None and (mask.padded or not mask.causal):
        # If no key is visible, softmax spreads its weight over all keys.
        weights = jnp.where(mask.visible().any(-1, keepdims=True)[:, None, None], weights, 0)
    if dropout is not None:
        flat = weights.reshape(batch, heads, queries, k.shape[1])
        weights = dropout.apply(flat).reshape(weights.shape)
    out = jnp.einsum("bkgst,btkh->bskgh", weights.astype(v.dtype), v)
    return checkpoint_name(out.reshape(batch, queries, heads, v.shape[-1]), OUTPUT)


def _softmax_with_sink(scores: Array, sink: Array) -> Array:
    """scores float32 [B, K, N/K, S, T], sink [N] -> weights that sum to less than 1."""
    column = sink.astype(jnp.float32).reshape(1, *scores.shape[1:3], 1, 1)
    column = jnp.broadcast_to(column, (*scores.shape[:-1], 1))
    return jax.nn.softmax(jnp.concatenate([scores, column], axis=-1), axis=-1)[..., :-1]


def reference_forward(
    q: Array,
    k: Array,
    v: Array,
    mask: Mask,
    *,
    scale: float,
    dropout: AttentionDropout | None = None,
    cap: float | None = None,
) -> tuple[Array, Array]:
    """The output [B, S, N, U] and its log-sum-exp, float32 [B, N, S]; 0 and -inf where no key is visible."""
    scores = _scores(q, k, mask, scale, None, cap)
    visible = mask.visible()[:, None, None]
    lse = jax.nn.logsumexp(scores, axis=-1, where=visible)
    weights = jnp.where(visible, jnp.exp(scores - jnp.where(jnp.isneginf(lse), 0, lse)[..., None]), 0)
    weights = weights * _dropped(dropout, mask, weights)
    out = jnp.einsum("bkgst,btku->bskgu", weights.astype(v.dtype), v)
    return out.reshape(*q.shape[:3], v.shape[-1]), lse.reshape(q.shape[0], q.shape[2], q.shape[1])


def _dropped(dropout: AttentionDropout | None, mask: Mask, weights: Array) -> Array | float:
    """Dropout's factors for weights [B, K, N/K, S, T]."""
    return 1.0 if dropout is None else dropout.factor(mask.key_index).reshape(weights.shape)


def reference_backward(
    q: Array,
    k: Array,
    v: Array,
    mask: Mask,
    out: Array,
    lse: Array,
    dout: Array,
    *,
    scale: float,
    dropout: AttentionDropout | None = None,
    cap: float | None = None,
) -> tuple[Array, Array, Array]:
    """Gradients with respect to q, k and v, from the output [B, S, N, U], its log-sum-exp [B, N, S] and its gradient.

    out and lse may come from a softmax over more keys than these: the gradients are then the contributions of these
    keys (Liu et al. 2023).
    """
    scores = _scores(q, k, mask, scale, None, cap)
    split = q.shape[0], q.shape[1], k.shape[2], q.shape[2] // k.shape[2]
    visible = mask.visible()[:, None, None]
    weights = jnp.where(visible, jnp.exp(scores - lse.reshape(*scores.shape[:-1], 1)), 0)
    factor = _dropped(dropout, mask, weights)
    delta = jnp.einsum("bsnu,bsnu->bns", out.astype(jnp.float32), dout.astype(jnp.float32))
    dout = dout.reshape(*split, v.shape[-1])
    product = partial(jnp.einsum, preferred_element_type=jnp.float32)
    dweights = product("bskgu,btku->bkgst", dout, v) * factor
    dscores = weights * (dweights - delta.reshape(*scores.shape[:-1], 1)) * scale
    dscores = dscores if cap is None else dscores * soft_cap_slope(jnp.where(visible, scores, 0), cap)
    dq = product("bkgst,btkh->bskgh", dscores.astype(k.dtype), k).reshape(q.shape)
    dk = product("bkgst,bskgh->btkh", dscores.astype(q.dtype), q.reshape(*split, -1))
    dv = product("bkgst,bskgu->btku", (weights * factor).astype(dout.dtype), dout)
    return dq.astype(q.dtype), dk.astype(k.dtype), dv.astype(v.dtype)


def merge_parts(*parts: tuple[Array, Array]) -> tuple[Array, Array]:
    """Merges outputs [B, S, N, U] over different keys and their log-sum-exps float32 [B, N, S], in float32.

    The log-sum-exp of a part is -inf for a query that sees none of its keys (Liu et al. 2023, "Ring Attention").
    """
    lse = parts[0][1]
    for _, part_lse in parts[1:]:
        lse = jnp.logaddexp(lse, part_lse)
    base = jnp.where(jnp.isneginf(lse), 0, lse)
    shares = (jnp.exp(part_lse - base).transpose(0, 2, 1)[..., None] for _, part_lse in parts)
    outs = [out.astype(jnp.float32) * share for (out, _), share in zip(parts, shares, strict=True)]
    return reduce(jnp.add, outs), lse


class Passes(NamedTuple):
    """The two functions of a backend; neither is differentiable."""

    forward: Callable[..., tuple[Array, Array]]
    """(q, k, v, mask, scale=) -> the output [B, S, N, U] and its log-sum-exp, float32 [B, N, S]."""
    backward: Callable[..., tuple[Array, Array, Array]]
    """(q, k, v, mask, output, log-sum-exp, gradient of the output, scale=) -> gradients of q, k and v."""
    dropout: bool = False
    """Whether both accept `dropout`, an AttentionDropout."""
    caps: bool = False
    """Whether both accept `cap`, a soft cap of scores."""

    def with_arguments(self, **arguments: float | AttentionDropout | None) -> "Passes":
        """These passes with those of the arguments `dropout` and `cap` that are not None."""
        keywords = {name: value for name, value in arguments.items() if value is not None}
        return self._replace(forward=partial(self.forward, **keywords), backward=partial(self.backward, **keywords))


PASSES: Mapping[str, Passes] = MappingProxyType(
    {
        "cudnn": Passes(cudnn.forward, cudnn.backward),
        "cudnn_mask": Passes(cudnn.masked_forward, cudnn.masked_backward),
        "pallas": Passes(pallas_attention.forward, pallas_attention.backward, caps=True),
        "fixed": Passes(tiles.forward, reference_backward, caps=True),
        "reference": Passes(reference_forward, reference_backward, dropout=True, caps=True),
        "blocks": Passes(
            partial(blocks.forward, whole=True), partial(blocks.backward, whole=True), dropout=True, caps=True
        ),
    }
)


def passes_of(kernel: str, cap: float | None) -> Passes:
    """The passes of a backend, a name in PASSES, with a soft cap of scores.

    Raises ValueError for a backend without caps (`capability.choose` checks earlier).
    """
    passes = PASSES[kernel]
    if cap is None:
        return passes
    if not passes.caps:
        raise ValueError(f"{kernel} attention has no soft cap of scores: set kernel=pallas or reference")
    return passes.with_arguments(cap=cap)


class _Static(NamedTuple):
    """The arguments of `attend` that are static while tracing."""

    passes: Passes
    scale: float
    window: int | None
    causal: bool
    padded: bool
    rate: float | None = None
    """Dropout rate; None: no dropout."""
    length: int | None = None
    """`AttentionDropout.length`."""

    def dropout(self, arrays: tuple | None) -> AttentionDropout | None:
        """The dropout with these arrays."""
        return None if arrays is None or self.rate is None else AttentionDropout(self.rate, *arrays, self.length)

    def mask(self, positions: tuple) -> Mask:
        """The mask of these arrays."""
        return Mask(*positions, self.window, self.causal, self.padded)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _fused(
    static: _Static,
    q: Array,
    k: Array,
    v: Array,
    positions: tuple,
    sink: Array | None,
    drop: tuple | None,
    bounds: Array | None,
) -> Array:
    return _fused_forward(static, q, k, v, positions, sink, drop, bounds)[0]


def _fused_forward(
    static: _Static,
    q: Array,
    k: Array,
    v: Array,
    positions: tuple,
    sink: Array | None,
    drop: tuple | None,
    bounds: Array | None,
) -> tuple[Array, tuple]:
    dropout = static.dropout(drop)
    out, lse = static.passes.with_arguments(dropout=dropout).forward(
        q, k, v, static.mask(positions), scale=static.scale
    )
    if sink is not None:
        # The sink is one more score without a value: it only adds to the denominator of the softmax.
        with_sink = jnp.logaddexp(lse, sink.astype(jnp.float32)[None, :, None])
        share = jnp.exp(lse - with_sink).transpose(0, 2, 1)[..., None]
        out, lse = (out.astype(jnp.float32) * share).astype(out.dtype), with_sink
    # The output and the residual must be the same named array, or the unnamed one would be recomputed.
    out, lse = checkpoint_name(out, OUTPUT), checkpoint_name(lse, STATISTICS)
    return out, (q, k, v, positions, sink, drop, bounds, out, lse)


def _fused_backward(static: _Static, saved: tuple, dout: Array) -> tuple:
    """The saved log-sum-exp includes the sink, so the backward kernel needs no change for it."""
    q, k, v, positions, sink, drop, bounds, out, lse = saved
    arrays = q, k, v, static.mask(positions), out, lse, dout
    gradients = static.passes.with_arguments(dropout=static.dropout(drop)).backward(*arrays, scale=static.scale)
    observed = None if bounds is None else score_bounds(lse, sink).astype(bounds.dtype)
    if sink is None:
        return *gradients, None, None, None, observed
    delta = jnp.einsum("bsnu,bsnu->bns", out.astype(jnp.float32), dout.astype(jnp.float32))
    dsink = -jnp.sum(jnp.exp(sink.astype(jnp.float32)[None, :, None] - lse) * delta, axis=(0, 2))
    return *gradients, None, dsink.astype(sink.dtype), None, observed


def score_bounds(lse: Array, sink: Array | None) -> Array:
    """An upper bound of the scores of each head, float32 [N], at least 0.

    lse: float32 [B, N, S], log-sum-exps with the sink. Without it, they exceed a query's largest score by at most the
    logarithm of its number of keys, and by nothing if one key gets all the weight. Every backend returns them, which
    no backend does with the largest score.
    """
    if sink is not None:
        others = jnp.minimum(sink.astype(jnp.float32)[None, :, None] - lse, -1e-6)
        lse = lse + jnp.log1p(-jnp.exp(others))
    return jnp.maximum(lse.max(axis=(0, 2)), 0)


_fused.defvjp(_fused_forward, _fused_backward)


def attend(
    kernel: str | Passes,
    q: Array,
    k: Array,
    v: Array,
    mask: Mask,
    *,
    scale: float,
    dropout: AttentionDropout | None = None,
    sink: Array | None = None,
    bias: Array | None = None,
    cap: float | None = None,
    bounds: Array | None = None,
) -> Array:
    """softmax(q k^T * scale + bias) v by a backend: a name in PASSES, or a `Passes`, which has its own cap.

    Arguments as for `reference_attention`. bounds: an observation [N] that gets `score_bounds`. Raises
    ValueError for dropout or bias with any other backend (`capability.choose` checks earlier).
    """
    if kernel == "reference":
        out = reference_attention(q, k, v, mask, scale=scale, dropout=dropout, sink=sink, bias=bias, cap=cap)
        return out if bounds is None else observe(out, bounds, _reference_bounds(q, k, mask, scale, bias, cap))
    passes = passes_of(kernel, cap) if isinstance(kernel, str) else kernel
    if bias is not None or (dropout is not None and not passes.dropout):
        feature = "bias of scores" if dropout is None else "dropout of attention weights"
        raise ValueError(f"{kernel} attention has no {feature}: set kernel=reference")
    positions = mask.query_index, mask.key_index, mask.query_segments, mask.key_segments
    static = _Static(passes, scale, mask.window, mask.causal, mask.padded)
    if dropout is None:
        return _fused(static, q, k, v, positions, sink, None, bounds)
    static = static._replace(rate=dropout.rate, length=dropout.length)
    drop = dropout.row_keys, dropout.head_index, dropout.query_index
    return _fused(static, q, k, v, positions, sink, drop, bounds)


def _reference_bounds(q: Array, k: Array, mask: Mask, scale: float, bias: Array | None, cap: float | None) -> Array:
    """`score_bounds` of the reference, float32 [N]."""
    scores = lax.stop_gradient(_scores(q, k, mask, scale, bias, cap))
    lse = jax.nn.logsumexp(scores, axis=-1, where=mask.visible()[:, None, None])
    return score_bounds(lse.reshape(q.shape[0], q.shape[2], q.shape[1]), None)


def local_device() -> KernelDevice:
    """The first local device; all others are assumed to be the same."""
    device = jax.devices()[0]
    if device.platform != "gpu" or "cuda" not in device.client.platform_version.lower():
        return KernelDevice(name=device.device_kind)
    capability = tuple(map(int, device.compute_capability.split(".")))
    number = 0 if cuda_versions is None else cuda_versions.cudnn_get_version()
    version = (number // 10000, number // 100 % 100, number % 100) if number else None
    return KernelDevice(name=device.device_kind, capability=capability, cudnn=version)
