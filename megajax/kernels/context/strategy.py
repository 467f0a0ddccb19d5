"""Attention over sharded rows by the strategy of their sharding and a backend.

`all_to_all` exchanges heads for positions (Jacobs et al. 2023, "DeepSpeed Ulysses"): the devices of a group exchange
arrays, after which each device has all positions of the group for a part of the heads. Attention runs over these, by
any backend or strategy, and a second exchange restores the layout. A key-value head is repeated for every device that
has one of its query heads.

B rows, S positions of a device, N query heads and K key-value heads of a device before the exchange.
"""

from collections.abc import Mapping
from math import gcd
from types import MappingProxyType

import jax.numpy as jnp
from jax import Array, lax

from megajax.kernels.attention import blocks, cudnn
from megajax.kernels.attention.attention import Passes, passes_of
from megajax.kernels.attention.dropout import AttentionDropout
from megajax.kernels.attention.mask import Mask
from megajax.kernels.context.collectives import gather_group, to_heads, to_positions
from megajax.kernels.context.gathered import all_gather, chunks_with_gathered_keys, two_squares
from megajax.kernels.context.ring import ring
from megajax.mesh.zigzag_order import AXIS, SequenceSharding

RECTANGLES: Mapping[str, Passes] = MappingProxyType(
    {"cudnn": Passes(cudnn.rectangle_forward, cudnn.rectangle_backward)}
)
"""Attention of a chunk to the keys before it, for backends without position arguments; see `Backend.positions`."""


PARTS: Mapping[str, Passes] = MappingProxyType({"blocks": Passes(blocks.forward, blocks.backward, True, True)})
"""Backends that leave out more in whole rows than in parts of them."""


def over_context(sharding: SequenceSharding, kernel: str, cap: float | None = None) -> Passes:
    """Attention over rows sharded over several devices, with the signature of a backend.

    q [B, S, N, H], k [B, S, K, H], v [B, S, K, U], and the indices and segments of the mask are those of a device's
    positions. kernel: name of the backend that computes the parts; `kernels.capability` must allow it. cap: soft
    cap of scores. Call the result in an island over every mesh axis.
    """
    passes = PARTS.get(kernel)
    passes = passes_of(kernel, cap) if passes is None else passes.with_arguments(cap=cap)
    return over_devices(sharding, passes, RECTANGLES.get(kernel))


def over_devices(sharding: SequenceSharding, passes: Passes, rectangles: Passes | None) -> Passes:
    """`over_context` with the passes of a backend. rectangles: None for a backend with position arguments."""
    if sharding.exchanging > 1:
        groups = sharding.exchanged()
        return all_to_all(sharding, _between(groups, passes, rectangles) if groups.devices > 1 else passes)
    return _between(sharding, passes, rectangles)


def _between(sharding: SequenceSharding, passes: Passes, rectangles: Passes | None) -> Passes:
    """Attention between devices that hold different positions of the same heads."""
    if "ring" in sharding.strategy:
        return ring(sharding, passes, passes if rectangles is None else two_squares(passes))
    return (
        all_gather(sharding, passes) if rectangles is None else chunks_with_gathered_keys(sharding, passes, rectangles)
    )


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
        out, lse = passes.with_arguments(dropout=dropout).forward(*moved(q, k, v), mask, scale=scale)
        lse = to_positions(sharding, lse.transpose(0, 2, 1))
        return to_positions(sharding, out), lse.transpose(0, 2, 1)

    def backward(
        q: Array, k: Array, v: Array, mask: Mask, *saved: Array, scale: float, dropout: AttentionDropout | None = None
    ) -> tuple[Array, Array, Array]:
        mask, dropout = exchanged(mask, q, dropout)
        out, lse, dout = saved
        lse = to_heads(sharding, lse.transpose(0, 2, 1)).transpose(0, 2, 1)
        arrays = *moved(q, k, v), mask, to_heads(sharding, out), lse, to_heads(sharding, dout)
        gradients = passes.with_arguments(dropout=dropout).backward(*arrays, scale=scale)
        dq, dk, dv = (to_positions(sharding, x) for x in gradients)
        return dq, _summed(dk, k), _summed(dv, v)

    return Passes(forward, backward, passes.dropout)


def _summed(dx: Array, x: Array) -> Array:
    """Gradients of repeated heads -> gradients of the heads of x."""
    if dx.shape == x.shape:
        return dx
    copies = dx.astype(jnp.float32).reshape(*x.shape[:3], -1, x.shape[3])
    return copies.sum(3).astype(x.dtype)
