"""The common part of all gradient functions: gather weights for a step, reduce gradients over the data axes once.

The whole computation is one shard_map, manual over every axis except `tensor`; the compiler shards over `tensor`
according to the layers' constraints. The gradient functions are `accumulate` and `pipelined`; both are a GradFn.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import Mesh, PartitionSpec

from megajax.batch import Batch, Grads, Params, Schema
from megajax.layers.param import ParamSpec, bind, operands_for_step
from megajax.mesh.collectives import (
    combined_over,
    gather_shards,
    manual_replicas,
    moved_axes,
    reduce_shards,
    row_major,
    token_axes,
)
from megajax.mesh.config import MESH_AXES
from megajax.mesh.layer_observations import Reduction, reduction_of
from megajax.mesh.layout import Layout
from megajax.mesh.mesh import free_axes, manual_axes
from megajax.mesh.replicated_heads import COPIED, copy_heads, sum_copies
from megajax.models.protocol import Model
from megajax.models.reduction import LossReduction
from megajax.precision.cast import to_compute, to_optimizer, to_reduce
from megajax.precision.config import PrecisionConfig
from megajax.training.gradients.staged import Head, forward, training_loss

type GradFn = Callable[[Params, Batch, Array], Grads]
"""(float32 weights, batch [M, B, ...], loss scale float32 []) -> Grads; gradients are multiplied by the scale."""

type Sums = Mapping[str, tuple[Array, Array]]

MANUAL = tuple(axis for axis in MESH_AXES if axis != "tensor")


@dataclass(frozen=True)
class Weights:
    """Gathers the weights of a model for a step, and reduces their gradients for the optimizer.

    Observations are passed like weights: their values are those in the state, their gradients the new observations.
    """

    model: Model
    """Abstract: structure without values."""
    declared: Mapping[str, ParamSpec]
    schema: Schema
    """The leaves of training batches; evaluation batches may have fewer."""
    layout: Layout
    precision: PrecisionConfig
    frozen: frozenset[str] = frozenset()
    """Paths of frozen weights, which have no gradients."""

    def gather_for_step(self, path: str, w: Array, scale: Array) -> Array:
        """Master weight at rest -> compute dtype, gathered to its layout during the step.

        Observations become the float32 values that layers read. scale: the loss scale.
        """
        updater = self.declared[path].updater
        if updater is not None:
            return updater.used(w, scale)
        plan, axes = self.layout.plan, self.declared[path].axes
        if not self.declared[path].keeps_dtype():
            w = to_compute(w, self.precision)
        w = copy_heads(self.layout, w, axes)
        axes = plan.axes_in_step(axes)
        moves = _moves_between_devices(moved_axes(plan.params, plan.rules_in_step(axes), axes))
        if moves:
            w = self.layout.island(lambda shard: row_major(gather_shards(shard, moves)), (axes,), axes)(w)
        if not plan.replicated_per_tensor_rank(axes):
            return w
        copies = prod(free_axes().get(axis, 1) for axis in plan.compute.mesh_axes("copies"))
        shape = (*w.shape[:-1], copies, w.shape[-1])
        return self.layout.act(jnp.broadcast_to(w[..., None, :], shape), *self.axes_for_step(path))

    def axes_for_step(self, path: str) -> tuple[str | None, ...]:
        """Logical axes of the result of `gather_for_step`."""
        axes = tuple(self.layout.plan.axes_in_step(self.declared[path].axes))
        return (*axes[:-1], "copies", axes[-1]) if self.layout.plan.replicated_per_tensor_rank(axes) else axes

    def reduce(self, path: str, g: Array) -> Array:
        """A device's summed gradient, laid out as the weight in the step -> sum over replicas, as the optimizer's."""
        plan, axes = self.layout.plan, self.layout.plan.axes_in_step(self.declared[path].axes)
        if (reduction := reduction_of(path)) is not None:
            return self._combined(path, g, reduction)
        if plan.replicated_per_tensor_rank(axes):
            g = self.layout.act(g.sum(-2), *axes)
        in_step = plan.rules_in_step(axes)
        moves = _moves_between_devices(moved_axes(plan.optimizer, in_step, axes))
        reduced_axes = {axis for over in in_step.dimensions(axes) for axis in over} | {axis for _, axis in moves}
        also = tuple(axis for axis in manual_replicas() if axis not in reduced_axes)
        if moves or also:
            reduced = self.layout.island(lambda part: reduce_shards(row_major(part), moves, also), (axes,), axes)
            g = reduced(to_reduce(g, self.precision))
        return sum_copies(self.layout, to_optimizer(g), *self._heads_at_rest(path))

    def _combined(self, path: str, observed: Array, reduction: Reduction) -> Array:
        """An observation, combined over the devices that hold copies of it."""
        axes = self.declared[path].axes
        sharded = {axis for over in self.layout.plan.compute.dimensions(axes) for axis in over}
        over = tuple(axis for axis in manual_replicas() if axis not in sharded)
        if not over:
            return observed
        return self.layout.island(lambda part: combined_over(part, over, reduction), (axes,), axes)(observed)

    def _heads_at_rest(self, path: str) -> tuple[tuple[str | None, ...], int]:
        """Logical axes of a weight at rest, and its number of replicated key-value heads; 0 for none."""
        spec = self.declared[path]
        return spec.axes, dict(zip(spec.axes, spec.shape, strict=True)).get(COPIED, 0)

    def sharded_over(self, axis: str) -> frozenset[str]:
        """Paths of the weights that are sharded over a mesh axis during computation."""
        rules = self.layout.plan.compute
        over = {path: [a for name in spec.axes for a in rules.mesh_axes(name)] for path, spec in self.declared.items()}
        return frozenset(path for path, axes in over.items() if axis in axes)

    def gather_all_for_step(self, params: Params, scale: Array) -> dict[str, Array]:
        """All weights, see `gather_for_step`, and what layers multiply by that is made of them once a step."""
        in_step = {path: self.gather_for_step(path, w, scale) for path, w in params.items()}
        return in_step | operands_for_step(self.layout, self.model, in_step)

    def reduce_all(self, totals: Params) -> dict[str, Array]:
        """All summed gradients on the optimizer's layout, see `reduce`."""
        return {path: self.reduce(path, g) for path, g in totals.items()}

    def gradient_dtypes(self) -> dict[str, jnp.dtype]:
        """Dtype in which layers compute the gradients of matrices: the dtype of accumulation.

        Never narrower than the compute dtype, which is that of the matrix.
        """
        trained = ((path, spec) for path, spec in self.declared.items() if path not in self.frozen)
        matrices = (path for path, spec in trained if spec.role == "weight" and spec.layers)
        return dict.fromkeys(matrices, jnp.promote_types(self.precision.compute, self.precision.gradients))

    def zeros(self, in_step: Params) -> dict[str, Array]:
        """Accumulators for the gradients of `in_step`, except frozen weights."""
        dtypes = {
            path: self.precision.gradients if reduction_of(path) is None else jnp.float32
            for path in in_step
            if path in self.declared and path not in self.frozen
        }
        return {
            path: self.layout.zeros(in_step[path].shape, dtypes[path], *self.axes_for_step(path)) for path in dtypes
        }

    def grads(self, sums: tuple, totals: Params) -> Grads:
        """The result of a gradient function. sums: loss, weight, metrics; totals: reduced gradients, observations."""
        (loss_sum, weight_sum, metrics), observed = sums, {p: g for p, g in totals.items() if reduction_of(p)}
        gradients = {path: g for path, g in totals.items() if path not in observed}
        return Grads(loss_sum, weight_sum, gradients, metrics, observed)

    def manual(self, f: Callable, mesh: Mesh, out_specs: object) -> Callable:
        """f(params, batch, scale) -> out as one shard_map; params are laid out by plan.params."""
        plan = self.layout.plan
        params = {path: plan.params.spec(spec.axes, keep=MANUAL) for path, spec in self.declared.items()}

        def mapped(weights: Params, batch: Batch, scale: Array) -> Any:
            specs = batch_specs({name: self.schema[name] for name in batch}, self.layout)
            return jax.shard_map(
                f,
                mesh=mesh,
                axis_names=set(MANUAL),
                check_vma=False,
                in_specs=(params, specs, PartitionSpec()),
                out_specs=out_specs,
            )(weights, batch, scale)

        return mapped

    def reduced_specs(self) -> dict[str, PartitionSpec]:
        """PartitionSpecs of reduced gradients within `manual`."""
        optimizer = self.layout.plan.optimizer
        trained = {path: spec for path, spec in self.declared.items() if path not in self.frozen}
        return {path: optimizer.spec(spec.axes, keep=MANUAL) for path, spec in trained.items()}

    def sums(self, f: Callable, mesh: Mesh) -> Callable[[Params, Batch], Sums]:
        """f(params, batch, scale) -> replicated sums, as a function of weights and batch with scale 1."""
        mapped = self.manual(f, mesh, PartitionSpec())
        return lambda params, batch: mapped(dict(params), dict(batch), jnp.ones((), jnp.float32))


def batch_specs(schema: Schema, layout: Layout) -> dict[str, PartitionSpec]:
    """PartitionSpecs of the leaves of a batch [M, B, ...]."""
    return {name: layout.plan.compute.spec(leaf.batch_axes) for name, leaf in schema.items()}


def _moves_between_devices(moves: tuple[tuple[int, str], ...]) -> tuple[tuple[int, str], ...]:
    sizes = manual_axes()
    return tuple((dimension, axis) for dimension, axis in moves if sizes.get(axis, 1) > 1)


def over_replicas[T](sums: T) -> T:
    """Sums over the devices that hold different tokens."""
    axes = token_axes()
    return lax.psum(sums, axes) if axes else sums


def forward_sums(
    weights: Weights, reduction: LossReduction, mesh: Mesh, head: Head = training_loss
) -> Callable[[Params, Batch], Sums]:
    """(weights, batch [M, B, ...]) -> metrics summed over the batch, without gradients or dropout."""

    def local(params: Params, batch: Batch, scale: Array) -> Sums:
        model = bind(weights.model, weights.gather_all_for_step(params, scale))
        parts = lax.map(lambda rows: forward(model, rows, None, reduction, head).metrics, batch)
        return over_replicas(jax.tree.map(lambda part: part.sum(0), parts))

    return weights.sums(local, mesh)
