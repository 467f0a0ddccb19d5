"""Resolves the settings of a run on the present devices, once, before anything is built."""

from collections.abc import Sequence
from dataclasses import replace

import jax

from megajax.config.compose import demand_fit
from megajax.config.errors import ConfigError
from megajax.data.chat.choose_template import with_template
from megajax.kernels.attention.request import KernelDevice
from megajax.mesh.mesh import build_mesh, devices_per_process, find_devices
from megajax.planning.compiled.scheduled_step import CostScheduler
from megajax.planning.host_pool import demand_pool
from megajax.planning.replan import elastic_hint, replanned
from megajax.training.check_compiler_options import run_options
from megajax.training.program import demand_kernels
from megajax.training.resolved import Resolved
from megajax.training.run_config import RunConfig


def resolve(
    cfg: RunConfig,
    devices: Sequence[jax.Device] | None = None,
    *,
    device: KernelDevice | None = None,
    may_replan: bool = True,
) -> Resolved:
    """The settings on these devices (default: all), with another layout if parallel.elastic needs one.

    `cfg` has passed the checks that need no devices. device: the one that kernels are chosen for; None: the first local
    one. may_replan: False in evaluations and plans, which keep the layout. Raises ConfigError for settings that don't
    fit the devices or that the compiler refuses, UserError for a kernel that the devices lack, and for a folder without
    a chat template.
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
    own_gpus = sum(x.platform == "gpu" and x.process_index == jax.process_index() for x in devices)
    demand_pool(cfg, own_gpus, len(devices))
    kernels = demand_kernels(cfg, device)
    sets = {name: with_template(data, cfg.tokenizer) for name, data in cfg.evaluation.sets.items()}
    cfg = replace(cfg, data=with_template(cfg.data, cfg.tokenizer), evaluation=replace(cfg.evaluation, sets=sets))
    return Resolved(cfg, mesh, run_options(cfg, mesh), kernels, replan, CostScheduler.of(cfg, mesh))
