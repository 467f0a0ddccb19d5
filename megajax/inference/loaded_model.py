"""A model on a mesh with the weights that its steps use, and the shapes of its cache."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array
from jax.sharding import Mesh, NamedSharding

from megajax.batch import Params
from megajax.layers.cache_spec import CacheLeaf, stored_leaves
from megajax.layers.decoding import LayerLoop, rolled, unrolled
from megajax.layers.lora.add_adapters import AdapterSlots
from megajax.layers.param import Observation, bind, specs
from megajax.mesh.config import BATCH_AXES, devices_over
from megajax.mesh.layout import Layout
from megajax.models.facts import facts_of


@dataclass(frozen=True, kw_only=True, slots=True)
class CacheSize:
    """Size of a replica's cache."""

    blocks: int
    block: int
    """Tokens of a block."""
    slots: int
    """Maximum number of rows that run at the same time."""
    snapshots: int = 0
    """Number of states of rows at the ends of prefixes, in slots after those of rows."""

    def tokens(self) -> int:
        """Tokens in all blocks."""
        return self.blocks * self.block


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model on a mesh, with the weights that its layers use."""

    cfg: Any
    """A `megajax.models.protocol.ModelConfig`."""
    model: nnx.Module
    """The module with abstract arrays."""
    weights: Params
    """Weights by path, in the compute dtype; tuples of rows, see `layers_apart`; shapes, see `described`."""
    mesh: Mesh
    layout: Layout
    matmul_precision: str | None = None
    """jax_default_matmul_precision of its steps."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Compiler options."""
    adapters: AdapterSlots | None = None
    """Room for adapters beside the matrices, whose arrays are among `weights`; None: there is none. An engine writes
    adapters into these arrays: other engines cannot use them."""
    loop: LayerLoop = rolled
    """The loop over layers in a step; `unrolled` if `weights` are those of `layers_apart`."""

    def described(self) -> "LoadedModel":
        """The model with the shapes, dtypes and shardings of its weights in their place."""
        likes = jax.tree.map(lambda w: jax.ShapeDtypeStruct(w.shape, w.dtype, sharding=w.sharding), self.weights)
        return replace(self, weights=likes)

    def bound(self, weights: Params) -> Any:
        """The module with these weights, inside a program. Stacks of rows that are separate arguments are stacked: XLA
        reads a constant row of such a stack in place."""
        stacked = {path: jnp.stack(w) if isinstance(w, tuple) else w for path, w in weights.items()}
        return bind(self.model, stacked)

    def parameter_count(self) -> int:
        """Number of weights; without padding of the vocabulary if the model has facts, as in training."""
        facts = facts_of(self.cfg)
        stored = sum(prod(array.shape) for array in jax.tree.leaves(self.weights))
        return stored if facts is None else facts.parameter_count().total

    @property
    def replicas(self) -> int:
        """Number of replicas, each with its own rows and cache."""
        return devices_over(self.mesh.shape, BATCH_AXES)

    def sharding(self, *axes: str | None) -> NamedSharding:
        """The layout of an array with these logical axes in a step."""
        return NamedSharding(self.mesh, self.layout.plan.compute.spec(axes))

    def like(self, count: int, *shape: int, dtype: Any = jnp.int32) -> jax.ShapeDtypeStruct:
        """The shape of an array [count, ...] of each replica, all concatenated."""
        sharding = self.sharding("batch", *[None] * len(shape))
        return jax.ShapeDtypeStruct((self.replicas * count, *shape), dtype, sharding=sharding)

    def like_cache(self, leaves: Sequence[CacheLeaf], size: CacheSize, dtype: str) -> dict[str, jax.ShapeDtypeStruct]:
        """Shapes, dtypes and shardings of a cache, by name of the leaf; dtype as in `stored_leaves`."""
        cache = {}
        for leaf in stored_leaves(leaves, dtype):
            first = (size.blocks, size.block) if leaf.per == "token" else (size.slots + size.snapshots,)
            shape = (leaf.layers, self.replicas * first[0], *first[1:], *leaf.shape)
            sharding = self.sharding(None, "batch", *[None] * (len(first) - 1), *leaf.axes)
            cache[leaf.name] = jax.ShapeDtypeStruct(shape, leaf.dtype, sharding=sharding)
        return cache


def layers_apart(loaded: LoadedModel) -> LoadedModel:
    """The model with each layer's row of a stacked weight as an array of its own, without a copy on CPUs.

    A CPU copies the row of a stack that a loop indexes, which takes as long as a product with few rows.
    """
    declared, plan = {**specs(loaded.model), **specs(loaded.model, Observation)}, loaded.layout.plan

    def rows(path: str, stack: Array) -> Any:
        axes = plan.axes_in_step(declared[path].axes)[1:]
        sharding = NamedSharding(loaded.mesh, plan.compute.spec(axes))
        shards = [(np.asarray(shard.data), shard.device) for shard in stack.addressable_shards]
        return tuple(
            jax.make_array_from_single_device_arrays(
                stack.shape[1:], sharding, [jax.device_put(rows[number], device) for rows, device in shards]
            )
            for number in range(len(stack))
        )

    weights = {path: rows(path, w) if declared[path].layers else w for path, w in loaded.weights.items()}
    return replace(loaded, weights=weights, loop=unrolled)
