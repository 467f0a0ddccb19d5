"""Attention to gathered keys and values (Grattafiori et al. 2024, "The Llama 3 Herd of Models", section 3.3.2).

Each device gathers the keys and values of whole rows, and its own queries attend to them. The backward pass gathers
them again, because saving them would take memory for T positions in every layer.
"""

import jax.numpy as jnp
from jax import Array

from megajax.kernels.attention.attention import AttentionDropout, Passes
from megajax.kernels.attention.mask import Mask
from megajax.kernels.context.collectives import gather_rows, reduce_rows
from megajax.mesh.zigzag_order import SequenceSharding


def whole_keys(sharding: SequenceSharding, k: Array, v: Array, mask: Mask) -> tuple[Array, Array, Mask]:
    """A device's keys and values -> those of whole rows in order, and the mask of its queries over them.

    Differentiable.
    """
    segments = None if mask.key_segments is None else gather_rows(sharding, mask.key_segments)
    keys = gather_rows(sharding, k)
    index = jnp.arange(keys.shape[1], dtype=jnp.int32)
    return keys, gather_rows(sharding, v), mask._replace(key_index=index, key_segments=segments)


def all_gather(sharding: SequenceSharding, passes: Passes) -> Passes:
    """Attention over whole rows, computed from each device's shard by a backend that supports any mask."""

    def forward(
        q: Array, k: Array, v: Array, mask: Mask, *, scale: float, dropout: AttentionDropout | None = None
    ) -> tuple[Array, Array]:
        return passes.call_forward(q, *whole_keys(sharding, k, v, mask), scale=scale, dropout=dropout)

    def backward(
        q: Array, k: Array, v: Array, mask: Mask, *saved: Array, scale: float, dropout: AttentionDropout | None = None
    ) -> tuple[Array, Array, Array]:
        keys, values, mask = whole_keys(sharding, k, v, mask)
        dq, dk, dv = passes.call_backward(q, keys, values, mask, *saved, scale=scale, dropout=dropout)
        return dq, reduce_rows(sharding, dk), reduce_rows(sharding, dv)

    return Passes(forward, backward, passes.dropout)
