"""GPUs that are not there, as jax devices: what must be installed and set before jax is imported, and the devices."""

import os
from importlib.util import find_spec
from typing import Any

from megajax.config.builds import resolve
from megajax.config.errors import UserError
from megajax.config.missing import install
from megajax.planning.program.devices import Cluster

PLUGINS = ("jax_cuda12_plugin", "jax_cuda13_plugin")


def missing() -> list[str]:
    """Of the compiler for GPUs and cuDNN, what is not installed."""
    needed = (("the CUDA plugin of jax", _plugin()), ("cuDNN", _found("nvidia.cudnn")))
    return [name for name, found in needed if not found]


def prepare() -> None:
    """Set what jax reads at its import. Raises UserError where the compiler for GPUs, or cuDNN, is not installed."""
    absent = missing()
    if absent:
        raise UserError(
            f"compiling for GPUs that are not there needs {' and '.join(absent)}. Install the extra aot: "
            f"{install('aot')}"
        )
    os.environ["JAX_PLATFORMS"] = "cpu"  # or jax reports at length that it finds no GPU
    os.environ["JAX_SKIP_CUDA_CONSTRAINTS_CHECK"] = "1"


def devices(cluster: Cluster) -> list[Any]:
    """Devices that programs can be compiled for, node by node."""
    topology = resolve("jax.experimental.topologies:get_topology_desc")(
        topology_name=cluster.name,
        platform="cuda",
        target_config=cluster.gpu.target_config(),
        topology=cluster.topology(),
    )
    return list(topology.devices[: cluster.devices])


def _plugin() -> bool:
    return any(_found(name) for name in PLUGINS)


def _found(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:  # of the package around it
        return False
