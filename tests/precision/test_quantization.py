"""Rounding of matrices to 8 and 4 bits, against closed forms, and products with the stored matrices."""

from functools import partial
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from megajax.layers.quantized import Quantized, form_of
from megajax.precision.blocks import dequantize, quantize
from megajax.precision.quantization import Channels, GroupedCodes, largest, rounded
from megajax.precision.stored_blocks import FORMATS

EQUATIONS = {
    "bsd,dnh->bsnh": ((2, 3, 16), (16, 4, 6), 1),
    "bsnh,nhd->bsd": ((2, 3, 4, 6), (4, 6, 16), 2),
    "bsr,rnu->bsnu": ((2, 3, 8), (8, 4, 5), 1),
    "bsnr,rnu->bsnu": ((2, 3, 4, 8), (8, 4, 5), 1),
    "bsnc,rnc->bsnr": ((2, 3, 4, 5), (8, 4, 5), 1),
}
"""Shapes of x and w, and the dimensions of inputs. The last one sums over the outputs, as latent attention does."""


def draw(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(0, 1, shape).astype(np.float32)


def at(w: np.ndarray, place: tuple[Any, ...], value: float) -> np.ndarray:
    changed = w.copy()
    changed[place] = value
    return changed


@pytest.mark.parametrize("dtype", ["int8", "float8_e4m3fn"])
def test_a_channel_is_off_by_at_most_half_a_step(dtype: str) -> None:
    w = draw(5, 7, 3) * np.float32([0.01, 0.1, 1])
    form = Channels(dtype, inputs=2, outputs=1)
    values, scale = form.quantized(jnp.asarray(w))
    assert scale.shape == (3,)
    np.testing.assert_allclose(scale, np.abs(w).max((0, 1)) / largest(dtype), rtol=1e-6)
    error, relative = np.abs(form.dequantized(values, scale) - w), np.abs(w) / np.asarray(scale)
    # e4m3 has steps of 2^-3 of the power of two below a number, and of 2^-9 below 2^-6.
    step = 1.0 if dtype == "int8" else 2.0 ** (np.floor(np.log2(np.maximum(relative, 2.0**-6))) - 3)
    assert (error <= np.asarray(scale) * step / 2 * (1 + 1e-5)).all()
    assert np.abs(np.asarray(values, np.float32)).max() == largest(dtype)


def test_a_group_is_off_by_at_most_half_a_step() -> None:
    w, form = draw(3, 2, 16, 5), GroupedCodes(4, inputs=2, outputs=1)
    values, scale = form.quantized(jnp.asarray(w))
    assert values.shape == (3, 2, 8, 5)
    assert values.dtype == jnp.uint8
    assert scale.shape == (3, 2, 4, 5)
    groups = w.reshape(3, 2, 4, 4, 5)
    np.testing.assert_allclose(scale, np.abs(groups).max(3) / 7, rtol=1e-6)
    error = np.abs(np.asarray(form.dequantized(values, scale)).reshape(groups.shape) - groups)
    assert (error <= np.asarray(scale)[:, :, :, None] / 2 * (1 + 1e-5)).all()


@pytest.mark.parametrize("weights", ["int8", "fp8", "int4", "nf4"])
def test_zeros_stay_zeros_and_nonfinite_values_stay_visible(weights: str) -> None:
    w, form = at(draw(8, 3), (slice(None), 1), 0), form_of(weights, 4, 1, 1)
    values, scale = form.quantized(jnp.asarray(w))
    assert (np.asarray(scale)[..., 1] == (weights in ("int8", "fp8"))).all()
    assert (np.asarray(form.dequantized(values, scale))[:, 1] == 0).all()
    finite = np.isfinite(form.dequantized(*form.quantized(jnp.asarray(at(w, (0, 2), np.inf)))))
    assert not finite[:4, 2].any()
    assert finite[:, :2].all()


@pytest.mark.parametrize("weights", ["int4", "nf4"])
def test_a_group_of_zeros_leaves_the_scales_of_its_output_alone(weights: str) -> None:
    """Scales in 8 bits change the error of the other groups as little as without it; bitsandbytes stores 0 as well."""
    w, double = draw(256, 3) * np.float32(0.02), Quantized(form_of(weights, 16, 1, 1), double=True)
    zeros, stored = at(w, (slice(16), 1), 0), jax.jit(lambda x: double.whole(double.quantized(x)))
    errors = [np.abs(np.asarray(stored(x)) - x) for x in (w, zeros)]
    assert errors[1][:16, 1].max() == 0
    assert errors[1][16:].mean() < 1.1 * errors[0][16:].mean()


@pytest.mark.parametrize(("weights", "balanced"), [("int8", False), ("int8", True), ("fp8", False), ("int4", True)])
def test_the_product_equals_that_of_the_dequantized_matrix(weights: str, balanced: bool) -> None:
    def products() -> list[tuple[Any, ...]]:
        products_ = []
        for equation, (lhs, rhs, inputs) in EQUATIONS.items():
            x, w = (jnp.asarray(next(values_)) for _ in range(2))
            quantized = Quantized(form_of(weights, 2, inputs, len(rhs) - inputs), balanced=balanced)
            leaves = quantized.quantized(w, jnp.asarray(next(values_)) if balanced else None)
            weight = quantized.whole(leaves)
            products_.append((quantized.product(equation, x, leaves), jnp.einsum(equation, x, weight), w, weight))
            assert lhs == x.shape
        return products_

    shapes = [(lhs, rhs, rhs[:inputs]) for lhs, rhs, inputs in EQUATIONS.values()]
    values = [draw(*shape, seed=place) for value in shapes for place, shape in enumerate(value[: 2 + balanced])]
    values_ = iter(np.abs(value) + 0.5 if balanced and place % 3 == 2 else value for place, value in enumerate(values))
    for product, expected, w, weight in jax.jit(products)():
        assert np.abs(weight - w).max() < (0.5 if weights == "int4" else 0.3)
        np.testing.assert_allclose(product, expected, rtol=1e-5, atol=1e-5)


def test_products_in_8_bits_equal_those_of_rounded_numbers() -> None:
    x, w = jnp.asarray(draw(2, 3, 16) * np.float32([[1.0], [30.0], [1e-3]])), jnp.asarray(draw(16, 4, 6, seed=1))
    quantized = Quantized(form_of("fp8", 0, 1, 2), activations=True)
    leaves = jax.jit(quantized.quantized)(w)
    values, scale = rounded(x, "float8_e4m3fn", 1)
    assert scale.shape == (2, 3)
    expected = jnp.einsum("bsd,dnh->bsnh", values.astype(jnp.float32) * scale[..., None], quantized.whole(leaves))
    product = jax.jit(partial(quantized.product, "bsd,dnh->bsnh"))(x, leaves)
    np.testing.assert_allclose(product, expected, rtol=1e-5, atol=1e-5)
    static = Quantized(quantized.form, activations=True, static=True)
    clipped = jnp.clip(x * (448 / 2.0), -448, 448).astype("float8_e4m3fn").astype(jnp.float32) * (2.0 / 448)
    product = jax.jit(partial(static.product, "bsd,dnh->bsnh"))(x, static.quantized(w, amax=jnp.float32(2.0)))
    np.testing.assert_allclose(
        product, jnp.einsum("bsd,dnh->bsnh", clipped, quantized.whole(leaves)), rtol=1e-5, atol=1e-5
    )


def test_sums_of_integers_do_not_overflow_float16() -> None:
    x, w = jnp.full((1, 1, 4096), 8, jnp.float16), jnp.full((4096, 2), 0.25)
    quantized = Quantized(form_of("int8", 0, 1, 1))
    product = quantized.product("bsd,df->bsf", x, quantized.quantized(w))
    assert product.dtype == jnp.float16
    np.testing.assert_allclose(product, 8192, rtol=1e-3)


def test_bytes_of_a_matrix() -> None:
    shape = (32, 4096, 14336)
    for weights, expected in (("int8", 32 * (4096 + 4) * 14336), ("int4", 32 * (2048 + 4096 // 128 * 4) * 14336)):
        leaves = Quantized(form_of(weights, 128, 1, 1)).declared(shape, ("layer", "embed", "mlp"))
        assert sum(prod(size) * jnp.dtype(dtype).itemsize for size, _, dtype in leaves.values()) == expected
    doubled = Quantized(form_of("nf4", 64, 1, 1), double=True).declared(shape, ("layer", "embed", "mlp"))
    sizes = sum(prod(size) * jnp.dtype(dtype).itemsize for size, _, dtype in doubled.values())
    assert sizes == 32 * (2048 + 4096 // 64 + 8) * 14336
    assert form_of("int4", 128, 1, 1).misfit((100, 3)) == ""
    assert form_of("int4", 128, 1, 1).misfit((200, 3)) == "200 inputs are not a multiple of the group, 128"
    assert form_of("int4", 128, 1, 1).misfit((33, 3)) == "33 inputs are odd, and two are packed into a byte"


@pytest.mark.parametrize(("weights", "block", "width"), [("mxfp8", 32, 1 + 1 / 32), ("nvfp4", 16, 0.5 + 1 / 16)])
def test_weights_in_blocks_are_those_of_the_recipe(weights: str, block: int, width: float) -> None:
    """Two layers of matrices of 96 inputs and 4 x 5 outputs: codes, scales and bytes, and NaN for an infinity."""
    form, w = form_of(weights, 0, 1, 2), draw(2, 96, 4, 5)
    w[0, 3, 1, 2] = np.inf
    quantized = Quantized(form)
    leaves = jax.jit(quantized.quantized)(w)
    axes = ("layer", "embed", "heads", None)
    declared = quantized.declared(w.shape, axes)
    assert {end: (leaf.shape, leaf.dtype.name) for end, leaf in leaves.items()} == {
        end: (shape, dtype) for end, (shape, _, dtype) in declared.items()
    }
    sizes = {end: prod(shape) * jnp.dtype(dtype).itemsize for end, (shape, _, dtype) in declared.items()}
    assert sum(sizes.values()) - sizes.get(".scale_whole", 0) == width * w.size
    rows = np.moveaxis(w[1], 0, -1)
    blocks = jax.jit(partial(quantize, form=FORMATS[weights]))(rows)
    whole = 1 if blocks.whole is None else blocks.whole
    expected = dequantize(blocks, FORMATS[weights], jnp.dtype(jnp.float32)) * whole
    stored = jax.jit(quantized.whole)(leaves)
    np.testing.assert_array_equal(stored[1], np.moveaxis(np.asarray(expected), -1, 0))
    bad = np.isnan(stored[0])
    assert bad[:block, 1, 2].all() and (weights == "nvfp4" or bad.sum() == block)
    assert form.misfit((2, 100, 4, 5)) == f"100 inputs are not a multiple of the block, {block}"


def test_weights_in_tiles_are_those_of_deepseek() -> None:
    """Two layers of 3 x 50 inputs and 4 x 40 outputs, whose tiles span heads and end in parts."""
    quantized, w = Quantized(form_of("fp8_blocks", 0, 2, 2)), draw(2, 3, 50, 4, 40)
    leaves = jax.jit(quantized.quantized)(w)
    declared = quantized.declared(w.shape, ("layer", "heads", None, "mlp", None))
    assert declared[".scale"] == ((2, 2, 2), ("layer", None, None), "float32")
    assert {end: (leaf.shape, leaf.dtype.name) for end, leaf in leaves.items()} == {
        end: (shape, dtype) for end, (shape, _, dtype) in declared.items()
    }
    for place in np.ndindex(2, 2, 2):
        layer, row, column = place
        tile = np.s_[layer, 128 * row : 128 * (row + 1), 128 * column : 128 * (column + 1)]
        scale = np.abs(w.reshape(2, 150, 160)[tile]).max() / np.float32(448)
        assert leaves[".scale"][place] == scale
        codes = np.asarray(leaves[""]).reshape(2, 150, 160)[tile]
        np.testing.assert_array_equal(codes, (w.reshape(2, 150, 160)[tile] / scale).astype(codes.dtype))
        numbers = np.asarray(quantized.whole(leaves)).reshape(2, 150, 160)[tile]
        np.testing.assert_array_equal(numbers, codes.astype(np.float32) * scale)
    experts = Quantized(form_of("fp8_blocks", 0, 1, 1)).declared((2, 8, 256, 384), ("layer", "expert", None, "mlp"))
    assert experts[".scale"] == ((2, 8, 2, 3), ("layer", "expert", None, "mlp"), "float32")
