"""The pools of keys and values of a paged cache, and the arguments of its attention kernels.

R rows, W queries per row, N query heads, K key-value heads (N a multiple of K), H head size, U size of a value head,
P blocks of the pool, M blocks of a row's table.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

type Bias = Callable[[Array], Array]
"""int32 [...], the key's position minus the query's -> [..., N]: the bias added to each head's scores."""


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["keys", "values", "key_scales", "value_scales"],
    meta_fields=["value_size"],
)
@dataclass(frozen=True, slots=True)
class Pools:
    """Keys and values of all blocks; a pytree."""

    keys: Array
    """[P, block, K, H]."""
    values: Array | None
    """[P, block, K, U]; None: the first `value_size` elements of keys."""
    value_size: int
    """U."""
    key_scales: Array | None = None
    """[P, block, K]: scales of 8-bit keys; None: keys are stored unscaled."""
    value_scales: Array | None = None

    def read(self, blocks: Array, dtype: jnp.dtype) -> tuple[Array, Array]:
        """Keys and values of these blocks, int32 [R, m] -> [R, m * block, K, H] and [R, m * block, K, U] in dtype."""
        keys = _dequantized(_rows(self.keys, blocks), self.key_scales, blocks, dtype)
        if self.values is None:
            return keys, keys[..., : self.value_size]
        return keys, _dequantized(_rows(self.values, blocks), self.value_scales, blocks, dtype)


class PagedQueries(NamedTuple):
    """The queries of a step and the keys that they see.

    A query at position p attends to the keys of its row at positions 0 to p, or to p and the last `window` positions
    before it, or to those of its chunk. The pool already contains the keys of the step. A query at a negative position
    attends to nothing; its output is 0. window, sink, bias and cap are as in `megajax.kernels.attention.attention`.
    """

    q: Array
    """[R, W, N, H]."""
    table: Array
    """int32 [R, M]: blocks of each row; any block for positions that no query of the row sees."""
    positions: Array
    """int32 [R, W]."""
    scale: float
    window: int | None = None
    sink: Array | None = None
    bias: Bias | None = None
    cap: float | None = None
    chunk: int | None = None

    def first(self, positions: Array) -> Array:
        """See `first_seen`."""
        return first_seen(positions, self.window, self.chunk)


def first_seen(positions: Array, window: int | None, chunk: int | None) -> Array:
    """The first position that queries at these positions see, int32 of the same shape."""
    if chunk is not None:
        return positions - lax.rem(positions, jnp.full_like(positions, chunk))
    return jnp.zeros_like(positions) if window is None else jnp.maximum(positions - window, 0)


type Attend = Callable[[PagedQueries, Pools], Array]
"""An attention kernel for a paged cache: the output [R, W, N, U], in q's dtype."""


def _rows(pool: Array, blocks: Array) -> Array:
    return pool[blocks].reshape(blocks.shape[0], -1, *pool.shape[2:])


def _dequantized(x: Array, scales: Array | None, blocks: Array, dtype: jnp.dtype) -> Array:
    if scales is None:
        return x.astype(dtype)
    return (x.astype(jnp.float32) * _rows(scales, blocks)[..., None].astype(jnp.float32)).astype(dtype)
