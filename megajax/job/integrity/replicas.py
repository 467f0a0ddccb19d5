"""Compares the copies of the state between steps, and damages a copy in a drill."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import jax
import numpy as np
from jax import Array
from jax.sharding import Mesh

from megajax.faults.config import ReplicasConfig
from megajax.faults.drills import Drill
from megajax.job.device_memory import size
from megajax.job.integrity.state_hash import HashedLeaf, Mismatch, StateHash, group_hashes, mismatches
from megajax.training.guarded.faults import Corruption
from megajax.training.guarded.hooks import Hook
from megajax.training.guarded.phase_timers import INTEGRITY
from megajax.training.program import Program
from megajax.training.session import Run
from megajax.training.state import TrainState

MANTISSA_BIT = 1 << 12
"""A bit of a float32's mantissa: the drill changes a weight by about one part in two thousand."""


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
        if self.cfg.every is not None and self.checked != run.step:
            self(run, run.step)


def state_hash(program: Program) -> StateHash:
    """The hash of this program's state."""
    offload = program.optimizer.cfg.offload
    return StateHash(program.shardings, program.state_like(), program.mesh, offload, program.options)


def mismatch_fields(odd: list[Mismatch], mesh: Mesh) -> dict[str, object]:
    """Fields of the event: the devices that differ most often, their processes, and the first array."""
    devices = [mesh.devices.flat[i] for i in _most_often(odd)]
    return {
        "devices": [device.id for device in devices],
        "processes": sorted({device.process_index for device in devices}),
        "weight": odd[0].path,
        "arrays": len({mismatch.path for mismatch in odd}),
        "copies": odd[0].copies,
    }


def mismatch_message(step: int, odd: list[Mismatch], mesh: Mesh) -> str:
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
    return (
        f"step {step}: the copies of {odd[0].path}{more} differ: {holds} {difference}. Nothing is saved. Test the "
        "machine (python -m megajax.doctor --before-run) or leave it out; the same command resumes from the last "
        "checkpoint"
    )


def _most_often(odd: list[Mismatch]) -> list[int]:
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
