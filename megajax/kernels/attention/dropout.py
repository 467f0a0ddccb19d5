"""Dropout of attention weights, the same on every layout."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array


class AttentionDropout(NamedTuple):
    """Dropout of attention weights with one random key per (row, head, query): the same on every layout."""

    rate: float
    row_keys: Array
    """uint32 [B, 2]: key data of each row."""
    head_index: Array
    """int32 [N]: index of each head in the whole model."""
    query_index: Array
    """int32 [S]: position of each query in its row."""
    length: int | None = None
    """Number of positions of whole rows, if keys are a part of them."""

    def apply(self, weights: Array) -> Array:
        """Zeroes weights [B, N, S, T] of whole rows with probability `rate` and scales up the rest."""
        return jnp.where(self.keep(weights.shape[-1]), weights / (1 - self.rate), 0)

    def factor(self, key_index: Array) -> Array:
        """Factors for the weights of some keys of a row, float32 [B, N, S, T].

        key_index: int32 [T], positions of the keys in their rows of `length` positions.
        """
        keep = self.keep(len(key_index) if self.length is None else self.length)
        return jnp.where(keep[..., key_index], 1 / (1 - self.rate), 0)

    def keep(self, length: int) -> Array:
        """Mask of the weights to keep, bool [B, N, S, length]."""
        fold = jax.random.fold_in

        def keep_one(row: Array, head: Array, query: Array) -> Array:
            key = fold(fold(jax.random.wrap_key_data(row), head), query)
            return jax.random.bernoulli(key, 1 - self.rate, (length,))

        over_queries = jax.vmap(keep_one, (None, None, 0))
        over_heads = jax.vmap(over_queries, (None, 0, None))
        return jax.vmap(over_heads, (0, None, None))(self.row_keys, self.head_index, self.query_index)
