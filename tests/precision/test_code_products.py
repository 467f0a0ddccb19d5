"""Products of codes by Hopper's and Blackwell's kernels, interpreted, against the same numbers in wider dtypes."""

from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from interpreted_kernels import interpreted
from jax import Array
from jax.experimental.pallas import mosaic_gpu
from test_blocks import draw
from test_grouped_recipes import trained

from megajax.kernels.attention.request import KernelDevice
from megajax.kernels.grouped import blackwell_block_scaled, codes
from megajax.kernels.grouped.capability import CODES, GroupedSizes
from megajax.kernels.grouped.matmul import CodeProducts, capable, code_products, reference_matrices, reference_rows
from megajax.mesh.config import ParallelConfig
from megajax.precision.block_recipes import fp8_blocks, mxfp8, nvfp4
from megajax.precision.config import Fp8BlocksConfig, Fp8CurrentConfig, Fp8DelayedConfig, Mxfp8Config, Nvfp4Config
from megajax.precision.fp8 import AmaxHistory, PerTensor
from megajax.precision.matmul import RoundedMatmul
from megajax.precision.recipes import recipe_of

KERNEL = CodeProducts(partial(codes.rows, programs=1), partial(codes.matrices, programs=1))
SCALED = CodeProducts(
    partial(blackwell_block_scaled.rows, programs=1),
    partial(blackwell_block_scaled.matrices, programs=1),
    "blackwell_block_scaled",
)
CAREFUL = mosaic_gpu.InterpretGPUParams(detect_races=True)
DELAYED = Fp8DelayedConfig()
RECIPES: dict[str, Any] = {
    "blocks": fp8_blocks(Fp8BlocksConfig(format="hybrid")),
    "float32 scales": fp8_blocks(Fp8BlocksConfig(scales="float32")),
    "one scale": PerTensor(Fp8CurrentConfig()),
    "one scale, delayed": PerTensor(DELAYED, AmaxHistory(DELAYED, 1.0)),
    "mxfp8": mxfp8(Mxfp8Config(format="hybrid")),
    "nvfp4": nvfp4(Nvfp4Config(stochastic=False)),
}


def scaled_back(values: Array, scales: Array) -> Array:
    """Codes times their scales, in float32."""
    scales = scales.astype(jnp.float32)
    for axis in (-1, -2):
        scales = jnp.repeat(scales, values.shape[axis] // scales.shape[axis], axis)
    return values.astype(jnp.float32) * scales


def plain_rows(x: Array, x_scales: Array, w: Array, w_scales: Array, sizes: Array, *, dtype: Any) -> Array:
    return reference_rows(scaled_back(x, x_scales), scaled_back(w, w_scales), sizes, transposed=True, dtype=dtype)


def plain_matrices(x: Array, x_scales: Array, dy: Array, dy_scales: Array, sizes: Array, *, dtype: Any) -> Array:
    return reference_matrices(scaled_back(x, x_scales).T, scaled_back(dy, dy_scales).T, sizes, dtype=dtype)


PLAIN = CodeProducts(plain_rows, plain_matrices)
"""The meaning of the kernels' two functions."""


def close(actual: Any, expected: Any) -> None:
    np.testing.assert_allclose(actual, expected, rtol=0, atol=1e-5 * np.abs(expected).max(initial=1e-9))


def drawn(shape: tuple[int, ...], seed: int, dtype: Any, scales: tuple[int, ...]) -> tuple[Array, Array]:
    """Codes and scales."""
    return jnp.asarray(draw(shape, seed, 3)).astype(dtype), 1 + jnp.abs(jnp.asarray(draw(scales, seed, 1)))


def in_blocks(shape: tuple[int, ...], seed: int, dtype: Any) -> tuple[Array, Array]:
    """Codes and scales as Blackwell's tensor cores take them."""
    block, of_scales = (16, jnp.float8_e4m3fn) if dtype == jnp.float4_e2m1fn else (32, jnp.float8_e8m0fnu)
    scales = 2.0 ** np.round(draw((*shape[:-1], shape[-1] // block), seed, 2))
    return jnp.asarray(draw(shape, seed, 3)).astype(dtype), jnp.asarray(scales).astype(of_scales)


@pytest.mark.parametrize(
    ("sizes", "aligned"),
    [((60, 9), (256, 0)), pytest.param((100, 0, 33, 130), (128, 0, 384, 128), marks=pytest.mark.slow)],
)
def test_the_kernel_equals_codes_times_scales(sizes: tuple[int, ...], aligned: tuple[int, ...]) -> None:
    """Groups may be empty or no multiples of 8 rows, rows past the groups are NaN, and both formats occur."""
    groups, large = len(sizes), len(sizes) > 2
    count, inner, outer = 264 if large else 128, 256, 256 if large else 128
    x, scales = drawn((count, inner), 0, jnp.float8_e5m2, (count, inner // 128))
    operands = x.at[sum(sizes) :].set(jnp.nan), scales
    w = drawn((groups, outer, inner), 1, jnp.float8_e4m3fn, (groups, outer // 128, inner // 128))
    rows = 128 + sum(aligned)
    a, b = (drawn((128, rows), seed, dtype, (128, rows // 128)) for seed, dtype in ((2, x.dtype), (3, w[0].dtype)))

    def both(kernel: CodeProducts) -> tuple[Array, Array]:
        y = kernel.rows(*operands, *w, jnp.int32(sizes), dtype=jnp.float32)
        return y[: sum(sizes)], kernel.matrices(*a, *b, jnp.int32(aligned), dtype=jnp.float32)

    # Memory that the program has not written is NaN; a read that no barrier orders is an error.
    with interpreted(CAREFUL):
        actual = jax.block_until_ready(jax.jit(lambda: both(KERNEL))())
    for array, expected in zip(actual, jax.jit(lambda: both(PLAIN))(), strict=True):
        close(array, expected)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtypes", "sizes", "outer"),
    [
        ((jnp.float8_e5m2, jnp.float8_e4m3fn), (60, 9), 256),
        ((jnp.float4_e2m1fn,) * 2, (100, 0, 33, 130), 128),
    ],
)
def test_tensor_cores_multiply_scaled_blocks(dtypes: tuple[Any, Any], sizes: tuple[int, ...], outer: int) -> None:
    """Operands are Blackwell's; there are more steps than fit shared memory, in all and in one group."""
    count, inner, groups = 264, 768, len(sizes)
    x, scales = in_blocks((count, inner), 0, dtypes[0])
    operands = x, scales, *in_blocks((groups, outer, inner), 1, dtypes[1])
    aligned = (640, 0, 128, 0)[:groups]
    rows = in_blocks((128, 896), 2, dtypes[0]) + in_blocks((outer, 896), 3, dtypes[1])

    def both(kernel: CodeProducts) -> tuple[Array, Array]:
        y = kernel.rows(*operands, jnp.int32(sizes), dtype=jnp.float32)
        return y[: sum(sizes)], kernel.matrices(*rows, jnp.int32(aligned), dtype=jnp.float32)

    with interpreted(CAREFUL):
        actual = jax.block_until_ready(jax.jit(lambda: both(SCALED))())
    for array, expected in zip(actual, jax.jit(lambda: both(PLAIN))(), strict=True):
        close(array, expected)


def of_experts(recipe: Any, sizes: Array, dy: Array, *inputs: Array) -> tuple[Array, ...]:
    """The result, and the gradients of rows and matrices."""
    x, w = inputs[:2]
    kernels = partial(capable, "reference", GroupedSizes(x.shape[0], *w.shape))
    y, pull = jax.vjp(lambda x, w, *amax: RoundedMatmul(recipe).grouped(x, w, sizes, kernels, *amax), *inputs)
    return y, *pull(dy)


OF_BLACKWELL = PLAIN._replace(kernel="blackwell_block_scaled")


@pytest.mark.parametrize(
    ("kernel", "name"),
    [
        pytest.param(kernel, name, marks=[] if (kernel, name) == (PLAIN, "one scale") else pytest.mark.slow)
        for kernel, names in (
            *((PLAIN, ["blocks", "one scale", "one scale, delayed"]), (OF_BLACKWELL, ["one scale", "nvfp4"])),
            *((KERNEL, ["one scale"]), (SCALED, ["nvfp4"])),
        )
        for name in names
    ],
)
def test_experts_by_codes_equal_the_reference(kernel: CodeProducts, name: str) -> None:
    """Result, gradients and what is observed. Interpreted kernels have blocks and mxfp8 on several devices below."""
    sizes, rows, outer = (100, 0, 9), 136, 256
    x, w, dy = draw((rows, 128), 0, 3), draw((len(sizes), 128, outer), 1, 3), draw((rows, outer), 2, 3)
    x[sum(sizes) :] = dy[sum(sizes) :] = np.nan
    amax = [jnp.float32([[2, 16, 3], [4, 32, 6], [6, 48, 9]])] * (name == "one scale, delayed")
    arrays = jnp.int32(sizes), dy, x, w, *amax
    with interpreted(CAREFUL):
        actual = jax.block_until_ready(jax.jit(partial(of_experts, replace(RECIPES[name], codes=kernel)))(*arrays))
    for number, expected in enumerate(jax.jit(partial(of_experts, RECIPES[name]))(*arrays)):
        live = sum(sizes) if number < 2 else None
        close(actual[number][:live], expected[:live])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kernel", "name"),
    [(PLAIN, "one scale, delayed"), (PLAIN, "float32 scales"), (KERNEL, "blocks"), (SCALED, "mxfp8")],
)
def test_the_kernels_of_several_devices(kernel: CodeProducts, name: str) -> None:
    """Experts over two devices, and the matrices of each over two; the last two cases by the kernels themselves."""
    expected = trained(RECIPES[name], ParallelConfig(data=1), hidden=128)
    with interpreted(CAREFUL):
        recipe = replace(RECIPES[name], codes=kernel)
        actual = trained(recipe, ParallelConfig(data=1, expert=2, tensor=2), hidden=128)
    for path in expected.keys() - {"load.sum", "report.sum"}:
        close(actual[path], expected[path])


def test_hopper_and_blackwell_have_a_kernel() -> None:
    h100, sizes = KernelDevice(name="H100", capability=(9, 0)), GroupedSizes(4096, 8, 2048, 768)
    assert CODES["codes"].refusal(None, h100, sizes) is None
    assert CODES["codes"].refusal(None, h100, sizes._replace(outer=704)) == (
        "takes matrices with sides of multiples of 128, not 2048 x 704"
    )
    assert code_products((9, 0)) == CodeProducts(codes.rows, codes.matrices, "codes")
    assert (
        code_products((10, 0))
        == code_products((10, 3))
        == CodeProducts(blackwell_block_scaled.rows, blackwell_block_scaled.matrices, "blackwell_block_scaled")
    )
    for capability in ((), (8, 9), (12, 0)):
        assert code_products(capability) is None
        for backend in CODES.values():
            assert "compute capability" in str(backend.refusal(None, KernelDevice(name="other", capability=capability)))


def test_a_recipe_without_kernels_multiplies_what_it_rounded() -> None:
    b200: Any = SimpleNamespace(platform="cuda", device_kind="NVIDIA B200", compute_capability="10.0")
    kernel = PLAIN._replace(kernel="blackwell_block_scaled")
    for cfg in (Mxfp8Config(), Nvfp4Config(), Fp8BlocksConfig(), Fp8CurrentConfig(), DELAYED):
        assert recipe_of(cfg, b200, 1.0, kernel).codes == kernel
        plain: Any = recipe_of(replace(cfg, kernel="reference"), b200, 1.0, kernel)
        assert plain.codes is None and getattr(plain, "kernel", "reference") == "reference"
    assert recipe_of(Fp8BlocksConfig(scales="float32"), b200, 1.0, kernel).codes is None
    assert recipe_of(Mxfp8Config(), b200, 1.0, PLAIN).codes is None, "blocks of 128 only"
