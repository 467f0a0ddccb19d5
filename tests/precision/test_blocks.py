"""Recipes with numbers in blocks: against numpy, at the ends of the formats, by both kernels and over devices."""

from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from user_errors import user_error

from megajax.layers.param import Matrix, Normal, param
from megajax.mesh.config import ParallelConfig
from megajax.mesh.layout import Layout
from megajax.mesh.mesh import build_mesh
from megajax.mesh.sharding_rules import Plan
from megajax.precision.block_recipes import fp8_blocks, mxfp8, nvfp4
from megajax.precision.blocks import HADAMARD, BlockFormat, dequantize, hadamard, quantize
from megajax.precision.config import (
    Fp8BlocksConfig,
    MatmulConfig,
    Mxfp8Config,
    Nvfp4Config,
)
from megajax.precision.matmul import Recipe, RoundedMatmul, RowGroups, terms
from megajax.precision.recipes import kernel_of, recipe_of
from megajax.precision.stored_blocks import TILES

UP = "embed", "mlp"
TYPES = {"e4m3": ml_dtypes.float8_e4m3fn, "e5m2": ml_dtypes.float8_e5m2, "e2m1": ml_dtypes.float4_e2m1fn}
RECIPES_IN_BLOCKS = {
    "fp8_blocks": fp8_blocks(Fp8BlocksConfig()),
    "fp8_blocks with float32 scales": fp8_blocks(Fp8BlocksConfig(scales="float32")),
    "mxfp8": mxfp8(Mxfp8Config(format="hybrid")),
    "nvfp4": nvfp4(Nvfp4Config(stochastic=False)),
}


def draw(shape: tuple[int, ...], seed: int, spread: int = 8) -> np.ndarray:
    """Over several orders of magnitude."""
    rng = np.random.default_rng(seed)
    return (rng.normal(size=shape) * np.exp2(rng.integers(-spread, spread, shape))).astype(np.float32)


def wide(x: np.ndarray, form: BlockFormat, *, tiles: bool = False) -> np.ndarray:
    """The numbers that the rows of x [N, K] become, float64, one block at a time with numpy's casts."""
    out, largest = np.zeros(x.shape), np.float32(form.largest)
    height, whole = form.size if tiles else 1, np.float32(1)
    if form.scales == "nvfp4":
        whole = np.abs(x).max() / (np.float32(448) * largest)
    for row in range(0, x.shape[0], height):
        for column in range(0, x.shape[1], form.size):
            place = np.s_[row : row + height, column : column + form.size]
            amax = np.abs(x[place]).max()
            if form.scales == "nvfp4":
                scale = np.clip(amax / largest / whole, 2**-6, 448).astype(ml_dtypes.float8_e4m3fn).astype(np.float32)
            elif form.scales == "float32":
                scale = max(amax, np.float32(form.least)) / largest
            else:
                exact = np.log2(np.float64(max(amax, form.least)))
                emax = np.floor(np.log2(form.largest))
                exponent = {"floor": np.floor(exact) - emax, "ceil": np.ceil(exact) - emax}
                exponent["up"] = np.ceil(exact - np.log2(np.float64(form.largest)))
                rounded = np.float64(TYPES[form.element](amax / 2 ** np.floor(exact)))
                exponent["even"] = exponent["floor"] + (rounded >= 2)
                scale = np.float32(2.0 ** exponent[form.rounding])
            scaled = x[place] * ((1 / whole) / scale) if form.scales == "nvfp4" else x[place] / scale
            out[place] = np.clip(scaled, -largest, largest).astype(TYPES[form.element]).astype(np.float64) * scale
    return out * whole


@pytest.mark.parametrize("rounding", ["floor", "ceil", "even", "up"])
@pytest.mark.parametrize("element", ["e4m3", "e5m2"])
def test_scales_by_each_rounding(rounding: Any, element: Any) -> None:
    form, x = BlockFormat(element, 32, "power_of_two", rounding), draw((16, 64), 0)
    x[0, :32] = np.float32([1, -1.75, 0, 2**-20] * 8)
    x[1, :32] = np.float32(1.875 + 2**-10)
    actual = dequantize(jax.jit(partial(quantize, form=form))(x), form, jnp.dtype(jnp.float32))
    np.testing.assert_array_equal(actual, wide(x, form))


@pytest.mark.parametrize("name", RECIPES_IN_BLOCKS)
def test_formats_against_numpy(name: str) -> None:
    """Rows and tiles do not divide the sides."""
    form, x = RECIPES_IN_BLOCKS[name].forward, draw((144, 160), 1)

    @jax.jit
    def numbers(x: jax.Array) -> list[jax.Array]:
        found = []
        for tiles in (False, True):
            blocks = quantize(x, form, tiles=tiles)
            found.append(
                dequantize(blocks, form, jnp.dtype(jnp.float32), tiles=tiles)
                * (1 if blocks.whole is None else blocks.whole)
            )
        return found

    for actual, tiles in zip(numbers(x), (False, True), strict=True):
        np.testing.assert_allclose(actual, wide(x, form, tiles=tiles), rtol=2e-7)


def test_a_nan_of_a_large_array_is_in_its_scale() -> None:
    """Maxima of floats drop it on CPUs, in tiles and in arrays of thousands of numbers."""
    x = draw((128, 256), 3)
    x[64, 40] = np.nan
    for form, tiles in ((BlockFormat("e2m1", 16, "nvfp4"), True), (BlockFormat("e4m3", 32), False), (TILES, True)):
        scales = np.asarray(jax.jit(partial(quantize, form=form, tiles=tiles))(x).scales, np.float32)
        place = 64 // (form.size if tiles else 1), 40 // form.size
        assert np.isnan(scales[place]) and np.isnan(scales).sum() == (scales.size if form.scales == "nvfp4" else 1)


def test_scales_at_the_ends_of_formats() -> None:
    """Literal numbers: OCP's rule, NVIDIA's rounding up as its instruction rounds, and tensors of tiny numbers."""
    x = np.zeros((8, 32), np.float32)
    x[:, 0] = [1, 1.75, np.nextafter(np.float32(1.75), 2), 1.9375, 448, 449, 2.0**-126, 3e38]
    exponents = {
        "floor": [119, 119, 119, 119, 127, 127, 0, 246],
        "up": [119, 119, 120, 120, 127, 128, 0, 247],
        "ceil": [119, 120, 120, 120, 128, 128, 0, 247],
        "even": [119, 119, 119, 120, 127, 127, 0, 246],
    }
    for rounding, expected in exponents.items():
        form: Any = BlockFormat("e4m3", 32, "power_of_two", rounding)
        scales = np.asarray(jax.jit(partial(quantize, form=form))(x).scales)
        np.testing.assert_array_equal(scales.view(np.uint8)[:, 0], expected, err_msg=rounding)
    for amax, whole, first in ((2688.0, 1.0, 6.0), (1e-34, 1.0, 0.0), (1e-30, np.float32(1e-30) / 2688, 6.0)):
        tiny = np.zeros((2, 16), np.float32)
        tiny[0, 0] = amax
        blocks = jax.jit(partial(quantize, form=BlockFormat("e2m1", 16, "nvfp4")))(tiny)
        assert blocks.whole == np.float32(whole)
        np.testing.assert_array_equal(np.asarray(blocks.codes, np.float32), [[first] + [0] * 15, [0] * 16])


@pytest.mark.parametrize("name", RECIPES_IN_BLOCKS)
def test_what_is_not_finite_stays_visible_and_zeros_stay_zeros(name: str) -> None:
    """This holds in dense products and in those of experts."""
    recipe, letters, size = RECIPES_IN_BLOCKS[name], terms("tk,nk->tn"), RECIPES_IN_BLOCKS[name].forward.size

    @jax.jit
    def numbers(x: jax.Array) -> tuple[jax.Array, jax.Array]:
        dense = recipe.operand("x", x, letters.first, letters, None).wide(jnp.dtype(jnp.float32))
        return dense, recipe.grouped_operand("x", x, RowGroups.of(jnp.int32([1, 1]), 2), None).wide()

    for value in (np.nan, np.inf, -np.inf):
        x = np.ones((2, 256), np.float32)
        x[0, 3] = value
        for rounded in numbers(x):
            assert np.isnan(rounded[0, :size]).all()
    assert not np.asarray(numbers(np.zeros((2, 256), np.float32))).any()


@pytest.mark.parametrize("name", RECIPES_IN_BLOCKS)
def test_gradients_of_a_mean_over_many_tokens_keep_their_digits(name: str) -> None:
    """As small as 1e-11 they are rounded as they are at 1, and zeros stay zeros."""
    recipe, letters, dy = RECIPES_IN_BLOCKS[name], terms("tk,nk->tn"), draw((16, 256), 4, spread=2)
    dy[0] = 0

    @jax.jit
    def numbers(dy: jax.Array) -> jax.Array:
        rows = recipe.operand("dy", dy, letters.first, letters, None)
        return rows.wide(jnp.dtype(jnp.float32)) * (1 if rows.blocks.whole is None else rows.blocks.whole)

    small = np.float32(2.0**-37)
    np.testing.assert_array_equal(numbers(dy * small), numbers(dy) * small)
    assert np.linalg.norm(numbers(dy) - dy) < (0.15 if name == "nvfp4" else 0.07) * np.linalg.norm(dy)


def test_stochastic_rounding_keeps_the_mean_and_takes_neighbours() -> None:
    form = BlockFormat("e2m1", 16, "nvfp4")
    rows = np.tile(
        np.float32([6, 0.3, -0.3, 0.9, 1.2, -2.4, 3.2, 5.5, 0.05, 1.74, 2.9, -4.6, 0, 0.5, 4, -6]), (40_000, 1)
    )
    blocks = jax.jit(partial(quantize, form=form, stochastic=True))(rows)
    actual = np.asarray(blocks.codes).astype(np.float64) * np.float64(blocks.scales[0, 0]) * np.float64(blocks.whole)
    grid = np.sort(np.concatenate([s * np.float64([0, 0.5, 1, 1.5, 2, 3, 4, 6]) for s in (1, -1)]))
    np.testing.assert_allclose(actual.mean(0), rows[0], atol=0.02)
    for column, value in zip(actual.T, rows[0], strict=True):
        assert set(np.unique(column.round(4))) <= {grid[grid <= value + 1e-6].max(), grid[grid >= value - 1e-6].min()}
    np.testing.assert_array_equal(blocks.codes, jax.jit(partial(quantize, form=form, stochastic=True))(rows).codes)


def test_the_hadamard_transform_is_orthogonal_and_spreads_an_outlier() -> None:
    matrix = np.asarray(hadamard(jnp.eye(HADAMARD)), np.float64)
    np.testing.assert_allclose(matrix @ matrix.T, np.eye(HADAMARD), atol=1e-7)
    np.testing.assert_allclose(np.abs(matrix), 1 / 4, atol=1e-7)
    x, y = draw((8, 64), 0, 2), draw((8, 64), 1, 2)
    np.testing.assert_allclose(hadamard(x) @ hadamard(y).T, x @ y.T, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name != "nvfp4")) for name in RECIPES_IN_BLOCKS]
)
def test_each_product_rounds_along_what_it_sums_over(name: str) -> None:
    recipe = RECIPES_IN_BLOCKS[name]
    x, w, dy = draw((2, 32, 96), 0, 3), draw((96, 4, 40), 1, 3), draw((2, 32, 4, 40), 2, 3)
    multiply = partial(RoundedMatmul(recipe), "bsd,dnh->bsnh")

    @jax.jit
    def products(x: jax.Array, w: jax.Array, dy: jax.Array) -> tuple[jax.Array, ...]:
        y, pull = jax.vjp(multiply, x, w)
        return y, *pull(dy)

    y, dx, dw = products(x, w, dy)
    rows, columns, out = x.reshape(64, 96), w.reshape(96, 160), dy.reshape(64, 160)
    turn = hadamard if recipe.transformed else np.asarray
    forward, gradients = partial(wide, form=recipe.forward), partial(wide, form=recipe.gradients)
    expected = (
        forward(rows) @ forward(columns.T, tiles=recipe.tiles).T,
        gradients(out) @ forward(columns, tiles=recipe.tiles).T,
        forward(np.asarray(turn(rows.T))) @ gradients(np.asarray(turn(out.T))).T,
    )
    for actual, exact in zip((y, dx, dw), expected, strict=True):
        np.testing.assert_allclose(actual.reshape(exact.shape), exact, rtol=0, atol=2e-6 * np.abs(exact).max())


def two_layers(recipe: Recipe, devices: int, sizes: tuple[int, int], rows: tuple[int, int]) -> tuple[list, str]:
    """Loss and gradients of columns of one matrix and inputs of the next, over devices of tensor, and the program."""
    arrays = [draw(shape, seed, 2) for seed, shape in enumerate((sizes, sizes[::-1], (*rows, sizes[0])))]

    def loss(layout: Layout, up: jax.Array, down: jax.Array, x: jax.Array) -> jax.Array:
        first, second = (
            Matrix(layout, param(w.shape, axes, init=Normal(1))) for w, axes in ((up, UP), (down, UP[::-1]))
        )
        first.array[...], second.array[...] = up, down
        y = layout.dot("bsd,df->bsf", x, first, "batch", "seq", "mlp")
        return jnp.sum(layout.dot("bsf,fd->bsd", y, second, "batch", "seq_residual", "embed") ** 2)

    parallel = ParallelConfig(data=1, tensor=devices)
    layout = Layout(Plan.of(parallel), RoundedMatmul(recipe))
    mesh = build_mesh(parallel, jax.devices()[:devices])
    specs = PartitionSpec(None, "tensor"), PartitionSpec("tensor"), PartitionSpec()
    with jax.set_mesh(mesh):
        placed = [jax.device_put(w, NamedSharding(mesh, spec)) for w, spec in zip(arrays, specs, strict=True)]
        step = jax.jit(jax.value_and_grad(partial(loss, layout), argnums=(0, 1, 2))).lower(*placed).compile()
        return jax.tree.leaves(jax.tree.map(np.asarray, step(*placed))), step.as_text()


@pytest.mark.parametrize("name", [pytest.param("fp8_blocks", marks=pytest.mark.slow), "nvfp4"])
def test_both_kernels_agree_and_devices_multiply_their_parts(name: str) -> None:
    """One kernel is that of GPUs, the other the reference."""
    cases = ("reference", 1), ("reference", 2), ("cudnn", 2)
    results = [two_layers(replace(RECIPES_IN_BLOCKS[name], kernel=k), n, (64, 128), (2, 32))[0] for k, n in cases]
    for actual in results[1:]:
        for array, expected in zip(actual, results[0], strict=True):
            np.testing.assert_allclose(array, expected, rtol=0, atol=1e-5 * np.abs(expected).max())


@pytest.mark.parametrize("kernel", ["reference", pytest.param("cudnn", marks=pytest.mark.slow)])
def test_blocks_that_lie_on_two_devices_are_not_cut_by_exchanges(kernel: str) -> None:
    """Such exchanges are operations of all devices, for which stages of a pipeline would wait in vain."""
    recipe = replace(RECIPES_IN_BLOCKS["fp8_blocks"], kernel=kernel)
    (expected, _), (actual, program) = (two_layers(recipe, devices, (64, 192), (2, 32)) for devices in (1, 2))
    assert "all-gather" in program and "collective-permute" not in program
    for array, exact in zip(actual, expected, strict=True):
        np.testing.assert_allclose(array, exact, rtol=0, atol=1e-5 * np.abs(exact).max())


@pytest.mark.parametrize(
    ("name", "dtype", "scales"),
    [("mxfp8", "float8_e4m3fn", "float8_e8m0fnu"), ("nvfp4", "float4_e2m1fn", "float8_e4m3fn")],
)
def test_saved_for_the_backward_pass(name: str, dtype: str, scales: str) -> None:
    x, w = jax.ShapeDtypeStruct((2, 32, 64), jnp.bfloat16), jax.ShapeDtypeStruct((64, 96), jnp.bfloat16)
    multiply = partial(RoundedMatmul(RECIPES_IN_BLOCKS[name]), "bsd,df->bsf")
    _, pull = jax.eval_shape(lambda x, w: jax.vjp(multiply, x, w), x, w)
    saved = {(leaf.size, str(leaf.dtype)) for leaf in jax.tree.leaves(pull)} - {(w.size, "bfloat16"), (1, "float32")}
    assert saved == {(x.size, dtype), (x.size // RECIPES_IN_BLOCKS[name].forward.size, scales)}


def test_sides_that_are_no_multiples_are_refused() -> None:
    with user_error("precision.matmul"):
        RoundedMatmul(RECIPES_IN_BLOCKS["mxfp8"])("bsd,df->bsf", jnp.ones((1, 32, 64)), jnp.ones((64, 48)))


class Device:
    """A device as jax describes it."""

    def __init__(self, capability: str | None):
        self.platform, self.device_kind = "cpu" if capability is None else "gpu", "a device"
        if capability is not None:
            self.compute_capability = capability


@pytest.mark.parametrize(
    ("capability", "cfg", "kernel"),
    [
        (None, Mxfp8Config(), "reference"),
        ("9.0", Mxfp8Config(), "reference"),
        ("10.0", Mxfp8Config(), "cudnn"),
        ("10.3", Nvfp4Config(), "cudnn"),
        ("10.0", Fp8BlocksConfig(), "cudnn"),
        ("10.0", Fp8BlocksConfig(scales="float32"), "reference"),
    ],
)
def test_the_kernel_follows_from_the_capability(capability: str | None, cfg: MatmulConfig, kernel: str) -> None:
    device: Any = Device(capability)
    recipe: Any = recipe_of(cfg, device, 1.0)
    assert kernel_of(cfg, device) == kernel == recipe.kernel
