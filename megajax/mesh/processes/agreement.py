"""Connecting and disconnecting the processes of a run, and the stop flags they exchange in a step."""

import os
from collections.abc import Callable
from pathlib import Path

import jax
import numpy as np
from jax import Array
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from megajax.mesh.processes.gpus import GpuClaim, installed_gpus, set_nccl_variables, visible_gpus
from megajax.mesh.processes.identity import Identity
from megajax.mesh.processes.rendezvous import meet
from megajax.mesh.processes.world import World, find_world
from megajax.mesh.xla_options import CPU_PATIENCE, add_flags

_CONNECT_SECONDS = 60.0
"""Minimum time for jax to connect processes that have all started."""


def start(
    *, patience: float = 300.0, identity: Callable[[], Identity] = dict, devices: Path = Path("/dev")
) -> World | None:
    """Connects this process with the others of its run. Call it before any other use of jax's devices.

    Returns None for a single process. patience: timeout in seconds for all processes to start. identity: returns
    what must be equal in all processes. devices: folder of device files. Raises StartError, which names missing
    processes, and those that differ.
    """
    world, visible = find_world(), visible_gpus(os.environ, installed_gpus(devices))
    on_cpu = jax.config.jax_platforms == "cpu" or not (jax.config.jax_platforms or visible)
    visible = () if on_cpu else visible
    if world is None:
        set_nccl_variables(len(visible), processes=1)
        return None
    # MegaJAX handles SIGTERM itself; the runtime's handler would replace it.
    jax.config.update("jax_enable_preemption_service", False)
    if on_cpu:
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        add_flags(CPU_PATIENCE)
    claim = GpuClaim.of(world, visible)
    place = meet(world, claim, patience=patience, identity=identity())
    set_nccl_variables(len(claim.gpus if place.gpus is None else place.gpus), processes=world.count)
    jax.distributed.initialize(
        world.coordinator,
        world.count,
        world.index,
        local_device_ids=place.gpus,
        # jax's cluster detection gives every process one device, even if it is the only process of its machine.
        cluster_detection_method="deactivate",
        coordinator_bind_address=place.bind or None,
        initialization_timeout=int(max(patience, _CONNECT_SECONDS)),
    )
    return world


def finish() -> None:
    """Waits for all processes, then disconnects them. Call it after closing all logs.

    Otherwise the first process to exit terminates the others.
    """
    if jax.distributed.is_initialized():
        jax.distributed.shutdown()


class StopFlags:
    """The flags that tell all processes, within a step, whether one of them was asked to stop.

    One int32 per device; the run stops if the maximum over all devices is 1.
    """

    def __init__(self, mesh: Mesh):
        self._mesh = mesh
        # Created once, because nearly all steps use the same array.
        self._no = self._flags(False)

    def __call__(self, stop_requested: bool) -> Array:
        """int32 [devices of the mesh], one element on each device."""
        return self._flags(True) if stop_requested else self._no

    def _flags(self, stop_requested: bool) -> Array:
        return each_process(self._mesh, np.asarray(stop_requested, np.int32))


def each_process(mesh: Mesh, value: np.ndarray) -> Array:
    """[devices of the mesh, ...]: each device has the value of its process; all have the same shape and dtype."""
    sharding = NamedSharding(mesh, PartitionSpec(mesh.axis_names))
    return jax.make_array_from_callback((mesh.size, *value.shape), sharding, lambda _: value[None])
