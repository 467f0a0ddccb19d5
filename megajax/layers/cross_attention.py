"""Attention to another section. B rows, S queries, T keys, D hidden, N query heads, K key-value heads, H head size."""

import jax.numpy as jnp
from jax import Array
from jax.ad_checkpoint import checkpoint_name

from megajax.layers.attention import Attention
from megajax.layers.context import Context


class CrossAttention(Attention):
    """Queries of x, keys and values of `ctx.memory` [B, T, D]: [B, S, D] -> [B, S, D]."""

    def __call__(self, x: Array, ctx: Context) -> Array:
        memory = self.layout.act(self.read(ctx), "batch", "seq", "embed")
        q, k, v = self.queries(x), *self.keys_and_values(memory)
        q, k = self.normalised(q, k)
        q, k, v = checkpoint_name(q, "query"), checkpoint_name(k, "key"), checkpoint_name(v, "value")
        return self.combined(self.core(q, k, v, ctx, jnp.arange(memory.shape[1]), ctx.memory_segments), x)

    def read(self, ctx: Context) -> Array:
        """The output of the section before. Raises ValueError where there is none."""
        if ctx.memory is None:
            raise ValueError("cross-attention reads the section before, and there is none: ctx.memory is None")
        return ctx.memory
