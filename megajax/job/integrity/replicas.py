"""Compares the copies of the state between steps by a hash of every array, and damages a copy in a drill.

Each device hashes its own bytes. Devices with the same part of an array have the same hash if their bytes are the
same. Positions count in the whole array, so the sum of the hashes of its parts, each part once, does not depend on the
layout.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from megajax.faults.config import ReplicasConfig
from megajax.faults.drills import Drill
from megajax.job.device_memory import size
from megajax.mesh.array_hash import array_hash, hash_of_arrays
from megajax.mesh.named_shardings import axes_of, one_for_each_device, replicated
from megajax.optim.moments import to_device
from megajax.processes.must_be_equal import MUST_BE_EQUAL
from megajax.processes.xla_options import Value
from megajax.training.guarded.guard import Corruption
from megajax.training.guarded.loop import Hook
from megajax.training.guarded.phase_timers import INTEGRITY
from megajax.training.program import Program
from megajax.training.session import Run
from megajax.training.state import TrainState

MANTISSA_BIT = 1 << 12
"""A bit of a float32's mantissa: the drill changes a weight by about one part in two thousand."""
LANES = 2
"""A hash is two uint32."""


class HashedLeaf(NamedTuple):
    """An array of the state, and its sharding."""

    path: str
    """Path in the state, for example "params.stack.blocks.0.mlp.up"."""
    sharded: tuple[bool, ...]
    """For each mesh axis, whether the array is sharded over it."""
    bytes: int
    """Bytes on each device."""

    def copies(self, mesh: Mesh) -> int:
        """Number of devices that hold the same bytes."""
        sizes = zip(mesh.devices.shape, self.sharded, strict=True)
        return prod(size for size, sharded in sizes if not sharded)


class DifferingCopies(NamedTuple):
    """Devices whose bytes differ from those of other devices with the same part of an array."""

    path: str
    devices: tuple[int, ...]
    """Positions in the mesh. Of two copies both, because either may be right."""
    copies: int
    """Number of devices that hold the part."""


class StateHash:
    """state -> uint32 [devices of the mesh, arrays, 2], the same on every process; compiled at the first call."""

    def __init__(
        self, shardings: Any, like: TrainState, mesh: Mesh, offload: float, options: Mapping[str, Value] | None = None
    ):
        """shardings, like: the state as NamedSharding and as jax.ShapeDtypeStruct; offload: the optimizer's share."""
        self.mesh, self._offload = mesh, offload
        placed: list[NamedSharding] = jax.tree.leaves(shardings)
        self._specs = [sharding.spec for sharding in placed]
        self.leaves = [
            HashedLeaf(_name(path), _sharded_axes(sharding, mesh), _bytes(leaf, sharding))
            for (path, leaf), sharding in zip(jax.tree_util.tree_leaves_with_path(like), placed, strict=True)
        ]
        self._hash = jax.jit(
            self.state_hash,
            out_shardings=replicated(mesh),
            compiler_options=None if options is None else dict(options),
        )

    def __call__(self, state: TrainState) -> np.ndarray:
        return np.asarray(self._hash(state))

    def state_hash(self, state: TrainState) -> Array:
        """The function that is compiled."""
        optimizer = to_device(state.optimizer, self._offload)
        arrays = [*jax.tree.leaves(state)]
        at = [i for i, leaf in enumerate(self.leaves) if leaf.path.startswith("optimizer.")]
        for i, array in zip(at, jax.tree.leaves(optimizer), strict=True):
            arrays[i] = array

        def local(*shards: Array) -> Array:
            hashes = [array_hash(x, offsets(spec, x.shape)) for x, spec in zip(shards, self._specs, strict=True)]
            return jnp.stack(hashes)[None]

        return jax.shard_map(
            local,
            mesh=self.mesh,
            in_specs=tuple(self._specs),
            out_specs=one_for_each_device(self.mesh),
            check_vma=False,
        )(*arrays)


def offsets(spec: PartitionSpec, shape: Sequence[int]) -> list[Array]:
    """Per dimension, uint32 []: index of this device's first element in the whole array. Called in a shard_map."""
    entries = [*spec, *[None] * (len(shape) - len(spec))]
    parts = [lax.axis_index(entry) if entry else jnp.int32(0) for entry in entries]
    return [part.astype(jnp.uint32) * jnp.uint32(size) for part, size in zip(parts, shape, strict=True)]


def mismatches(hashes: np.ndarray, leaves: Sequence[HashedLeaf], mesh: Mesh) -> Iterator[DifferingCopies]:
    """Arrays with copies that differ. hashes: from StateHash."""
    shape = mesh.devices.shape
    positions = np.arange(mesh.size).reshape(shape)
    for number, leaf in enumerate(leaves):
        order = [*_indices(leaf.sharded, sharded=True), *_indices(leaf.sharded, sharded=False)]
        copies = leaf.copies(mesh)
        table = hashes[:, number].reshape(*shape, LANES).transpose(*order, len(shape)).reshape(-1, copies, LANES)
        if (table == table[:, :1]).all():
            continue
        devices_by_part = positions.transpose(order).reshape(-1, copies)
        for row, devices in zip(table, devices_by_part, strict=True):
            if odd := _minority(row):
                yield DifferingCopies(leaf.path, tuple(int(devices[i]) for i in odd), copies)


def _minority(row: np.ndarray) -> list[int]:
    """Indices of the rows that differ from the majority; all rows if there is none."""
    _, kind, count = np.unique(row, axis=0, return_inverse=True, return_counts=True)
    kind = kind.reshape(-1)
    if len(count) == 1:
        return []
    top = int(count.max())
    if (count == top).sum() > 1:
        return list(range(len(row)))
    return [i for i, index in enumerate(kind) if count[index] < top]


def group_hashes(hashes: np.ndarray, leaves: Sequence[HashedLeaf], mesh: Mesh) -> dict[str, str]:
    """Part of the state -> 16 hexadecimal digits, the same on every layout that stores rows in the same order."""
    shape, groups = mesh.devices.shape, defaultdict[str, list[int]](list)
    wholes = np.empty((len(leaves), LANES), np.uint64)
    for number, leaf in enumerate(leaves):
        first = tuple(slice(None) if sharded else 0 for sharded in leaf.sharded)
        wholes[number] = hashes[:, number].reshape(*shape, LANES)[first].reshape(-1, LANES).sum(0, dtype=np.uint64)
        groups[group_of(leaf.path)].append(number)
    return {name: hash_of_arrays(wholes[at], [2 * number + 1 for number in at]) for name, at in groups.items()}


def group_of(path: str) -> str:
    """The group of an array's hash, for example params or optimizer.mu; all scalars are one group."""
    first, *more = path.split(".")
    if first == "optimizer":
        return ".".join([first, *more[:1]])
    return first if more else "counters"


def _indices(values: Sequence[bool], *, sharded: bool) -> list[int]:
    return [i for i, value in enumerate(values) if value is sharded]


def _name(path: Sequence[Any]) -> str:
    return ".".join(str(getattr(key, "name", getattr(key, "key", getattr(key, "idx", key)))) for key in path)


def _sharded_axes(sharding: NamedSharding, mesh: Mesh) -> tuple[bool, ...]:
    over = {axis for dimension in range(len(sharding.spec)) for axis in axes_of(sharding, dimension)}
    return tuple(axis in over for axis in mesh.axis_names)


def _bytes(leaf: jax.ShapeDtypeStruct, sharding: NamedSharding) -> int:
    return prod(sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize


class CheckReplicas:
    """Compares the copies every n steps and before every save. Raises Corruption if two copies differ."""

    phase = INTEGRITY

    def __init__(self, cfg: ReplicasConfig, program: Program, event: Callable[..., None], saves: Sequence[Hook]):
        self.cfg, self._program, self._event, self._saves = cfg, program, event, saves
        self.checked: int | None = None
        """The last step that was checked."""

    @cached_property
    def _hash(self) -> StateHash:
        return state_hash(self._program)

    def due(self, step: int) -> bool:
        if self.cfg.every is None:
            return False
        return step % self.cfg.every == 0 or any(save.due(step) for save in self._saves)

    def __call__(self, run: Run, step: int) -> None:
        with jax.set_mesh(run.mesh):
            hashes = self._hash(run.state)
        odd = [*mismatches(hashes, self._hash.leaves, run.mesh)]
        if odd:
            fields = mismatch_fields(odd, run.mesh)
            self._event("replica_mismatch", step=step, **fields)
            raise Corruption(mismatch_message(step, odd, run.mesh))
        if self.cfg.log_hash:
            self._event("state_hash", step=step, **group_hashes(hashes, self._hash.leaves, run.mesh))
        self.checked = step

    def at_end(self, run: Run) -> None:
        """Compare the copies before the last checkpoint, unless this step has been checked."""
        if self.cfg.every is not None and self.checked != run.steps_done:
            self(run, run.steps_done)


def state_hash(program: Program) -> StateHash:
    """The hash of this program's state."""
    offload = program.optimizer.cfg.offload
    return StateHash(program.shardings, program.state_like(), program.mesh, offload, program.options)


def mismatch_fields(odd: list[DifferingCopies], mesh: Mesh) -> dict[str, object]:
    """Fields of the event: the devices that differ most often, their processes, and the first array."""
    devices = [mesh.devices.flat[i] for i in _most_often(odd)]
    return {
        "devices": [device.id for device in devices],
        "processes": sorted({device.process_index for device in devices}),
        "weight": odd[0].path,
        "arrays": len({mismatch.path for mismatch in odd}),
        "copies": odd[0].copies,
    }


def mismatch_message(step: int, odd: list[DifferingCopies], mesh: Mesh) -> str:
    """The arrays and devices that differ, and what to do."""
    devices = [mesh.devices.flat[i] for i in _most_often(odd)]
    names = ", ".join(f"device {device.id} (process {device.process_index})" for device in devices)
    arrays = len({mismatch.path for mismatch in odd})
    more = f" and of {arrays - 1} other arrays" if arrays > 1 else ""
    alike = odd[0].copies - len(odd[0].devices)
    holds = f"{names} {'hold' if len(devices) > 1 else 'holds'}"
    difference = (
        f"other bytes than the other {alike} copies" if alike else "different bytes, and no value has a majority"
    )
    return MUST_BE_EQUAL["state"].message.format(
        step=step, array=odd[0].path, more=more, holders=holds, difference=difference
    )


def _most_often(odd: list[DifferingCopies]) -> list[int]:
    """Positions in the mesh of the devices that differ in most arrays."""
    counts = Counter(device for mismatch in odd for device in mismatch.devices)
    top = max(counts.values())
    return sorted(device for device, count in counts.items() if count == top)


def coverage(cfg: ReplicasConfig, program: Program) -> list[tuple[str, str]]:
    """For the banner: the bytes of the state that have copies; nothing if copies are not compared."""
    if cfg.every is None:
        return []
    leaves, mesh = state_hash(program).leaves, program.mesh
    copied = sum(leaf.bytes for leaf in leaves if leaf.copies(mesh) > 1)
    total = sum(leaf.bytes for leaf in leaves)
    text = f"every {cfg.every} steps and before saves; {size(copied)} of the {size(total)} on a device have copies"
    if copied < total / 100:
        text += " (a sharded state has few: resilience.recompute tests devices by their results)"
    return [("copies compared", text)]


@dataclass
class FlipBit:
    """A drill: after a step, changes one bit of a weight on the first device of a process."""

    drill: Drill
    phase: str = INTEGRITY

    def due(self, step: int) -> bool:
        return step == self.drill.step

    def __call__(self, run: Run, step: int) -> None:
        # Due on all processes: they run the same hooks.
        if jax.process_index() == self.drill.process:
            path = copied_weight(state_hash(run.program).leaves, run.mesh)
            run.state = with_flipped_bit(run.state, path, run.mesh.local_devices[0])


def copied_weight(leaves: list[HashedLeaf], mesh: Mesh) -> str:
    """Path of the first weight with the largest number of copies."""
    return max(_weights(leaves), key=lambda leaf: leaf.copies(mesh)).path.removeprefix("params.")


def most_copies(leaves: list[HashedLeaf], mesh: Mesh) -> int:
    """Largest number of devices that hold the same part of a weight; 1: no copies."""
    return max(leaf.copies(mesh) for leaf in _weights(leaves))


def _weights(leaves: list[HashedLeaf]) -> list[HashedLeaf]:
    return [leaf for leaf in leaves if leaf.path.startswith("params.")]


def with_flipped_bit(state: TrainState, path: str, device: jax.Device) -> TrainState:
    """The state with one bit of the first element of a weight changed on one device."""

    def changed(data: Array) -> Array:
        values = np.array(data)
        values.reshape(-1).view(np.uint32)[0] ^= MANTISSA_BIT
        return jax.device_put(values, device)

    weight = state.params[path]
    shards = [changed(shard.data) if shard.device == device else shard.data for shard in weight.addressable_shards]
    damaged = jax.make_array_from_single_device_arrays(weight.shape, weight.sharding, shards)
    return replace(state, params={**state.params, path: damaged})
