"""Resolves the settings of a run on the present devices, once, before anything is built."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
from jax.sharding import Mesh

from megajax.config.compose import demand_fit
from megajax.config.dump import flatten
from megajax.config.errors import ConfigError
from megajax.kernels.attention.capability import Choice, Device
from megajax.mesh.config import BATCH_AXES, ParallelConfig, devices_over
from megajax.mesh.mesh import build_mesh, devices_per_process, find_devices
from megajax.mesh.xla_options import Value
from megajax.training.check_compiler_options import run_options
from megajax.training.elastic.replan import Replan, elastic_hint, replanned
from megajax.training.program import demand_kernels
from megajax.training.run_config import RunConfig


@dataclass(frozen=True)
class Resolved:
    """Settings that fit their devices, and what follows from both. What is built from it checks no settings again."""

    cfg: RunConfig
    mesh: Mesh
    options: Mapping[str, Value]
    """Compiler options of every program."""
    kernels: tuple[Choice[str], ...] = ()
    """The kernel of each block of the model's pattern; () for a model that does not choose kernels."""
    replan: Replan | None = None
    """How parallel.elastic changed the layout; `cfg` is the result. None without parallel.elastic."""

    @cached_property
    def settings(self) -> Mapping[str, Any]:
        """The values of `cfg` by dotted name."""
        return flatten(self.cfg)

    @property
    def replicas(self) -> int:
        """Number of data-parallel devices."""
        return devices_over(self.mesh.shape, BATCH_AXES)


def resolve(
    cfg: RunConfig,
    devices: Sequence[jax.Device] | None = None,
    *,
    device: Device | None = None,
    may_replan: bool = True,
) -> Resolved:
    """The settings on these devices (default: all), with another layout if parallel.elastic needs one.

    `cfg` has passed the checks that need no devices. device: the one that kernels are chosen for; None: the first local
    one. may_replan: False in evaluations and plans, which keep the layout. Raises ConfigError for settings that don't
    fit the devices or that the compiler refuses, UserError for a kernel that the devices lack.
    """
    devices, replan = find_devices() if devices is None else devices, None
    try:
        demand_fit(cfg, len(devices))
        if cfg.parallel.elastic and may_replan:
            replan = replanned(cfg, devices_per_process(devices))
            cfg = replan.cfg
        mesh = build_mesh(cfg.parallel, devices)
    except ConfigError as error:
        raise (elastic_hint(error, cfg, devices_per_process(devices)) if may_replan else error) from None
    kernels = demand_kernels(cfg, device)
    return Resolved(cfg, mesh, run_options(cfg, mesh), kernels, replan)


def fitting_mesh(cfg: Any, parallel: ParallelConfig) -> Mesh:
    """The mesh of all devices for settings of any class. Raises ConfigError if they don't fit."""
    devices = find_devices()
    demand_fit(cfg, len(devices))
    return build_mesh(parallel, devices)
