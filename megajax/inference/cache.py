"""The arrays of the cache: a pool of blocks for tokens, and slots for rows.

Each leaf that mixers declare (`megajax.layers.cache_facts`) is one array for all layers that have it: of tokens
[layers, blocks, block, ...], of rows [layers, slots, ...]. Data-parallel replicas each have a part of the blocks and
slots, and number them from 0.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import Mesh, NamedSharding

from megajax.layers.cache_facts import CacheLeaf, stored_leaves
from megajax.mesh.layout import Layout


@dataclass(frozen=True, kw_only=True, slots=True)
class CacheSize:
    """Size of a replica's cache."""

    blocks: int
    block: int
    """Tokens of a block."""
    slots: int
    """Maximum number of rows that run at the same time."""

    def tokens(self) -> int:
        """Tokens in all blocks."""
        return self.blocks * self.block


def token_bytes(leaves: Sequence[CacheLeaf], dtype: str) -> int:
    """Bytes of a token in all layers and on all devices that share its heads."""
    tokens = [leaf for leaf in stored_leaves(leaves, dtype) if leaf.per == "token"]
    return sum(leaf.size * jnp.dtype(leaf.dtype).itemsize for leaf in tokens)


def like_cache(
    leaves: Sequence[CacheLeaf], size: CacheSize, dtype: str, mesh: Mesh, layout: Layout, replicas: int
) -> dict[str, jax.ShapeDtypeStruct]:
    """Shapes, dtypes and shardings of the cache, by name of the leaf; dtype as in `stored_leaves`."""
    cache = {}
    for leaf in stored_leaves(leaves, dtype):
        first = (size.blocks, size.block) if leaf.per == "token" else (size.slots,)
        shape = (leaf.layers, replicas * first[0], *first[1:], *leaf.shape)
        axes = (None, "batch", *[None] * (len(first) - 1), *leaf.axes)
        sharding = NamedSharding(mesh, layout.plan.compute.spec(axes))
        cache[leaf.name] = jax.ShapeDtypeStruct(shape, leaf.dtype, sharding=sharding)
    return cache


def empty_cache(like: dict[str, jax.ShapeDtypeStruct]) -> dict[str, Array]:
    """Zeros with the shardings of `like`."""
    return {name: jnp.zeros(leaf.shape, leaf.dtype, device=leaf.sharding) for name, leaf in like.items()}
