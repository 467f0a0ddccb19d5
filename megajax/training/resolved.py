"""Settings that fit the devices of a run: what `megajax.planning.resolve` makes before anything is built."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from jax.sharding import Mesh

from megajax.config.compose import demand_fit
from megajax.config.dump import flatten
from megajax.kernels.attention.capability import KernelChoice
from megajax.mesh.config import BATCH_AXES, ParallelConfig, devices_over
from megajax.mesh.mesh import build_mesh, find_devices
from megajax.processes.xla_options import Value
from megajax.training.replan import Replan
from megajax.training.run_config import RunConfig
from megajax.training.step import StepScheduler


@dataclass(frozen=True)
class Resolved:
    """Settings that fit their devices, and what follows from both. What is built from it checks no settings again."""

    cfg: RunConfig
    mesh: Mesh
    options: Mapping[str, Value]
    """Compiler options of every program."""
    kernels: tuple[KernelChoice[str], ...] = ()
    """The kernel of each block of the model's pattern; () for a model that does not choose kernels."""
    replan: Replan | None = None
    """How parallel.elastic changed the layout; `cfg` is the result. None without parallel.elastic."""
    scheduler: StepScheduler | None = None
    """Compiles the train step with the times of a cost model; None: XLA schedules it by its own."""

    @cached_property
    def settings(self) -> Mapping[str, Any]:
        """The values of `cfg` by dotted name."""
        return flatten(self.cfg)

    @property
    def replicas(self) -> int:
        """Number of data-parallel devices."""
        return devices_over(self.mesh.shape, BATCH_AXES)


def fitting_mesh(cfg: object, parallel: ParallelConfig) -> Mesh:
    """The mesh of all devices for settings of any class. Raises ConfigError if they don't fit."""
    devices = find_devices()
    demand_fit(cfg, len(devices))
    return build_mesh(parallel, devices)
