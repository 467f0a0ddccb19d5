"""The gradients of a batch, computed twice: the second time every data-parallel group works in the place of another.

The programs are the same but for the order of devices in the mesh. A group computes its gradients without the others,
so before they are summed they are equal bit for bit, whichever devices computed them, if the devices work.
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
from megajax.job.state_hash import array_hash
from megajax.mesh.collectives import rotated
from megajax.mesh.mesh import rotated_mesh
from megajax.mesh.observations import reduction_of
from megajax.mesh.shardings import one_for_each_group, replicated
from megajax.precision.loss_scale import in_range
from megajax.training.grads import MANUAL, Weights
from megajax.training.program import Program

AXIS = "data"
HASHES, NORM = "hashes", "norm"
DRILL_FACTOR = 1 + 2**-10
"""What a device that computes wrong gradients in a drill multiplies its loss by."""


@dataclass(frozen=True)
class LocalGradients(Weights):
    """Instead of summing gradients over the data axes, hashes those of each device, or of each group of `tensor`."""

    def reduce_all(self, totals: Params) -> dict[str, Array]:
        own = [g for path, g in sorted(totals.items()) if self._unsummed(path)]
        zero = jnp.uint32(0)
        hashes = [array_hash(g, [zero] * g.ndim) for g in own]
        norm = sum((jnp.sum(jnp.square(g.astype(jnp.float32))) for g in own), jnp.zeros((), jnp.float32))
        return {HASHES: jnp.stack(hashes)[None], NORM: norm[None]}

    def reduced_specs(self) -> dict[str, PartitionSpec]:
        return dict.fromkeys((HASHES, NORM), one_for_each_group(MANUAL))

    def _unsummed(self, path: str) -> bool:
        """Whether the gradient arrives as this device computed it. With fsdp those of layers are summed on the way."""
        if reduction_of(path) is not None:
            return False
        plan, axes = self.layout.plan, self.layout.plan.axes_in_step(self.declared[path].axes)
        return plan.rules_in_step(axes).dimensions(axes) == plan.compute.dimensions(axes)


class Results(NamedTuple):
    """What the devices of each data-parallel group computed."""

    hashes: np.ndarray
    """uint32 [groups, ...]."""
    norms: np.ndarray
    """float32 [groups, ...]: squared norms of gradients."""

    def differ(self, other: "Results", tolerance: float) -> np.ndarray:
        """bool [groups]."""
        groups = len(self.hashes)
        if tolerance == 0:
            return (self.hashes != other.hashes).reshape(groups, -1).any(1)
        a, b = (np.sqrt(each.norms.reshape(groups, -1)) for each in (self, other))
        return ~(np.abs(a - b) <= tolerance * np.maximum(np.abs(a), np.abs(b))).all(1)


class Verdict(NamedTuple):
    """Groups whose results differ."""

    groups: tuple[int, ...]
    """Places along `data` in the mesh of the run, of the groups that most likely are at fault."""
    reproducible: bool
    """Whether each order of devices gave the same again."""
    alike: int
    """Number of groups whose results did not differ."""


class Recompute:
    """(weights, batch, loss scale) -> Verdict, or None where all is well; compiled at the first call.

    Raises ValueError for a mesh with a single data-parallel group.
    """

    def __init__(self, program: Program):
        self._program, self.groups = program, program.mesh.shape[AXIS]
        if self.groups < 2:
            raise ValueError("a single data-parallel group has nothing to be compared with")
        self._other = Program.of(program.cfg, rotated_mesh(program.mesh, AXIS), program.options)
        self._steps = [_compiled(each) for each in (program, self._other)]
        self._moves: dict[str, Callable] = {}

    def __call__(
        self, inputs: Params, batch: Batch, scale: Callable[[Mesh, int], Array], tolerance: float
    ) -> Verdict | None:
        """scale: (mesh, number of the run from 0) -> float32 [], on all devices."""
        moved = {name: self._moved(name, tree) for name, tree in (("weights", inputs), ("batch", batch))}
        given = ((inputs, batch), (moved["weights"], moved["batch"]))

        def run(order: int, number: int) -> Results:
            mesh = (self._program, self._other)[order].mesh
            with jax.set_mesh(mesh):
                out = self._steps[order](*given[order], scale(mesh, number))
            # Rows are in the order of the manual axes; groups come first.
            by_group = {name: self._by_group(np.asarray(value)) for name, value in out.items()}
            return Results(by_group[HASHES], by_group[NORM])

        here, there = run(0, 0), run(1, 1)
        differ = here.differ(there, tolerance)
        if not differ.any():
            return None
        again = run(0, 2).differ(here, tolerance), run(1, 3).differ(there, tolerance)
        return verdict(differ, *again)

    def _by_group(self, rows: np.ndarray) -> np.ndarray:
        sizes = [self._program.mesh.shape[axis] for axis in MANUAL]
        return np.moveaxis(rows.reshape(*sizes, *rows.shape[1:]), MANUAL.index(AXIS), 0)

    def _moved(self, name: str, tree: Mapping[str, Array]) -> dict[str, Array]:
        """The same values on the other mesh: every device sends its shards to the device that takes its place."""
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
            sent = self._moves[name](dict(tree))
        return {path: _relabelled(x, NamedSharding(self._other.mesh, specs[path])) for path, x in sent.items()}


def verdict(differ: np.ndarray, changed_here: np.ndarray, changed_there: np.ndarray) -> Verdict:
    """Which groups are at fault.

    bool [groups] each. differ: whether the two orders of devices gave different results for the rows of a group;
    changed_here, changed_there: whether an order gave something else when it was run again. The rows of group i are
    computed by the devices of group i + 1 in the other order.
    """
    groups, reproducible, passing = len(differ), Counter[int](), Counter[int]()
    for group in np.flatnonzero(differ).tolist():
        other = (group + 1) % groups
        if changed_here[group] or changed_there[group]:
            passing.update([group] * bool(changed_here[group]) + [other] * bool(changed_there[group]))
        else:
            reproducible.update((group, other))
    counts = reproducible or passing
    top = max(counts.values())
    named = tuple(sorted(group for group, count in counts.items() if count == top))
    return Verdict(named, bool(reproducible), int((~differ).sum()))


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
    """The shards that this process holds, as those of an array on another mesh."""
    return jax.make_array_from_single_device_arrays(x.shape, sharding, [each.data for each in x.addressable_shards])


def scale_of(mesh: Mesh, factor: np.float32, faulty: jax.Device | None) -> Array:
    """float32 []: the loss scale on all devices, another one on a faulty device."""
    arrays = [
        jax.device_put(factor * np.float32(DRILL_FACTOR if device == faulty else 1.0), device)
        for device in mesh.local_devices
    ]
    return jax.make_array_from_single_device_arrays((), replicated(mesh), arrays)
