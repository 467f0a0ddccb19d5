"""The grouped matmul compiled for virtual GPU devices: its kernels, and no storage beside the results."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from megajax.config.errors import UserError
from megajax.kernels.grouped.matmul import grouped_matmul
from megajax.mesh.xla import DEVICELESS, compiler_options
from megajax.planning import virtual_devices as devices
from megajax.planning.virtual_devices import GPUS, Cluster

TARGETS = {"mosaic": "mosaic_gpu_v2", "triton": "__gpu$xla.gpu.triton"}


@pytest.fixture(scope="module", autouse=True)
def compiler() -> None:
    try:
        devices.prepare()
    except UserError as error:
        pytest.skip(str(error).splitlines()[0])


SMALL = (4096, 8, 1024, 768)
"""Rows, groups, inner and outer size."""
SHAPES = {
    "DeepSeek-V3, 32 experts a device": (262144, 32, 7168, 2048),
    "Qwen3-30B-A3B": (65536, 128, 2048, 768),
    "sides that blocks don't divide": (4096, 8, 2880, 1408),
    "more elements than 32 bits count": (524288, 8, 7168, 256),
}
CASES = [
    ("h100", "mosaic", SMALL),
    ("a100-80gb", "triton", SMALL),
    *(
        pytest.param(gpu, kernel, shape, marks=pytest.mark.slow)
        for gpu, kernel in (("h100", "mosaic"), ("h100", "triton"), ("a100-80gb", "triton"), ("b200", "triton"))
        for shape in SHAPES.values()
    ),
]


@pytest.mark.parametrize(("gpu", "kernel", "shape"), CASES)
def test_three_kernels_and_no_temporary_arrays(gpu: str, kernel: str, shape: tuple[int, int, int, int]) -> None:
    """Result and both gradients; the compiler refuses a kernel whose blocks don't fit the GPU's shared memory."""
    rows, groups, inner, outer = shape
    mesh = Mesh(np.array(devices.virtual_devices(Cluster(GPUS[gpu], 1, 8))), ("data",))
    shapes = (rows, inner), (groups, inner, outer), (rows, outer)
    replicated = NamedSharding(mesh, P())
    arrays = [jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=replicated) for shape in shapes]

    def gradients(x, w, dy, sizes):
        y, pullback = jax.vjp(lambda x, w: grouped_matmul(x, w, sizes, kernel), x, w)
        return y, *pullback(dy)

    with jax.set_mesh(mesh):
        island = jax.shard_map(gradients, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False)
        lowered = jax.jit(island).lower(*arrays, jax.ShapeDtypeStruct((groups,), jnp.int32, sharding=replicated))
        program = lowered.compile(compiler_options=compiler_options(*DEVICELESS))
    targets = re.findall(r'custom_call_target="([^"]{1,40})"', program.as_text())
    assert targets == [TARGETS[kernel]] * 3
    assert program.memory_analysis().temp_size_in_bytes < 2**20
