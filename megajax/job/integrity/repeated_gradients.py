"""Computes the gradients of a batch twice; the second time each data-parallel group takes the place of another.

The two programs differ only in the order of devices in the mesh. Before the sum over groups, the gradients of a group
are equal bit for bit on all devices that work.
"""

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from megajax.batch import Batch, Params
from megajax.job.integrity.state_hash import array_hash
from megajax.mesh.collectives import rotated
from megajax.mesh.mesh import rotated_mesh
from megajax.mesh.observations import reduction_of
from megajax.mesh.shardings import one_for_each_group, replicated
from megajax.precision.loss_scale import in_range
from megajax.training.gradients.grads import MANUAL, Weights
from megajax.training.program import Program

AXIS = "data"
HASHES, NORM = "hashes", "norm"
DRILL_FACTOR = 1 + 2**-10
"""Factor on the loss of the device that computes wrong gradients in a drill."""


@dataclass(frozen=True)
class LocalGradients(Weights):
    """Hashes the gradients of each device, or of each group of `tensor`, instead of summing them over the data axes."""

    def reduce_all(self, totals: Params) -> dict[str, Array]:
        unsummed = [g for path, g in sorted(totals.items()) if self._unsummed(path)]
        zero = jnp.uint32(0)
        hashes = [array_hash(g, [zero] * g.ndim) for g in unsummed]
        norm = sum((jnp.sum(jnp.square(g.astype(jnp.float32))) for g in unsummed), jnp.zeros((), jnp.float32))
        return {HASHES: jnp.stack(hashes)[None], NORM: norm[None]}

    def reduced_specs(self) -> dict[str, PartitionSpec]:
        return dict.fromkeys((HASHES, NORM), one_for_each_group(MANUAL))

    def _unsummed(self, path: str) -> bool:
        """Whether the gradient is not yet summed over devices. With fsdp the backward pass sums those of layers."""
        if reduction_of(path) is not None:
            return False
        plan, axes = self.layout.plan, self.layout.plan.axes_in_step(self.declared[path].axes)
        return plan.rules_in_step(axes).dimensions(axes) == plan.compute.dimensions(axes)


class Results(NamedTuple):
    """Hashes and norms of the gradients of each data-parallel group."""

    hashes: np.ndarray
    """uint32 [groups, ...]."""
    norms: np.ndarray
    """float32 [groups, ...]: squared norms of gradients."""

    def differ(self, other: "Results", tolerance: float) -> np.ndarray:
        """bool [groups]: whether the gradients differ, or with a tolerance their norms."""
        groups = len(self.hashes)
        if tolerance == 0:
            return (self.hashes != other.hashes).reshape(groups, -1).any(1)
        a, b = (np.sqrt(results.norms.reshape(groups, -1)) for results in (self, other))
        return ~(np.abs(a - b) <= tolerance * np.maximum(np.abs(a), np.abs(b))).all(1)


class Verdict(NamedTuple):
    """Groups whose results differ."""

    groups: tuple[int, ...]
    """Indices along `data` of the groups that are most likely at fault."""
    reproducible: bool
    """Whether each order of devices repeated its result."""
    alike: int
    """Number of groups whose results did not differ."""


class Recompute:
    """(weights, batch, loss scale) -> Verdict, or None if the gradients agree; compiled at the first call.

    Raises ValueError for a mesh with a single data-parallel group.
    """

    def __init__(self, program: Program):
        self._program, self.groups = program, program.mesh.shape[AXIS]
        if self.groups < 2:
            raise ValueError("comparing gradients needs at least 2 data-parallel groups, the mesh has 1")
        self._rotated = Program.of(program.cfg, rotated_mesh(program.mesh, AXIS), program.options)
        self._steps = [_compiled(variant) for variant in (program, self._rotated)]
        self._moves: dict[str, Callable] = {}

    def __call__(
        self, inputs: Params, batch: Batch, scale: Callable[[Mesh, int], Array], tolerance: float
    ) -> Verdict | None:
        """scale: (mesh, number of the computation from 0) -> float32 [], on all devices."""
        moved = {name: self._moved(name, tree) for name, tree in (("weights", inputs), ("batch", batch))}
        inputs_by_order = ((inputs, batch), (moved["weights"], moved["batch"]))

        def run(order: int, number: int) -> Results:
            mesh = (self._program, self._rotated)[order].mesh
            with jax.set_mesh(mesh):
                out = self._steps[order](*inputs_by_order[order], scale(mesh, number))
            # Rows are in the order of the manual axes; make groups the first dimension.
            by_group = {name: self._by_group(np.asarray(value)) for name, value in out.items()}
            return Results(by_group[HASHES], by_group[NORM])

        first, second = run(0, 0), run(1, 1)
        differ = first.differ(second, tolerance)
        if not differ.any():
            return None
        return verdict(differ, run(0, 2).differ(first, tolerance), run(1, 3).differ(second, tolerance))

    def _by_group(self, rows: np.ndarray) -> np.ndarray:
        sizes = [self._program.mesh.shape[axis] for axis in MANUAL]
        return np.moveaxis(rows.reshape(*sizes, *rows.shape[1:]), MANUAL.index(AXIS), 0)

    def _moved(self, name: str, tree: Mapping[str, Array]) -> dict[str, Array]:
        """The tree on the rotated mesh: every device sends its shards to the device that replaces it."""
        mesh, specs = self._program.mesh, {path: _spec(x) for path, x in tree.items()}
        if name not in self._moves:
            send = jax.shard_map(
                partial(jax.tree.map, lambda x: rotated(x, AXIS, self.groups)),
                mesh=mesh,
                in_specs=(specs,),
                out_specs=specs,
                check_vma=False,
            )
            self._moves[name] = jax.jit(send)
        with jax.set_mesh(mesh):
            moved = self._moves[name](dict(tree))
        return {path: _relabelled(x, NamedSharding(self._rotated.mesh, specs[path])) for path, x in moved.items()}


def verdict(differ: np.ndarray, first_changed: np.ndarray, second_changed: np.ndarray) -> Verdict:
    """The groups that are most likely at fault. In the second order, the devices of group i + 1 compute group i's rows.

    Args:
        differ: bool [groups]: whether the two orders of devices gave different results for the rows of a group.
        first_changed: bool [groups]: whether the first order gave another result when it was run again.
        second_changed: the same for the second order.
    """
    groups, reproducible, transient = len(differ), Counter[int](), Counter[int]()
    for group in np.flatnonzero(differ).tolist():
        second_group = (group + 1) % groups
        if first_changed[group] or second_changed[group]:
            transient.update([group] * bool(first_changed[group]) + [second_group] * bool(second_changed[group]))
        else:
            reproducible.update((group, second_group))
    counts = reproducible or transient
    top = max(counts.values())
    suspects = tuple(sorted(group for group, count in counts.items() if count == top))
    return Verdict(suspects, bool(reproducible), int((~differ).sum()))


def _compiled(program: Program) -> Callable[..., Mapping[str, Array]]:
    """Jitted (weights, batch, scale) -> hashes and norms, on all devices."""
    grad_fn, weight = program.grad_fn(weights=LocalGradients), program.step_parts.weight

    def recompute(inputs: Params, batch: Batch, scale: Array) -> Mapping[str, Array]:
        return grad_fn(inputs, batch, scale * in_range(weight(batch))).grads

    return jax.jit(recompute, out_shardings=program.shardings.step, compiler_options=dict(program.options))


def _spec(x: Array) -> PartitionSpec:
    sharding: Any = x.sharding
    return sharding.spec


def _relabelled(x: Array, sharding: NamedSharding) -> Array:
    """An array with the shards of this process, placed on another mesh."""
    return jax.make_array_from_single_device_arrays(x.shape, sharding, [shard.data for shard in x.addressable_shards])


def scale_of(mesh: Mesh, factor: np.float32, faulty: jax.Device | None) -> Array:
    """float32 []: the loss scale on all devices, multiplied by DRILL_FACTOR on a faulty one."""
    arrays = [
        jax.device_put(factor * np.float32(DRILL_FACTOR if device == faulty else 1.0), device)
        for device in mesh.local_devices
    ]
    return jax.make_array_from_single_device_arrays((), replicated(mesh), arrays)
