"""A Ray cluster, for those who outgrow one machine and have no Slurm or Kubernetes."""

import logging
import os
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import megajax
from megajax.config.errors import UserError
from megajax.config.optional_packages import require
from megajax.mesh.processes.world import split_address

CONNECT_SECONDS = 10.0
"""Limit of the first connection to an address."""
WAIT_SECONDS = 10.0
"""Interval of messages while machines or GPUs are missing."""
PASSED = ("MEGAJAX_", "JAX_", "XLA_", "NCCL_", "HF_", "AWS_", "GOOGLE_", "PYTHON")
"""Beginnings of the names of variables that processes get from the environment of the command."""


def connect_ray(address: str) -> Any:
    """Connect to the cluster at an address, or with `auto` to that of this machine -> the module ray.

    Its workers import MegaJAX from the folder that this process has it in, or else from their own environment.
    Raises UserError.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    ray = require("ray", "--ray", otherwise="remove --ray")
    path = os.pathsep.join(filter(None, [str(Path(megajax.__file__).parents[1]), os.environ.get("PYTHONPATH")]))
    try:
        if (place := split_address(address)) is not None:
            socket.create_connection(place, timeout=CONNECT_SECONDS).close()  # Ray tries for minutes
        ray.init(
            address=address,
            logging_level=logging.ERROR,
            log_to_driver=False,
            runtime_env={"env_vars": {"PYTHONPATH": path}},
        )
    except (OSError, ValueError, RuntimeError) as error:
        reason = str(error).strip().partition("\n")[0]
        raise UserError(
            f"--ray={address}: no connection ({reason}). Start a cluster (ray start --head, and ray start "
            "--address=HOST:PORT on other machines), or give the address of its head"
        ) from error
    return ray


def passed_variables() -> dict[str, str]:
    """Environment variables for processes of the cluster. Ray shows those of a runtime environment, so they go with
    calls: some are credentials."""
    return {name: value for name, value in os.environ.items() if name.startswith(PASSED)}


def waiting_text(ray: Any, resources: Mapping[str, int], count: int) -> str:
    """What processes wait for that the cluster has no room for. resources: of each."""
    have = {name: ray.available_resources().get(name, 0) for name in resources}
    need, free = (", ".join(f"{number:g} {name}" for name, number in part.items()) for part in (resources, have))
    return f"waiting for the cluster: {count} processes need {need} each; {free} are free"
