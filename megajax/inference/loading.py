"""Loading of a model's weights onto the mesh for the steps of an engine.

Each device reads its own shards, in the compute dtype: beyond the model, neither the host nor a device needs memory for
more than about one weight.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.sharding import Mesh, NamedSharding

from megajax.batch import Params
from megajax.checkpoint.weights.foreign import WeightSource, placed
from megajax.config.errors import UserError
from megajax.inference.loaded_model import LoadedModel
from megajax.layers.lora.add_adapters import AdapterSlots
from megajax.layers.param import Adapter, Observation, ParamSpec, specs
from megajax.layers.quantization.replace_matrices import demand_device
from megajax.mesh.config import ParallelConfig, devices_over
from megajax.mesh.layout import Layout
from megajax.mesh.replicated_heads import COPIED, copy_heads
from megajax.mesh.rules import Plan
from megajax.precision.config import PrecisionConfig


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

    def like(spec: ParamSpec, shape: tuple[int, ...], dtype: Any) -> jax.ShapeDtypeStruct:
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
            present = path in source.shapes()
            state = placed(source, path, target, _rows(spec)) if present else jnp.zeros(target.shape, jnp.float32)
            weights[path] = jax.device_put(updater.used(state, jnp.ones((), jnp.float32)), target.sharding)
    return LoadedModel(cfg, abstract, weights, mesh, layout, precision.matmul_precision(), options, adapters)


def model_on_mesh(
    cfg: Any,
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


def without_weights(
    cfg: Any,
    plan: Plan,
    mesh: Mesh,
    precision: PrecisionConfig,
    options: Mapping[str, Any],
    adapters: AdapterSlots | None = None,
) -> LoadedModel:
    """As `load_weights`, with shapes in place of weights, for programs that are only compiled."""
    layout, shapes = Layout(plan), dict[str, Any]()
    built = cfg if adapters is None else replace(cfg, lora=adapters)
    abstract: nnx.Module = nnx.eval_shape(lambda: built.build(layout))
    for path, spec in {**specs(abstract), **specs(abstract, Observation)}.items():
        observed = spec.updater is not None
        shape = spec.updater.shape(spec.shape) if spec.updater is not None else spec.shape
        sizes = zip(shape, spec.axes, strict=True)
        # Each device has a copy of the head that it uses.
        shape = tuple(plan.tensor if axis == COPIED and size % plan.tensor else size for size, axis in sizes)
        dtype = jnp.float32 if observed else spec.dtype if spec.keeps_dtype() else precision.compute
        axes = spec.axes if observed else plan.axes_in_step(spec.axes)
        shapes[path] = jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, plan.compute.spec(axes)))
    return LoadedModel(cfg, abstract, shapes, mesh, layout, precision.matmul_precision(), options, adapters)


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
    stored, problems = source.shapes(), list[str]()
    for path, spec in declared.items():
        if path not in stored:
            problems.append(f"{path}: missing")
        elif stored[path] != spec.shape:
            problems.append(f"{path}: {list(stored[path])} stored, {list(spec.shape)} in the model")
    if problems:
        raise UserError("\n  ".join([f"the weights of {source.where} are not this model's:", *problems]))


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
