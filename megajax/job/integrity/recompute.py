"""Every n steps, computes the gradients of the next batch twice, each data-parallel group in the place of another.

The two programs differ only in the order of devices in the mesh. Before the sum over groups, the gradients of a group
are equal bit for bit on all devices that work.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from megajax.batch import Batch, Params
from megajax.config.errors import UserError
from megajax.faults.config import RecomputeConfig
from megajax.faults.drills import Drill
from megajax.mesh.array_hash import array_hash
from megajax.mesh.collectives import rotated
from megajax.mesh.config import DATA_AXES, devices_over
from megajax.mesh.layer_observations import reduction_of
from megajax.mesh.mesh import merged, rotated_mesh
from megajax.mesh.named_shardings import one_for_each_group, replicated
from megajax.precision.loss_scale import in_range
from megajax.processes.must_be_equal import MUST_BE_EQUAL
from megajax.training.gradients.grads import MANUAL, Weights
from megajax.training.guarded.guard import Corruption
from megajax.training.guarded.phase_timers import INTEGRITY
from megajax.training.program import Program
from megajax.training.session import Run

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


class RecomputeVerdict(NamedTuple):
    """Groups whose results differ."""

    groups: tuple[int, ...]
    """Indices along DATA_AXES of the groups that are most likely at fault."""
    reproducible: bool
    """Whether each order of devices repeated its result."""
    alike: int
    """Number of groups whose results did not differ."""


class Recompute:
    """(weights, batch, loss scale) -> Verdict, or None if the gradients agree; compiled at the first call.

    Raises ValueError for a mesh with a single data-parallel group.
    """

    def __init__(self, program: Program):
        self._program, self.groups = program, devices_over(program.mesh.shape, DATA_AXES)
        if self.groups < 2:
            raise ValueError("comparing gradients needs at least 2 data-parallel groups, the mesh has 1")
        self._rotated = Program.of(program.cfg, rotated_mesh(program.mesh, DATA_AXES), program.options)
        self._steps = [_compiled(variant) for variant in (program, self._rotated)]
        self._moves: dict[str, Callable] = {}

    def __call__(
        self, inputs: Params, batch: Batch, scale: Callable[[Mesh, int], Array], tolerance: float
    ) -> RecomputeVerdict | None:
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
        by_axis = merged(rows.reshape(*sizes, *rows.shape[1:]), MANUAL, DATA_AXES)
        return np.moveaxis(by_axis, MANUAL.index(DATA_AXES[0]), 0)

    def _moved(self, name: str, tree: Mapping[str, Array]) -> dict[str, Array]:
        """The tree on the rotated mesh: every device sends its shards to the device that replaces it."""
        mesh, specs = self._program.mesh, {path: _spec(x) for path, x in tree.items()}
        if name not in self._moves:
            send = jax.shard_map(
                partial(jax.tree.map, lambda x: rotated(x, DATA_AXES, self.groups)),
                mesh=mesh,
                in_specs=(specs,),
                out_specs=specs,
                check_vma=False,
            )
            self._moves[name] = jax.jit(send)
        with jax.set_mesh(mesh):
            moved = self._moves[name](dict(tree))
        return {path: _relabelled(x, NamedSharding(self._rotated.mesh, specs[path])) for path, x in moved.items()}


def verdict(differ: np.ndarray, first_changed: np.ndarray, second_changed: np.ndarray) -> RecomputeVerdict:
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
    return RecomputeVerdict(suspects, bool(reproducible), int((~differ).sum()))


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


class CheckGradients:
    """A hook. Raises Corruption if a device reproducibly computes other gradients than another device."""

    phase = INTEGRITY

    def __init__(
        self,
        cfg: RecomputeConfig,
        run: Run,
        event: Callable[..., None],
        say: Callable[[str], None],
        drills: Sequence[Drill],
    ):
        """Raises UserError for a layout with a single data-parallel group that parallel.elastic did not choose."""
        self.cfg, self._run, self._event, self._say = cfg, run, event, say
        self._drills = [drill for drill in drills if drill.kind == "wrong_gradients"]
        if cfg.every is not None and devices_over(run.mesh.shape, DATA_AXES) < 2:
            why = "resilience.recompute compares data-parallel groups, and parallel.data is 1"
            if not run.cfg.parallel.elastic:
                raise UserError(f"{why}: set resilience.recompute.every=none, or use more devices for data")
            # A run that resumes on its remaining devices must not end because of a check.
            say(f"{why} on these devices: gradients are not recomputed")
            self.cfg = replace(cfg, every=None)

    @cached_property
    def _recompute(self) -> Recompute:
        return Recompute(self._run.program)

    def due(self, step: int) -> bool:
        # There is no next batch after the last step.
        return self.cfg.every is not None and step % self.cfg.every == 0 and step < self._run.cfg.steps

    def __call__(self, run: Run, step: int) -> None:
        verdict = self.verdict(run, step)
        if verdict is None:
            return
        devices = devices_of(run.mesh, verdict)
        fields = {
            "devices": [device.id for device in devices],
            "processes": sorted({device.process_index for device in devices}),
            "groups": list(verdict.groups),
            "reproducible": verdict.reproducible,
        }
        self._event("recompute_mismatch", step=step, **fields)
        message = mismatch_message(step, verdict, devices)
        if verdict.reproducible:
            raise Corruption(message)
        self._say(message)

    def verdict(self, run: Run, step: int) -> RecomputeVerdict | None:
        """Compare gradients of the current state on the rows of the next step, which the run reads a second time."""
        loader = run.parts.loader(run.parts.splits.train, int(run.state.consumed_samples), training=True)
        factor = np.float32(run.state.loss_scale)

        def scale(mesh: Mesh, number: int) -> Array:
            return scale_of(mesh, factor, self._faulty(step, number))

        with loader, jax.default_matmul_precision(run.cfg.precision.matmul_precision()):
            with jax.set_mesh(run.mesh):
                batch = next(loader)[0]
            return self._recompute(run.state.inputs, batch, scale, self.cfg.tolerance)

    def _faulty(self, step: int, number: int) -> jax.Device | None:
        """The device that computes wrong gradients in a drill; None: no drill. number: of the computation, from 0."""
        drills = [drill for drill in self._drills if drill.step == step and drill.process == jax.process_index()]
        faulty = any(drill.always or number == 0 for drill in drills)
        return self._run.mesh.local_devices[0] if faulty else None


def devices_of(mesh: Mesh, verdict: RecomputeVerdict) -> list[jax.Device]:
    """The devices of the suspected groups."""
    devices = merged(mesh.devices, mesh.axis_names, DATA_AXES)
    return list(np.take(devices, verdict.groups, mesh.axis_names.index(DATA_AXES[0])).flat)


def mismatch_message(step: int, verdict: RecomputeVerdict, devices: Sequence[jax.Device]) -> str:
    """The devices that computed other gradients, and what to do."""
    names = ", ".join(f"{device.id} (process {device.process_index})" for device in devices[:8])
    subject = f"{'devices' if len(devices) > 1 else 'device'} {names}{', ...' * (len(devices) > 8)}"
    if not verdict.reproducible:
        line = (
            f"step {step}: {subject} computed other gradients than another device, but not when run again: a "
            "transient fault in the check; the state is unchanged"
        )
        advice = ". No group repeated its result: if kernels are not deterministic, set resilience.recompute.tolerance"
        return line if verdict.alike else line + advice
    alike = f"; {verdict.alike} other groups agree" if verdict.alike else ""
    return MUST_BE_EQUAL["gradients"].message.format(step=step, devices=subject, alike=alike)
