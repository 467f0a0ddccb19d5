"""Attention to another section. B rows, S queries, T keys, D hidden, N query heads, K key-value heads, H head size."""

from jax import Array
from jax.ad_checkpoint import checkpoint_name

from megajax.layers.attention import Attention
from megajax.layers.context import Context
from megajax.layers.decoding import Cache, attend_to_memory, write_memory


class CrossAttention(Attention):
    """Queries of x, keys and values of `ctx.memory` [B, T, D]: [B, S, D] -> [B, S, D]."""

    def __call__(self, x: Array, ctx: Context) -> Array:
        q, (k, v) = self.normed("query_norm", self.queries(x)), self.keys_and_values_of(ctx)
        q, k, v = checkpoint_name(q, "query"), checkpoint_name(k, "key"), checkpoint_name(v, "value")
        return self.combined(self.core(q, k, v, ctx, self.layout.row_index(k.shape[1]), ctx.memory_segments), x)

    def step(self, x: Array, cache: Cache, ctx: Context) -> tuple[Array, Cache]:
        """The tokens of a decoding step, [T, 1, D] -> [T, 1, D]; cache: see `CrossAttentionConfig.cache_leaves`."""
        q = self.normed("query_norm", self.queries(x))
        return self.combined(attend_to_memory(self.core, q, cache, ctx), x), cache

    def remember(self, cache: Cache, ctx: Context) -> Cache:
        """The cache with keys and values of `ctx.memory`, [R, L, D] of the rows of the step."""
        k, v = self.keys_and_values_of(ctx)
        return write_memory(self.layout, {"key": k, "value": v}, cache, ctx)

    def keys_and_values_of(self, ctx: Context) -> tuple[Array, Array]:
        """Of `ctx.memory`, [B, T, K, H] each."""
        k, v = self.keys_and_values(self.layout.act(self.read(ctx), "batch", "seq", "embed"))
        return self.normed("key_norm", k), v

    def read(self, ctx: Context) -> Array:
        """The output of the section before. Raises ValueError where there is none."""
        if ctx.memory is None:
            raise ValueError("cross-attention reads the section before, and there is none: ctx.memory is None")
        return ctx.memory
