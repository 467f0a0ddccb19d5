"""Attention compiled for virtual GPU devices: the kernels its programs call, and that none stores the scores."""

import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from megajax.config.errors import UserError
from megajax.kernels.attention.attention import Mask, attend, reference_attention
from megajax.mesh.xla import DEVICELESS, compiler_options
from megajax.planning import virtual_devices as devices
from megajax.planning.virtual_devices import GPUS, Cluster

LENGTH, HEADS, GROUPS = 2048, 4, 2
SCORES = LENGTH * LENGTH * 2
"""Bytes of the scores of one head, in 16 bits."""


@pytest.fixture(scope="module", autouse=True)
def compiler() -> None:
    try:
        devices.prepare()
    except UserError as error:
        pytest.skip(str(error).splitlines()[0])


def compiled(gpu: str, kernel: str, *, size: int = 64, wide: int = 64, groups: int = GROUPS, **rest):
    """Kernels of attention's gradient on this GPU, and its temporary bytes beside queries, keys, values and results."""
    mesh = Mesh(np.array(devices.virtual_devices(Cluster(GPUS[gpu], 1, 8))), ("data",))
    documents, keys = rest.pop("documents", False) or rest.get("padded", False), rest.pop("keys", LENGTH)
    sizes = (LENGTH, HEADS, size), (keys, groups, size), (keys, groups, wide), (LENGTH, HEADS, wide)
    shapes = [(1, *dimensions) for dimensions in sizes]
    replicated = NamedSharding(mesh, P())
    arrays = [jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=replicated) for shape in shapes]
    segments = [jax.ShapeDtypeStruct((1, length), jnp.int32, sharding=replicated) for length in (LENGTH, keys)]
    attention = reference_attention if kernel == "reference" else partial(attend, kernel)

    def gradients(q, k, v, dout, segments):
        mask = Mask(jnp.arange(LENGTH), jnp.arange(keys), *(segments if documents else [None] * 2), **rest)
        out, pullback = jax.vjp(lambda q, k, v: attention(q, k, v, mask, scale=0.1), q, k, v)
        return out, pullback(dout)

    with jax.set_mesh(mesh):
        island = jax.shard_map(gradients, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False)
        program = jax.jit(island).lower(*arrays, segments).compile(compiler_options=compiler_options(*DEVICELESS))
    targets = re.findall(r'custom_call_target="(__cudnn\$fmha\w+|__gpu\$xla.gpu.triton)"', program.as_text())
    return sorted(targets), program.memory_analysis().temp_size_in_bytes


FUSED = ["__cudnn$fmhaSoftmax", "__cudnn$fmhaSoftmaxBackward"]
TRITON = "__gpu$xla.gpu.triton"
CASES = {
    "plain": {"groups": HEADS},
    "grouped": {},
    "windowed": {"window": 128},
    "of 192 with values of 128": {"size": 192, "wide": 128},
    "documents": {"documents": True},
    "full": {"causal": False},
    "padded": {"causal": False, "padded": True},
    "padded, causal": {"padded": True},
    "across": {"causal": False, "keys": LENGTH // 2},
    "across, padded": {"causal": False, "padded": True, "keys": LENGTH // 2},
}


@pytest.mark.parametrize(
    "case", [*list(CASES)[:5], *(pytest.param(c, marks=pytest.mark.slow) for c in list(CASES)[5:-1]), list(CASES)[-1]]
)
def test_an_h100_calls_cudnn_and_stores_no_scores(case: str) -> None:
    targets, temporary = compiled("h100", "cudnn", **CASES[case])
    assert [target for target in targets if target != TRITON] == FUSED
    # Rows with too many documents, or with padding before their end, have kernels of their own beside cuDNN's.
    assert targets.count(TRITON) == (3 if {"documents", "padded"} & set(CASES[case]) else 0)
    expected = LENGTH * HEADS * (2 * CASES[case].get("wide", 64) + 4)
    assert temporary < expected + SCORES // 2, "the residuals, and less than half the scores of a head"


def test_the_reference_and_the_mask_store_scores() -> None:
    assert compiled("h100", "reference")[1] > HEADS * SCORES
    targets, temporary = compiled("h100", "cudnn_mask", documents=True)
    assert targets == ["__cudnn$fmhaScaleBiasSoftmax", "__cudnn$fmhaScaleBiasSoftmaxBackward"]
    assert SCORES <= temporary < 2 * SCORES


SIZES = [(16, 16), (64, 64), (80, 80), (96, 96), (128, 128), (192, 128), (256, 256)]
FIRST = [("a100-80gb", 256, 256), ("h100", 192, 128)]
SLOW = [(gpu, *sizes) for gpu in ("a100-80gb", "h100", "b200") for sizes in SIZES if (gpu, *sizes) not in FIRST]


@pytest.mark.parametrize(("gpu", "size", "wide"), [*FIRST, *(pytest.param(*c, marks=pytest.mark.slow) for c in SLOW)])
def test_the_pallas_kernels_compile_within_shared_memory(gpu: str, size: int, wide: int) -> None:
    """The compiler refuses a kernel whose tiles don't fit the GPU's shared memory."""
    targets, temporary = compiled(gpu, "pallas", size=size, wide=wide, documents=True, window=256)
    assert targets == [TRITON] * 3
    assert temporary < SCORES // 4
