"""Starting and ending a run of many processes, and what they tell each other with a step."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax import Array
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from megajax.mesh.rendezvous import meet
from megajax.mesh.world import World, find_world
from megajax.mesh.xla import CPU_PATIENCE, add_flags

_CONNECT_SECONDS = 60.0
"""Least time for jax to connect processes that are all there."""


def start(*, patience: float = 300.0, settings: str = "") -> World | None:
    """Connect this process with the others of its run, before anything else asks jax for devices.

    Does nothing, and returns None, in a process on its own. patience: seconds for all to be there; settings: what must
    be the same for all, such as a digest of the config. Raises StartError, which says who is missing or what is wrong.
    """
    world = find_world()
    if world is None:
        return None
    # Our own handler agrees with the training loop; the runtime's would swallow SIGTERM from here on.
    jax.config.update("jax_enable_preemption_service", False)
    if _on_cpu():
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        add_flags(CPU_PATIENCE)
    bind = meet(world, patience=patience, settings=settings)
    jax.distributed.initialize(
        world.coordinator,
        world.count,
        world.index,
        local_device_ids=local_devices(world),
        # Its finding of clusters gives every process one device, also where a process has a machine of its own.
        cluster_detection_method="deactivate",
        coordinator_bind_address=bind or None,
        initialization_timeout=int(max(patience, _CONNECT_SECONDS)),
    )
    return world


def finish() -> None:
    """Wait for all processes to come here, then part. To be called when every log is closed.

    Without it the first to leave ends the others.
    """
    if jax.distributed.is_initialized():
        jax.distributed.shutdown()


def local_devices(world: World, environment: Mapping[str, str] = os.environ, devices: Path = Path("/dev")) -> Any:
    """Numbers of the GPUs that are this process's share of its machine, among those it can see; None: all of them.

    All where it is the only process of its machine, where nobody says, where the launcher gave it GPUs of its own, and
    where JAX_LOCAL_DEVICE_IDS says which.
    """
    if world.local_index is None or world.local_count == 1 or environment.get("JAX_LOCAL_DEVICE_IDS"):
        return None
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    there = len(visible.split(",")) if visible else _gpus(devices)
    if world.local_count is None:
        return [world.local_index]
    share = there // world.local_count
    if not share:
        return None
    return list(range(world.local_index * share, (world.local_index + 1) * share))


class StopFlags:
    """What every process says with a step: whether it was asked to stop.

    One int32 for each device, its process's; their maximum, over all devices, is the run's answer.
    """

    def __init__(self, mesh: Mesh):
        self._mesh = mesh
        # Made once: nearly every step carries the same array.
        self._no = self._made(False)

    def __call__(self, asked: bool) -> Array:
        """int32 [devices of the mesh], laid out one for each device."""
        return self._made(True) if asked else self._no

    def _made(self, asked: bool) -> Array:
        return each_process(self._mesh, np.asarray(asked, np.int32))


def each_process(mesh: Mesh, value: np.ndarray) -> Array:
    """[devices of the mesh, ...]: on each device its process's value, of the same shape and dtype in all."""
    sharding = NamedSharding(mesh, PartitionSpec(mesh.axis_names))
    return jax.make_array_from_callback((mesh.size, *value.shape), sharding, lambda _: value[None])


def _on_cpu() -> bool:
    """Whether jax will compute on the CPU; to be known before it looks for devices."""
    return jax.config.jax_platforms == "cpu" or not (jax.config.jax_platforms or _gpus(Path("/dev")))


def _gpus(devices: Path) -> int:
    return len(list(devices.glob("nvidia[0-9]*")))
