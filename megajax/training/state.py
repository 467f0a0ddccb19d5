"""The training state: one pytree, saved and restored as a whole."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import Mesh, NamedSharding

from megajax.batch import Params
from megajax.layers.param import ParamSpec, initial_values
from megajax.mesh.named_shardings import replicated
from megajax.mesh.sharding_rules import Plan, Rules
from megajax.optim.moments import HOST, in_host_memory
from megajax.optim.optimizer import Optimizer, OptimizerState
from megajax.precision.loss_scale import UNSCALED, LossScaler
from megajax.training.observations import initial_arrays
from megajax.training.repr_text import state_text


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class TrainState:
    """Everything that a step reads and replaces, and that a resume needs besides the config."""

    step: Array
    """int32 []: finished steps, including skipped ones."""
    params: Params
    """float32 master weights by path, laid out by plan.params."""
    optimizer: OptimizerState
    """Moments, laid out by plan.optimizer."""
    loss_scale: Array
    """float32 []: factor on the loss during the backward pass; 1 in float32 and bfloat16."""
    scale_counters: Array
    """int32 [2]: counters of megajax.precision.loss_scale."""
    consumed_samples: Array
    """uint32 []: rows read since the start of the run, which determine the position in the data."""
    scheduled_samples: Array
    """int32 []: rows of successful steps, which the schedule counts."""
    skipped: Array
    """int32 []: steps whose gradients were not finite and changed nothing."""
    observed: Params = field(default_factory=dict)
    """float32 by path: arrays of observations; see megajax.mesh.layer_observations."""

    def __repr__(self) -> str:
        return state_text(self)

    @property
    def inputs(self) -> Params:
        """All inputs of a model's computation: weights and arrays of observations by path."""
        return {**self.params, **self.observed}


def parameter_shardings(declared: Mapping[str, ParamSpec], rules: Rules, mesh: Mesh) -> dict[str, NamedSharding]:
    """Path -> sharding of a weight under `rules`."""
    return {path: NamedSharding(mesh, rules.spec(spec.axes)) for path, spec in declared.items()}


def fresh_state(
    declared: Mapping[str, ParamSpec],
    optimizer: Optimizer,
    seed: int,
    scaler: LossScaler = UNSCALED,
    observed: Mapping[str, ParamSpec] = MappingProxyType({}),
) -> TrainState:
    """State before the first step; traceable, so that it can be computed in any layout.

    observed: observations by path.
    """
    params = initial_values(declared, seed)
    scale, counters = scaler.start()
    return TrainState(
        step=jnp.zeros((), jnp.int32),
        params=params,
        optimizer=optimizer.init({path: params[path] for path in optimizer.declared}),
        loss_scale=scale,
        scale_counters=counters,
        consumed_samples=jnp.zeros((), jnp.uint32),
        scheduled_samples=jnp.zeros((), jnp.int32),
        skipped=jnp.zeros((), jnp.int32),
        observed=initial_arrays(observed),
    )


def state_shardings(
    declared: Mapping[str, ParamSpec],
    optimizer: Optimizer,
    plan: Plan,
    mesh: Mesh,
    observed: Mapping[str, ParamSpec] = MappingProxyType({}),
) -> TrainState:
    """A TrainState of shardings. Moments with a weight's shape are sharded by plan.optimizer.

    Other arrays that belong to a stacked weight have their rows sharded over stages; all others are replicated.
    """
    # Any: a tree of shardings has the state's structure, not its leaves.
    everywhere: Any = replicated(mesh)

    def placed_like(path: str, shape: tuple[int, ...]) -> NamedSharding:
        spec = declared[path]
        rows = ("layer",)[: bool(spec.layers)]
        axes = spec.axes if shape == spec.shape else (*rows, *[None] * (len(shape) - len(rows)))
        return NamedSharding(mesh, plan.optimizer.spec(axes))

    abstract = jax.eval_shape(lambda: optimizer.init(initial_values(optimizer.declared, 0)))
    placed = {
        name: {path: placed_like(path, leaf.shape) for path, leaf in part.items()}
        if isinstance(part, dict)
        else everywhere
        for name, part in abstract.items()
    }
    return TrainState(
        step=everywhere,
        params=parameter_shardings(declared, plan.params, mesh),
        optimizer=in_host_memory(placed, abstract, optimizer.cfg.offload),
        loss_scale=everywhere,
        scale_counters=everywhere,
        consumed_samples=everywhere,
        scheduled_samples=everywhere,
        skipped=everywhere,
        observed=parameter_shardings(observed, plan.compute, mesh),
    )


def own_buffers[Tree](state: Tree) -> Tree:
    """The same arrays in buffers that a compiled program made, as a step's results are; deletes the arguments.

    A step donates its state, but buffers made of host memory are not always reused, without a warning (jax#18617): the
    first step would hold the state twice. Arrays are copied in groups no larger than the largest array, so memory never
    holds more than the state and a copy of that one. Moments in host memory take no memory of the device and stay.
    """
    leaves, structure = jax.tree.flatten(state)
    remaining = [number for number, leaf in enumerate(leaves) if leaf.sharding.memory_kind != HOST]
    # The largest first: the next ones fit into the memory that it leaves.
    remaining.sort(key=lambda number: -_device_bytes(leaves[number]))
    largest = max((_device_bytes(leaves[number]) for number in remaining), default=0)
    while remaining:
        group = [remaining.pop(0)]
        size = _device_bytes(leaves[group[0]])
        while remaining and size + _device_bytes(leaves[remaining[0]]) <= largest:
            size += _device_bytes(leaves[remaining[0]])
            group.append(remaining.pop(0))
        originals = [leaves[number] for number in group]
        copy = jax.jit(lambda arrays: [jnp.copy(x) for x in arrays], out_shardings=[x.sharding for x in originals])
        for number, new in zip(group, jax.block_until_ready(copy(originals)), strict=True):
            leaves[number].delete()
            leaves[number] = new
    return jax.tree.unflatten(structure, leaves)


def _device_bytes(leaf: Array) -> int:
    """Bytes of an array on one device."""
    return prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
