"""Single functions compiled for a virtual GPU: their kernels and temporary memory. Needs the extra aot, and no GPU."""

import re
from collections import Counter
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from megajax.planning.compiled import devices as devices
from megajax.planning.compiled.devices import GPUS, Cluster
from megajax.processes.xla_options import DEVICELESS, compiler_options

CALLS = re.compile(r'custom_call_target="([^"]+)"')


def compile_for(gpu: str, function: Callable, *arrays: Any, options: tuple = ()) -> Any:
    """The program of a function for one virtual GPU. `arrays`: trees of jax.ShapeDtypeStruct.

    Raises UserError without the extra aot.
    """
    devices.prepare()
    mesh = Mesh(np.array(devices.virtual_devices(Cluster(GPUS[gpu], 1, 1))), ("data",))
    sharding = NamedSharding(mesh, PartitionSpec())
    like = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding), arrays)
    with jax.set_mesh(mesh):
        return jax.jit(function).lower(*like).compile(compiler_options=compiler_options(*options, *DEVICELESS))


def kernels(program: Any) -> dict[str, int]:
    """Target of a custom call -> number of calls."""
    return dict(Counter(CALLS.findall(program.as_text())).most_common())


def temporary_mib(program: Any) -> float:
    """MiB of temporary memory by the compiler's plan."""
    return round(program.memory_analysis().temp_size_in_bytes / 2**20, 3)
