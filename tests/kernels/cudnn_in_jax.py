"""cuDNN's attention calls in plain jax: what it makes of the operands and the configuration that it is handed.

What no length covers is NaN: cuDNN need not write there. Lengths of 0 give NaN where rows are not cut in pieces.
"""

import json
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import Array

from megajax.kernels.attention import cudnn
from megajax.kernels.attention import pallas as pallas_attention
from megajax.kernels.attention.attention import PASSES, Passes


def stand_in(monkeypatch: pytest.MonkeyPatch, *, pallas: bool = True) -> list[str]:
    """cuDNN's kernels in jax, in float32 too, the reference in place of Pallas; gives the mask types called.

    pallas: False for NaN in its place, where no row needs it.
    """
    calls: list[str] = []

    def ffi_call(target: str, shapes: Any, *, legacy_backend_config: str, **_: Any) -> Any:
        config = json.loads(legacy_backend_config)["cudnn_fmha_backend_config"]
        calls.append(f"{'backward' if 'Backward' in target else 'forward'} {config['mask_type']}")
        return partial(call, target, config)

    monkeypatch.setitem(cudnn.ELEMENT, jnp.dtype(jnp.float32), "BF16")
    monkeypatch.setattr(jax.ffi, "ffi_call", ffi_call)
    fallback = PASSES["reference"] if pallas else Passes(_no_forward, _no_backward)
    monkeypatch.setattr(pallas_attention, "forward", fallback.forward)
    monkeypatch.setattr(pallas_attention, "backward", fallback.backward)
    return calls


def _no_forward(q: Array, k: Array, v: Array, *_: Any, scale: float) -> tuple[Array, Array]:
    rows, length, heads, _ = q.shape
    return jnp.full((rows, length, heads, v.shape[3]), jnp.nan, q.dtype), jnp.full((rows, heads, length), jnp.nan)


def _no_backward(*arrays: Any, scale: float) -> tuple[Array, ...]:
    return tuple(jnp.full_like(x, jnp.nan) for x in arrays[:3])


def _pieces(starts: Array, lengths: Array, rows: int, length: int) -> tuple[Array, Array]:
    """Of each position [B, S]: number of its piece, -1 outside all, and position in it. Starts count positions."""
    places = jnp.arange(rows * length)[None]
    inside = (places >= starts[:, None]) & (places < (starts + lengths)[:, None])
    number = jnp.where(inside.any(0), inside.argmax(0), -1)
    return number.reshape(rows, length), (places[0] - starts[number]).reshape(rows, length)


def call(target: str, config: dict, *operands: Array) -> list[Array]:
    """Results of one call, [B, N, S, H] each."""
    backward, biased = "Backward" in target, "Bias" in target
    q, k, v, *rest = operands
    statistics, dout = (rest.pop(0), rest.pop(0)) if backward else (None, None)
    bias = rest.pop(0) if biased else 0
    out = rest.pop(0) if backward else None
    (rows, length, heads, _), keys, most = q.shape, k.shape[1], config["max_seg_per_batch"]
    share, masked = heads // k.shape[2], config["mask_type"]
    if most == 1:
        full = jnp.full((rows,), length), jnp.full((rows,), keys)
        lengths, key_lengths = rest if "PADDING" in masked else full
        starts, key_starts = jnp.arange(rows) * length, jnp.arange(rows) * keys
    else:
        lengths, key_lengths = (x.ravel() for x in rest[:2])
        # One after the other through all rows; the rest of the array is padding.
        starts = rest[2].ravel()[: lengths.size] // (heads * q.shape[3])
        key_starts = rest[3].ravel()[: lengths.size] // (k.shape[2] * k.shape[3])
    piece, place = _pieces(starts, lengths, rows, length)
    key_piece, key_place = _pieces(key_starts, key_lengths, rows, keys)
    distance = place[:, :, None] - key_place[:, None]
    visible = (piece[:, :, None] == key_piece[:, None]) & (piece[:, :, None] >= 0)
    visible &= (distance >= 0) if "CAUSAL" in masked else True
    visible &= distance < (config["sliding_window_length"] or length + keys + 1)
    visible = visible[:, None]
    k, v = (jnp.repeat(x, share, axis=2) for x in (k, v))
    product = partial(jnp.einsum, preferred_element_type=jnp.float32)
    scores = product("bsnh,btnh->bnst", q, k) * config["fmha_scale"] + bias
    complete = (lengths > 0) & (key_lengths > 0) if most == 1 else jnp.ones((rows,), bool)
    covered = (piece >= 0) & complete[:, None]
    if not backward:
        lse = jax.nn.logsumexp(scores, axis=-1, where=visible)
        weights = jnp.where(visible, jnp.exp(scores - lse[..., None]), 0)
        outputs = product("bnst,btnu->bnsu", weights.astype(v.dtype), v)
        outputs = jnp.where(covered[:, None, :, None], outputs, jnp.nan).astype(q.dtype)
        stats = jnp.where(covered[:, None], lse, jnp.nan)
        if most > 1:
            empty = jnp.full((rows * most, heads, length), jnp.nan)
            stats = empty.at[piece, :, place].set(stats.transpose(0, 2, 1), mode="drop")
        return [outputs, stats, jnp.zeros((0,), jnp.uint8)]
    assert statistics is not None and dout is not None and out is not None
    lse = statistics if most == 1 else statistics[piece, :, place].transpose(0, 2, 1)
    delta = jnp.einsum("bsnu,bsnu->bns", out.astype(jnp.float32), dout.astype(jnp.float32))
    weights = jnp.where(visible, jnp.exp(scores - lse[..., None]), 0)
    ds = weights * (product("bsnu,btnu->bnst", dout, v) - delta[..., None]) * config["fmha_scale"]
    dq, key_covered = product("bnst,btnh->bsnh", ds, k), key_piece >= 0
    dk, dv = product("bnst,bsnh->btnh", ds, q), product("bnst,bsnu->btnu", weights, dout)
    dk, dv = (x.reshape(rows, keys, heads // share, share, -1).sum(3) for x in (dk, dv))
    gradients = [
        jnp.where(c[..., None, None], x, jnp.nan) for c, x in ((covered, dq), (key_covered, dk), (key_covered, dv))
    ]
    return [x.astype(q.dtype).transpose(0, 2, 1, 3) for x in gradients] + [jnp.zeros((0,), jnp.uint8)]
