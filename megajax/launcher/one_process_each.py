"""Whether a command that was started alone on several GPUs starts again with one process for each of them."""

import os
from collections.abc import Mapping
from pathlib import Path

from megajax.processes.gpus import CHOSEN, installed_gpus, visible_gpus
from megajax.processes.world import COUNT, RANKS


def gpus_here(environment: Mapping[str, str] = os.environ, devices: Path = Path("/dev")) -> int:
    """The number of GPUs that this process sees and may use. devices: folder of device files."""
    on_cpu = environment.get("JAX_PLATFORMS", "").startswith("cpu")
    return 0 if on_cpu else len(visible_gpus(environment, installed_gpus(devices)))


def processes_to_start(environment: Mapping[str, str] = os.environ, devices: Path = Path("/dev")) -> int | None:
    """The number of GPUs, each of which gets a process; None if the command has a launcher, or fewer than two GPUs.

    Collectives of several GPUs in a process hung where those of one in each did not (docs/launch.md), and a row of
    `megajax.machine.known_faults` is met only by such a process. A number of processes decides too, such as 1.
    """
    launched = any(environment.get(name) for name in (*RANKS, COUNT, CHOSEN))
    gpus = gpus_here(environment, devices)
    return None if launched or gpus < 2 else gpus
