"""The pool of pinned host memory of a process on GPUs, which XLA ends at 64 GiB, and what offloading needs of it.

Imports no jax: the limit is read when jax's devices start, so `python -m megajax.train` sets it before.
"""

import os
from collections.abc import Mapping, MutableMapping
from math import ceil

from megajax.config.dump import flatten
from megajax.config.errors import ConfigError, Problem, UserError
from megajax.models.memory import saved_bytes
from megajax.planning.compiled.devices import GIB, GPUS
from megajax.planning.cost.description import describe
from megajax.planning.cost.memory import footprint
from megajax.training.run_config import RunConfig

LIMIT, DEFAULT_GIB = "XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB", 64
ROOM, STAGING_GIB = 1.25, 4
"""Factor on what is offloaded, for gaps between buffers; GiB through which checkpoints and rows are copied."""
CPU_MEMORY_SHARE = 0.9
"""Share of the machine's memory that may be pinned."""


def offloaded_bytes(cfg: RunConfig, devices: int) -> float:
    """Bytes in host memory of one of so many devices; 0 for a config whose memory has no formulas."""
    try:
        run = describe(cfg, GPUS["h100"], devices)
        moments = cfg.optimizer.offload * run.moment_bytes * footprint(run).updated
    except UserError:
        return 0.0
    saved = (
        part.layers * part.host
        for tower in run.towers
        for part in saved_bytes(tower.section.recomputing, tower.blocks, tower.share, tower.held_rows)
    )
    return sum(saved) * run.schedule.slots + moments


def pool_gib(cfg: RunConfig, gpus: int, devices: int) -> int:
    """GiB that the pool of a process with so many of the devices needs; 0 if nothing is offloaded."""
    offloads = any(value for name, value in flatten(cfg).items() if name.endswith("offload"))
    needed = offloaded_bytes(cfg, devices) if offloads and gpus else 0.0
    return ceil(ROOM * gpus * needed / GIB) + STAGING_GIB if needed else 0


def limit_gib(environment: Mapping[str, str] = os.environ) -> int:
    """The limit in force in this process."""
    text = environment.get(LIMIT, "")
    return int(text) if text.isdigit() else DEFAULT_GIB


def set_limit(cfg: RunConfig, *, gpus: int, processes: int, environment: MutableMapping[str, str] = os.environ) -> None:
    """Raises the limit for what the config offloads, before jax starts. gpus: those that this process sees.

    A limit that the user has set stays, and `demand_pool` compares it. The limit reserves nothing, so it is that of the
    fewest devices that the run may have, and of all GPUs that the processes of a machine may have to divide.
    """
    needed = pool_gib(cfg, gpus, max(gpus, processes))
    if LIMIT not in environment and needed > DEFAULT_GIB:
        environment[LIMIT] = str(needed)


def demand_pool(cfg: RunConfig, gpus: int, devices: int, memory: float | None = None) -> None:
    """Raises ConfigError if what this process's GPUs offload does not fit the pool or the machine's memory.

    memory: bytes of the machine; None: of this one.
    """
    needed, limit = pool_gib(cfg, gpus, devices), limit_gib()
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") if memory is None else memory
    available = int(CPU_MEMORY_SHARE * memory / GIB)
    setting = "optimizer.offload" if cfg.optimizer.offload else "model.offload"
    if needed > available:
        text = f"{gpus} GPUs of a process need {needed} GiB of host memory, and {available} GiB may be pinned here"
        raise ConfigError([Problem(setting, text, "offload less, or shard the layers over more devices")])
    if needed > limit:
        text = f"{gpus} GPUs of a process need a pool of {needed} GiB of pinned host memory, and its limit is {limit}"
        raise ConfigError([Problem(setting, text, f"start the process with {LIMIT}={needed}, or offload less")])
