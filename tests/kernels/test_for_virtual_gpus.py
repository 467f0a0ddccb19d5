"""Kernels compiled for virtual GPUs: the calls of their programs, and that none stores or copies large arrays."""

import multiprocessing
import re
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from megajax.kernels.attention.attention import OUTPUT, STATISTICS, Mask, attend, reference_attention
from megajax.kernels.grouped.matmul import code_products, grouped_matmul
from megajax.kernels.paged.pools import PagedQueries, Pools
from megajax.kernels.paged.triton import paged_attention
from megajax.planning.compiled.devices import GPUS, Cluster, virtual_devices
from megajax.precision.blocks import ELEMENTS
from megajax.processes.xla_options import DEVICELESS, GPU, compiler_options

pytestmark = pytest.mark.aot
SLOW = pytest.mark.slow
TRITON, MOSAIC = "__gpu$xla.gpu.triton", "mosaic_gpu_v2"
FUSED = ["__cudnn$fmhaSoftmax", "__cudnn$fmhaSoftmaxBackward"]


def like(shape: tuple[int, ...], dtype: Any = jnp.bfloat16) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def compiled(gpu: str, function: Callable, *arguments: Any) -> tuple[list[str], Any]:
    """Targets of the program's calls, and its memory, of a function of whole arrays on one of these GPUs.

    The compiler refuses a kernel whose tiles don't fit the GPU's shared memory.
    """
    mesh = Mesh(np.array(virtual_devices(Cluster(GPUS[gpu], 1, 8))), ("data",))
    whole = NamedSharding(mesh, P())
    arguments = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=whole), arguments)
    with jax.set_mesh(mesh):
        island = jax.shard_map(function, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False)
        program = jax.jit(island).lower(*arguments).compile(compiler_options=compiler_options(*GPU, *DEVICELESS))
    targets = re.findall(r'custom_call_target="([^"]{1,40})"', program.as_text())
    return sorted(targets), program.memory_analysis()


LENGTH, HEADS, GROUPS = 2048, 4, 2
SCORES = LENGTH * LENGTH * 2
"""Bytes of the scores of one head, in 16 bits."""


def attention(gpu: str, kernel: str, *, size: int = 64, wide: int = 64, groups: int = GROUPS, **rest: Any):
    """Kernels of attention's gradient on this GPU, and its temporary bytes beside queries, keys, values and results."""
    documents, keys = rest.pop("documents", False) or rest.get("padded", False), rest.pop("keys", LENGTH)
    sizes = (LENGTH, HEADS, size), (keys, groups, size), (keys, groups, wide), (LENGTH, HEADS, wide)
    segments = [like((1, length), jnp.int32) for length in (LENGTH, keys)]
    function = reference_attention if kernel == "reference" else partial(attend, kernel)

    def gradients(q, k, v, dout, segments):
        mask = Mask(jnp.arange(LENGTH), jnp.arange(keys), *(segments if documents else [None] * 2), **rest)
        out, pullback = jax.vjp(lambda q, k, v: function(q, k, v, mask, scale=0.1), q, k, v)
        return out, pullback(dout)

    targets, memory = compiled(gpu, gradients, *(like((1, *dimensions)) for dimensions in sizes), segments)
    return [target for target in targets if "fmha" in target or target == TRITON], memory.temp_size_in_bytes


CASES = {
    "plain": {"groups": HEADS},
    "grouped, windowed": {"window": 128},
    "of 192 with values of 128": {"size": 192, "wide": 128},
    "documents": {"documents": True},
    "across, padded": {"causal": False, "padded": True, "keys": LENGTH // 2},
    "padded, causal": {"padded": True},
}


@pytest.mark.parametrize("case", [c if n < 5 else pytest.param(c, marks=SLOW) for n, c in enumerate(CASES)])
def test_an_h100_calls_cudnn_and_stores_no_scores(case: str) -> None:
    targets, temporary = attention("h100", "cudnn", **CASES[case])
    assert [target for target in targets if target != TRITON] == FUSED
    # Rows with too many documents, or with padding before their end, have kernels of their own beside cuDNN's.
    assert targets.count(TRITON) == (3 if {"documents", "padded"} & set(CASES[case]) else 0)
    expected = LENGTH * HEADS * (2 * CASES[case].get("wide", 64) + 4)
    assert temporary < expected + SCORES // 2, "the residuals, and less than half the scores of a head"


def test_the_reference_and_the_mask_store_scores() -> None:
    assert attention("h100", "reference")[1] > HEADS * SCORES
    targets, temporary = attention("h100", "cudnn_mask", documents=True)
    assert targets == ["__cudnn$fmhaScaleBiasSoftmax", "__cudnn$fmhaScaleBiasSoftmaxBackward"]
    assert SCORES <= temporary < 2 * SCORES


@pytest.mark.slow
def test_the_pallas_kernels_leave_the_saved_outputs_of_all_layers_where_they_are() -> None:
    layers, width = 128, HEADS * 64
    index = jnp.arange(LENGTH)

    def gradients(x: jax.Array, weights: jax.Array) -> jax.Array:
        def layer(x: jax.Array, weight: jax.Array) -> tuple[jax.Array, None]:
            q = jnp.einsum("bsd,dnh->bsnh", x, weight)
            out = attend("pallas", q, 2 * q, jnp.sin(q), Mask(index, index, None, None), scale=0.1)
            return x + jnp.einsum("bsnh,dnh->bsd", out, weight), None

        policy = jax.checkpoint_policies.save_only_these_names(OUTPUT, STATISTICS)
        layer = jax.checkpoint(layer, policy=policy, prevent_cse=False)
        return jax.grad(lambda x: jax.lax.scan(layer, x, weights)[0].astype(jnp.float32).sum())(x)

    _, memory = compiled("h100", gradients, like((1, LENGTH, width)), like((layers, width, HEADS, 64)))
    saved = layers * LENGTH * width * 2  # inputs of layers, and outputs
    assert memory.temp_size_in_bytes < 2.5 * saved


@pytest.mark.parametrize(
    ("gpu", "size", "wide"),
    [
        ("a100-80gb", 256, 256),
        ("h100", 192, 128),
        # The largest size on every GPU.
        *(
            pytest.param(gpu, size, wide, marks=SLOW)
            for gpu, size, wide in [
                *(("h100", 256, 256), ("b200", 256, 256), ("h100", 80, 80), ("b200", 16, 16)),
            ]
        ),
    ],
)
def test_the_pallas_kernels_compile_within_shared_memory(gpu: str, size: int, wide: int) -> None:
    targets, temporary = attention(gpu, "pallas", size=size, wide=wide, documents=True, window=256)
    assert targets == [TRITON] * 3
    assert temporary < SCORES // 4


@pytest.mark.parametrize(
    "shape",
    [
        (4096, 8, 1024, 768),
        # Sides that blocks don't divide; more elements than 32 bits count.
        pytest.param((4096, 8, 2880, 1408), marks=SLOW),
        pytest.param((524288, 8, 7168, 256), marks=SLOW),
    ],
)
def test_a_grouped_matmul_has_three_kernels_and_no_temporary_arrays(shape: tuple) -> None:
    """Result and both gradients. shape: rows, groups, inner and outer size."""
    rows, groups, inner, outer = shape

    def gradients(x, w, dy, sizes):
        y, pullback = jax.vjp(lambda x, w: grouped_matmul(x, w, sizes, "mosaic"), x, w)
        return y, *pullback(dy)

    arrays = [like(shape) for shape in ((rows, inner), (groups, inner, outer), (rows, outer))]
    targets, memory = compiled("h100", gradients, *arrays, like((groups,), jnp.int32))
    assert targets == [MOSAIC] * 3
    assert memory.temp_size_in_bytes < 2**20


def of_codes(gpu: str, formats: tuple[str, str], shape: tuple[int, ...]) -> tuple[list[str], int]:
    """Calls and temporary bytes of result and both gradients of experts: codes with scales of blocks, or of tiles."""
    (rows, groups, inner, outer), (narrow, of_dy) = shape, (ELEMENTS[name] for name in formats)
    kernel = code_products(GPUS[gpu].capability)
    assert kernel is not None and kernel.hardware == (gpu != "h100")
    scales = (128, jnp.float32) if gpu == "h100" else (32, jnp.float8_e8m0fnu)
    block, kind = (16, jnp.float8_e4m3fn) if narrow == jnp.float4_e2m1fn else scales

    def coded(dtype, *shape, tiles=False):
        sides = *shape[:-2], shape[-2] // 128 if tiles and gpu == "h100" else shape[-2]
        return like(shape, dtype), like((*sides, shape[-1] // block), kind)

    x, dy = coded(narrow, rows, inner), coded(of_dy, rows, outer)
    w, turned = coded(narrow, groups, outer, inner, tiles=True), coded(narrow, groups, inner, outer, tiles=True)
    along = coded(narrow, inner, rows), coded(of_dy, outer, rows)

    def products(x, w, dy, turned, along, sizes):
        y, dx = (kernel.rows(*a, *b, sizes, dtype=jnp.bfloat16) for a, b in ((x, w), (dy, turned)))
        return y, dx, kernel.matrices(*along[0], *along[1], sizes, dtype=jnp.float32)

    targets, memory = compiled(gpu, products, x, w, dy, turned, along, like((groups,), jnp.int32))
    return targets, memory.temp_size_in_bytes


@pytest.mark.slow
@pytest.mark.parametrize(
    ("gpu", "formats", "shape"),
    [
        ("h100", ("e4m3", "e5m2"), (4096, 8, 1024, 768)),
        ("b200", ("e4m3", "e5m2"), (65536, 16, 2048, 768)),
        ("gb300", ("e2m1", "e2m1"), (4096, 8, 1024, 640)),
    ],
)
def test_experts_multiply_codes(gpu: str, formats: tuple[str, str], shape: tuple[int, ...]) -> None:
    """Temporary arrays are transposed scales on Hopper, and scales in the order of tensor memory on Blackwell.

    Mosaic compiles all kernels of a process for the architecture of the first one.
    """
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        targets, temporary = pool.submit(of_codes, gpu, formats, shape).result()
    assert targets == [MOSAIC] * 3
    (rows, groups, inner, outer), block = shape, {"h100": 128, "b200": 32, "gb300": 16}[gpu]
    scales = 2 * rows if gpu == "h100" else rows + groups * (128 + outer)
    assert temporary < 4 * scales * (inner + outer) // block + 2**20


BLOCK, BLOCKS = 16, 2048


@pytest.mark.slow
@pytest.mark.parametrize(
    ("gpu", "shape", "rest"),
    [
        ("h100", (64, 1, 8, 1, 128), {}),  # decoding, 70B on 8 devices
        ("a100-80gb", (1, 512, 32, 8, 128), {"window": 4096}),  # a prompt
        ("a100-80gb", (8, 1, 128, 1, 576), {"latent": 512}),  # decoding with latents
        ("b200", (1, 512, 128, 1, 576), {"latent": 512}),  # a prompt with latents
        ("h100", (8, 1, 8, 1, 128), {"stored": jnp.float8_e4m3fn}),
    ],
)
def test_the_kernels_of_a_paged_cache_copy_no_pool(gpu: str, shape: tuple[int, ...], rest: dict[str, Any]) -> None:
    """shape: rows, queries of each, query heads, key-value heads and their size, of a table of 8192 positions."""
    rows, width, heads, groups, size = shape
    stored, latent = rest.get("stored", jnp.bfloat16), rest.get("latent")
    pool = like((BLOCKS, BLOCK, groups, size), stored)
    scales = None if stored == jnp.bfloat16 else like((BLOCKS, BLOCK, groups), jnp.float32)
    pools = Pools(pool, None, latent, scales, None) if latent else Pools(pool, pool, size, scales, scales)
    tables = like((rows, 512), jnp.int32), like((rows, width), jnp.int32)

    def attend(q: jax.Array, pools: Pools, *tables: jax.Array) -> jax.Array:
        return paged_attention(PagedQueries(q, *tables, 0.1, rest.get("window")), pools)

    targets, memory = compiled(gpu, attend, like((rows, width, heads, size)), pools, *tables)
    assert targets == [TRITON] * (2 if width == 1 else 1)
    assert memory.argument_size_in_bytes > BLOCKS * BLOCK * groups * size
    partial_sums = 32 * rows * heads * ((latent or size) + 2) * 4 if width == 1 else 0
    assert memory.temp_size_in_bytes <= partial_sums + 4096, "the sums of 32 splits, and nothing of the pool's size"
