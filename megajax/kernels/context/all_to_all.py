"""Exchange of heads for positions (Jacobs et al. 2023, "DeepSpeed Ulysses").

The devices of a group exchange arrays, after which each device has all positions of the group for a part of the heads.
Attention runs over these, by any backend or strategy, and a second exchange restores the layout. A key-value head is
repeated for every device that has one of its query heads.

B rows, S positions of a device, N query heads and K key-value heads of a device before the exchange.
"""

from math import gcd

import jax.numpy as jnp
from jax import Array, lax

from megajax.kernels.attention.attention import AttentionDropout, Passes
from megajax.kernels.attention.mask import Mask
from megajax.kernels.context.collectives import gather_group, to_heads, to_positions
from megajax.mesh.zigzag_order import AXIS, SequenceSharding


def all_to_all(sharding: SequenceSharding, passes: Passes) -> Passes:
    """Attention over whole rows. passes: attention over the positions of a group, see `SequenceSharding.exchanged`."""
    groups, devices = sharding.exchanged(), sharding.exchanging

    def copies(k: Array) -> int:
        """Copies of each key-value head: one for each device that has one of its query heads."""
        return devices // gcd(devices, k.shape[2])

    def exchanged(mask: Mask, q: Array, dropout: AttentionDropout | None) -> tuple[Mask, AttentionDropout | None]:
        """The mask and dropout for the positions and heads after the exchange; q: queries before it."""
        index = groups.local_index(q.shape[1] * devices)
        ids = None if mask.key_segments is None else gather_group(sharding, mask.key_segments)
        mask = Mask(index, index, ids, ids, mask.window, mask.causal, mask.padded)
        if dropout is None:
            return mask, None
        heads = q.shape[2] // devices
        first = lax.axis_index(AXIS) % sharding.exchanging * heads
        names = lax.dynamic_slice_in_dim(dropout.head_index, first, heads)
        return mask, dropout._replace(head_index=names, query_index=index)

    def moved(q: Array, k: Array, v: Array) -> tuple[Array, Array, Array]:
        k, v = (jnp.repeat(x, copies(k), axis=2) for x in (k, v))
        return to_heads(sharding, q), to_heads(sharding, k), to_heads(sharding, v)

    def forward(
        q: Array, k: Array, v: Array, mask: Mask, *, scale: float, dropout: AttentionDropout | None = None
    ) -> tuple[Array, Array]:
        mask, dropout = exchanged(mask, q, dropout)
        out, lse = passes.call_forward(*moved(q, k, v), mask, scale=scale, dropout=dropout)
        lse = to_positions(sharding, lse.transpose(0, 2, 1))
        return to_positions(sharding, out), lse.transpose(0, 2, 1)

    def backward(
        q: Array, k: Array, v: Array, mask: Mask, *saved: Array, scale: float, dropout: AttentionDropout | None = None
    ) -> tuple[Array, Array, Array]:
        mask, dropout = exchanged(mask, q, dropout)
        out, lse, dout = saved
        lse = to_heads(sharding, lse.transpose(0, 2, 1)).transpose(0, 2, 1)
        arrays = *moved(q, k, v), mask, to_heads(sharding, out), lse, to_heads(sharding, dout)
        gradients = passes.call_backward(*arrays, scale=scale, dropout=dropout)
        dq, dk, dv = (to_positions(sharding, x) for x in gradients)
        return dq, _summed(dk, k), _summed(dv, v)

    return Passes(forward, backward, passes.dropout)


def _summed(dx: Array, x: Array) -> Array:
    """Gradients of repeated heads -> gradients of the heads of x."""
    if dx.shape == x.shape:
        return dx
    copies = dx.astype(jnp.float32).reshape(*x.shape[:3], -1, x.shape[3])
    return copies.sum(3).astype(x.dtype)
