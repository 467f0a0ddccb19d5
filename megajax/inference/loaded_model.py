"""A model on a mesh with the weights that its steps use."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array
from jax.sharding import Mesh, NamedSharding

from megajax.batch import Params
from megajax.layers.decoding import LayerLoop, rolled, unrolled
from megajax.layers.lora.add_adapters import AdapterSlots
from megajax.layers.param import Observation, bind, specs
from megajax.mesh.layout import Layout
from megajax.models.facts import facts_of


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


class Draft(NamedTuple):
    """A model that drafts the tokens of another one, on the same mesh."""

    model: LoadedModel
    where: str
    """The source of the weights, for messages."""


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
