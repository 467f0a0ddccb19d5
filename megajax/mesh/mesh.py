"""Building the mesh, and asking the one that surrounds the code being traced."""

import warnings
from collections.abc import Sequence
from dataclasses import replace

import jax
from jax.sharding import AxisType, Mesh

from megajax.config.errors import ConfigError, UserError
from megajax.config.missing import install
from megajax.mesh.config import MESH_AXES, ParallelConfig
from megajax.mesh.installation import look


def build_mesh(cfg: ParallelConfig, devices: Sequence[jax.Device] | None = None) -> Mesh:
    """The five-axis mesh over `devices` (default: all of them); size-1 axes are kept so that no layout is special.

    A single process may use fewer devices than there are. Raises ConfigError when the sizes don't fit the devices.
    """
    devices = list(jax.devices() if devices is None else devices)
    found = cfg.problems() or cfg.device_problems(len(devices))
    if found:
        raise ConfigError([replace(problem, where=f"parallel.{problem.where}".rstrip(".")) for problem in found])
    sizes = cfg.sizes(len(devices))
    wanted = cfg.without_data() * sizes["data"]
    if wanted < len(devices) and jax.process_count() > 1:
        raise UserError(
            f"parallel uses {wanted} of {len(devices)} devices; with several processes every device must be "
            "used: set parallel.data=none or make the sizes multiply to the number of devices"
        )
    return jax.make_mesh(
        tuple(sizes.values()), MESH_AXES, axis_types=(AxisType.Auto,) * len(MESH_AXES), devices=devices[:wanted]
    )


def find_devices() -> list[jax.Device]:
    """All devices jax finds. Raises UserError where those that were asked for are not there.

    Warns where jax has fallen back on the CPU of a machine with GPUs.
    """
    try:
        devices = jax.devices()
    except (RuntimeError, AssertionError) as error:
        wanted, faults = jax.config.jax_platforms or "default", look().faults()
        raise UserError(
            f"jax finds no {wanted} devices: {str(error) or 'the platform is not installed'}\n"
            + "\n".join(faults or [f"For NVIDIA GPUs install the extra cuda12 or cuda13: {install('cuda12')}."])
            + "\nWithout --devices it takes what it finds."
        ) from error
    if devices[0].platform == "cpu" and not jax.config.jax_platforms and (found := look()).gpus:
        warnings.warn(
            "training on the CPU: " + "\n".join(found.faults() or ["jax does not see the GPUs"]), stacklevel=2
        )
    return devices


def free_axes() -> dict[str, int]:
    """Mesh axis -> size of the surrounding mesh (`jax.set_mesh`), without the axes that are already manual here.

    Empty without a mesh. Read while tracing, so that one layer serves a plain `jax.jit` and the step's shard_map.
    """
    mesh = jax.sharding.get_abstract_mesh()
    manual = () if mesh.empty else mesh.manual_axes
    return {name: size for name, size in mesh.shape.items() if name not in manual}


def manual_axes() -> dict[str, int]:
    """Mesh axis -> size of the axes that are manual where this is traced."""
    mesh = jax.sharding.get_abstract_mesh()
    return {} if mesh.empty else {name: mesh.shape[name] for name in mesh.manual_axes}
