"""Building the mesh, and reading the mesh that surrounds the traced code."""

import warnings
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from math import prod

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

from megajax.config.compose import problems_of
from megajax.config.errors import ConfigError, Problem, UserError
from megajax.config.optional_packages import install
from megajax.mesh.config import MESH_AXES, ParallelConfig, devices_over
from megajax.processes.installation import find_installation


def build_mesh(cfg: ParallelConfig, devices: Sequence[jax.Device] | None = None) -> Mesh:
    """The mesh over `devices` (default: all). Axes of size 1 are kept, so that all layouts are alike.

    It may use a part of the devices, at least one per process. Raises ConfigError if the sizes don't fit the devices.
    """
    devices = list(jax.devices() if devices is None else devices)
    problems = problems_of(cfg) or cfg.device_problems(len(devices))
    if problems:
        raise ConfigError([replace(problem, setting=f"parallel.{problem.setting}".rstrip(".")) for problem in problems])
    sizes = tuple(cfg.sizes(len(devices)).values())
    return jax.make_mesh(
        sizes,
        MESH_AXES,
        axis_types=(AxisType.Auto,) * len(MESH_AXES),
        devices=select_devices(devices, prod(sizes), cfg.tensor),
    )


def devices_per_process(devices: Sequence[jax.Device]) -> tuple[int, ...]:
    """Number of these devices in each process, in the order of the processes."""
    counts = Counter(device.process_index for device in devices)
    return tuple(counts[index] for index in sorted(counts))


def select_devices(devices: Sequence[jax.Device], used: int, neighbours: int = 1) -> list[jax.Device]:
    """Selects `used` devices in their order, as evenly over processes as possible, at least one per process.

    neighbours: number of devices taken from a process at a time, if possible. Raises ConfigError for fewer devices than
    processes: a process without a device in the mesh could not take part in the run.
    """
    owned: dict[int, list[jax.Device]] = {}
    for device in devices:
        owned.setdefault(device.process_index, []).append(device)
    if used < len(owned):
        message = f"the axes multiply to {used} devices, and each of the {len(owned)} processes needs one of its own"
        hint = "start fewer processes, set parallel.data=none or make the sizes multiply to the number of devices"
        raise ConfigError([Problem("parallel", message, hint)])
    for unit in (neighbours, 1):
        counts = dict.fromkeys(owned, 0)
        while (remaining := used - sum(counts.values())) >= unit:
            room = [index for index, local in owned.items() if len(local) - counts[index] >= unit]
            if not room:
                break
            counts[min(room, key=counts.__getitem__)] += unit
        if not remaining and all(counts.values()):
            break
    return [device for index, local in owned.items() for device in local[: counts[index]]]


def rotated_mesh(mesh: Mesh, axes: Sequence[str]) -> Mesh:
    """The mesh with its devices rotated by one place along neighbouring axes, which count as one.

    Each device takes the place of the one before it.
    """
    devices = np.roll(merged(mesh.devices, mesh.axis_names, axes), -1, mesh.axis_names.index(axes[0]))
    return Mesh(devices.reshape(mesh.devices.shape), mesh.axis_names, axis_types=mesh.axis_types)


def merged(array: np.ndarray, names: Sequence[str], axes: Sequence[str]) -> np.ndarray:
    """The array with one dimension for neighbouring axes. names: the axes of its first dimensions."""
    first = names.index(axes[0])
    if tuple(names[first : first + len(axes)]) != tuple(axes):
        raise ValueError(f"{tuple(axes)} are not neighbours in {tuple(names)}")
    return array.reshape(*array.shape[:first], -1, *array.shape[first + len(axes) :])


def find_devices() -> list[jax.Device]:
    """All devices that jax finds. Raises UserError if the requested platform has none.

    Warns if jax falls back to the CPU on a machine with GPUs.
    """
    try:
        devices = jax.devices()
    except (RuntimeError, AssertionError) as error:
        platform, faults = jax.config.jax_platforms or "default", find_installation().faults()
        raise UserError(
            f"jax finds no {platform} devices: {str(error) or 'the platform is not installed'}\n"
            + "\n".join(faults or [f"For NVIDIA GPUs install the extra cuda12 or cuda13: {install('cuda12')}."])
            + "\nWithout --devices jax chooses the platform."
        ) from error
    if devices[0].platform == "cpu" and not jax.config.jax_platforms and (installation := find_installation()).gpus:
        reasons = installation.faults() or ["jax does not see the GPUs"]
        warnings.warn("training on the CPU: " + "\n".join(reasons), stacklevel=2)
    return devices


def free_axes() -> dict[str, int]:
    """Mesh axis -> size, of the axes of the surrounding mesh (`jax.set_mesh`) that are not manual.

    Empty without a mesh. Read while tracing, so the same layer works under plain `jax.jit` and in the step's shard_map.
    """
    mesh = jax.sharding.get_abstract_mesh()
    manual = () if mesh.empty else mesh.manual_axes
    return {name: size for name, size in mesh.shape.items() if name not in manual}


def devices_along(axes: Sequence[str]) -> int:
    """Number of devices along these axes of the surrounding mesh, manual or free."""
    return devices_over({**free_axes(), **manual_axes()}, axes)


def manual_axes() -> dict[str, int]:
    """Mesh axis -> size, of the axes of the surrounding mesh that are manual."""
    mesh = jax.sharding.get_abstract_mesh()
    return {} if mesh.empty else {name: mesh.shape[name] for name in mesh.manual_axes}
