"""A model on a mesh with the weights that its steps use, the shapes of its cache, and how the weights get there.

Each device reads its own shards, in the compute dtype: beyond the model, neither the host nor a device needs memory for
more than about one weight.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array
from jax.sharding import Mesh, NamedSharding
from jax.typing import DTypeLike

from megajax.batch import Params
from megajax.checkpoint.weight_source import WeightSource, placed
from megajax.config.errors import UserError
from megajax.config.hints import below
from megajax.layers.cache_spec import CacheLeaf, stored_leaves
from megajax.layers.decoding import LayerLoop, rolled, unrolled
from megajax.layers.lora.add_adapters import AdapterSlots
from megajax.layers.param import Adapter, Observation, ParamSpec, bind, specs
from megajax.layers.quantization.replace_matrices import demand_device
from megajax.mesh.config import BATCH_AXES, ParallelConfig, devices_over
from megajax.mesh.layout import Layout
from megajax.mesh.replicated_heads import copy_heads
from megajax.mesh.sharding_rules import Plan
from megajax.models.facts import facts_of
from megajax.models.protocol import ModelConfig
from megajax.precision.config import PrecisionConfig


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

    def like(self, count: int, *shape: int, dtype: DTypeLike = jnp.int32) -> jax.ShapeDtypeStruct:
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


def load_weights(
    cfg: Any,
    source: WeightSource,
    plan: Plan,
    mesh: Mesh,
    precision: PrecisionConfig,
    options: Mapping[str, Any],
    adapters: AdapterSlots | None = None,
) -> LoadedModel:
    """A model with the weights of a source, and with its observations as layers use them.

    cfg: a `megajax.models.protocol.ModelConfig`; options: compiler options of the model's steps; adapters: empty slots
    beside the matrices.
    Raises UserError for a model that cannot generate, and for missing weights or wrong shapes, listing all of them.
    """
    layout = Layout(plan)
    demand_device(cfg, mesh.devices.flat[0])
    if cfg.text_encoder() is None:
        cfg.cache_leaves(plan.tensor)
    built = cfg if adapters is None else replace(cfg, lora=adapters)
    abstract: nnx.Module = nnx.eval_shape(lambda: built.build(layout))
    slots = {} if adapters is None else specs(abstract, Adapter)
    declared, observed, weights = stored_specs(abstract), specs(abstract, Observation), {}
    demand_shapes(source, declared)
    demand_divisible(declared, plan, mesh)

    def like(spec: ParamSpec, shape: tuple[int, ...], dtype: DTypeLike) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, layout.plan.compute.spec(spec.axes)))

    with jax.set_mesh(mesh):
        for path, spec in declared.items():
            target = like(spec, spec.shape, spec.dtype if spec.keeps_dtype() else precision.compute)
            stored = placed(source, path, target, _rows(spec))
            weights[path] = jax.block_until_ready(copy_heads(layout, stored, spec.axes))
        for path, spec in slots.items():
            target = like(spec, spec.shape, precision.compute)
            weights[path] = copy_heads(layout, jnp.zeros(target.shape, target.dtype, device=target.sharding), spec.axes)
        for path, spec in observed.items():
            updater = spec.observed()
            target = like(spec, updater.shape(spec.shape), jnp.float32)
            present = path in source.shapes
            state = placed(source, path, target, _rows(spec)) if present else jnp.zeros(target.shape, jnp.float32)
            weights[path] = jax.device_put(updater.used(state, jnp.ones((), jnp.float32)), target.sharding)
    return LoadedModel(cfg, abstract, weights, mesh, layout, precision.matmul_precision(), options, adapters)


def model_on_mesh(
    cfg: ModelConfig,
    arrays: Params,
    parallel: ParallelConfig,
    mesh: Mesh,
    precision: PrecisionConfig,
    options: Mapping[str, Any],
) -> LoadedModel:
    """Like `load_weights`, from the weights and observations of a training state on the same mesh, without pipeline."""
    layout = Layout(Plan.of(parallel))
    cfg.cache_leaves(mesh.shape["tensor"])
    abstract: nnx.Module = nnx.eval_shape(lambda: cfg.build(layout))
    declared = {**specs(abstract), **specs(abstract, Observation)}

    def used(path: str, array: Array) -> Array:
        spec = declared[path]
        return in_step(layout, spec, array, jnp.dtype(spec.dtype if spec.keeps_dtype() else precision.compute))

    rules, axes = layout.plan.compute, layout.plan.axes_in_step
    shardings = {path: NamedSharding(mesh, rules.spec(axes(spec.axes))) for path, spec in declared.items()}
    with jax.set_mesh(mesh):
        make = jax.jit(lambda arrays: {path: used(path, w) for path, w in arrays.items()}, out_shardings=shardings)
        weights = make({path: arrays[path] for path in declared})
    return LoadedModel(cfg, abstract, weights, mesh, layout, precision.matmul_precision(), options)


def in_step(layout: Layout, spec: ParamSpec, array: Array, dtype: jnp.dtype) -> Array:
    """A weight or an observation of a training state as the layers of a step use it, inside a program."""
    if spec.updater is not None:
        return spec.updater.used(array, jnp.ones((), jnp.float32))
    return copy_heads(layout, array.astype(dtype), spec.axes)


def stored_specs(model: nnx.Module) -> dict[str, ParamSpec]:
    """The weights of a model, without slots of adapters, by path."""
    slots = specs(model, Adapter)
    return {path: spec for path, spec in specs(model).items() if path not in slots}


def demand_shapes(source: WeightSource, declared: Mapping[str, ParamSpec]) -> None:
    """Raises UserError that lists all weights that are missing in the source or have another shape."""
    stored, problems = source.shapes, list[str]()
    for path, spec in declared.items():
        if path not in stored:
            problems.append(f"{path}: missing")
        elif stored[path] != spec.shape:
            problems.append(f"{path}: {list(stored[path])} stored, {list(spec.shape)} in the model")
    if problems:
        raise UserError(below(f"the weights of {source.where} are not this model's:", problems))


def demand_divisible(declared: Mapping[str, ParamSpec], plan: Plan, mesh: Mesh) -> None:
    """Raises UserError for a weight that the devices of its mesh axes do not divide, such as the scales of groups."""
    for path, spec in declared.items():
        for size, axes in zip(spec.shape, plan.compute.dimensions(spec.axes), strict=True):
            if size % devices_over(mesh.shape, axes):
                setting = f"parallel.{axes[-1]}"
                raise UserError(
                    f"{path} has {list(spec.shape)} numbers: {setting}={mesh.shape[axes[-1]]} does not divide {size}.\n"
                    f"Use a smaller {setting}, or, for the scales of int4, quantize with a smaller --group"
                )


def _rows(spec: ParamSpec) -> range | None:
    return range(len(spec.layers)) if spec.layers else None


class StepWeightMaker:
    """Makes the weights of an engine's steps from those of a training state. Compiled once."""

    def __init__(self, loaded: LoadedModel):
        """loaded: with shapes in place of weights, as steps read them."""
        self._loaded, self._make = loaded, cache(self._program)
        self._declared = {**stored_specs(loaded.model), **specs(loaded.model, Observation)}

    def check(self, arrays: Mapping[str, Any]) -> None:
        """Raises UserError that lists the arrays that are missing, unknown, or of another shape, dtype or mesh."""
        problems = [f"{path}: not in the model" for path in arrays.keys() - self._declared.keys()]
        for path, spec in self._declared.items():
            if (problem := self._problem(spec, arrays.get(path))) is not None:
                problems.append(f"{path}: {problem}")
        if problems:
            raise UserError(below("the arrays are not this model's weights:", sorted(problems)))

    def _problem(self, spec: ParamSpec, array: Array | np.ndarray | None) -> str | None:
        shape = spec.shape if spec.updater is None else spec.updater.shape(spec.shape)
        if array is None:
            return "missing"
        if tuple(array.shape) != shape:
            return f"{list(array.shape)} given, {list(shape)} in the model"
        dtype = jnp.dtype(spec.dtype)
        floats = all(jnp.issubdtype(kind, jnp.floating) for kind in (array.dtype, dtype))
        if array.dtype != dtype and not (floats and spec.role != "quantized"):
            return f"{array.dtype} given, {dtype} in the model"
        if isinstance(array, Array) and array.is_deleted():
            return "deleted: a step of training has taken its memory"
        if isinstance(array, Array) and array.sharding.device_set != set(self._loaded.mesh.devices.flat):
            return "on other devices than the engine's"
        return None

    def __call__(self, arrays: Params, *, shared: bool) -> Params:
        """The weights. Unless `shared`, they have memory of their own: a step of training may overwrite the arrays."""
        likes = self._loaded.weights
        ready = {path for path in self._declared if shared and self._is_ready(path, arrays[path])}
        others = {path: arrays[path] for path in self._declared if path not in ready}
        with jax.set_mesh(self._loaded.mesh):
            weights = self._make(frozenset(others))(others)
        # No copy: it gives an array on the same memory the name that steps have for its layout.
        return weights | {path: jax.device_put(arrays[path], likes[path].sharding) for path in ready}

    def _is_ready(self, path: str, array: Array) -> bool:
        """Whether steps read the array as it is."""
        like = self._loaded.weights[path]
        if isinstance(like, tuple) or self._declared[path].updater is not None:
            return False
        alike = (array.shape, array.dtype) == (like.shape, like.dtype)
        return alike and array.sharding.is_equivalent_to(like.sharding, array.ndim)

    def _program(self, paths: frozenset[str]) -> Callable[[Params], dict[str, Any]]:
        loaded, likes = self._loaded, {path: self._loaded.weights[path] for path in sorted(paths)}

        def make(arrays: Params) -> dict[str, Any]:
            weights: dict[str, Any] = {}
            for path, array in arrays.items():
                used = in_step(loaded.layout, self._declared[path], array, jax.tree.leaves(likes[path])[0].dtype)
                # Without a copy, jax returns an argument that the program does not change.
                weights[path] = tuple(used) if isinstance(likes[path], tuple) else jnp.copy(used)
            return weights

        return jax.jit(make, out_shardings=jax.tree.map(lambda like: like.sharding, likes))


def demand_alike(weights: Params, likes: Mapping[str, Any]) -> None:
    """Raises UserError unless weights have the names, shapes, dtypes and layouts of others."""
    present, wanted = ({path: _described(w) for path, w in tree.items()} for tree in (weights, likes))
    if others := sorted(path for path in present.keys() | wanted.keys() if present.get(path) != wanted.get(path)):
        path = others[0]
        difference = f"{path} is {present.get(path)}, not {wanted.get(path)}"
        raise UserError(f"{len(others)} of {len(wanted)} weights do not fit the compiled steps: {difference}")


def _described(weight: object) -> list[tuple[Any, ...]]:
    return [(leaf.shape, leaf.dtype.name, leaf.sharding) for leaf in jax.tree.leaves(weight)]
