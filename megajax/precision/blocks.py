"""Numbers in blocks with a scale each: OCP Microscaling formats (MX, version 1.0), NVFP4 and DeepSeek-V3's fp8 blocks.

A block is `size` numbers along the dimension that a product sums over, or a tile of size x size numbers of a matrix.
Codes are numbers of the element's format, and code * scale is the number that they stand for. Scales are

* powers of two, stored as exponents (e8m0). `ROUNDINGS` says which power of two follows from a block's amax;
* with NVFP4 numbers in e4m3 times one float32 scale of the whole tensor, amax / (448 * 6);
* with `float32`, amax / 448, as in DeepSeek-V3 (2024, section 3.3).

A block that holds a NaN has NaN as its scale. Infinities make it NaN too, but with powers of two they are clipped, as
torchao does: the largest number under a scale that is near the end of float32's range. `visible` makes them NaN before.
Sums of products of codes are exact in float32, and codes times scales in bfloat16, but with `float32` scales.
"""

from collections.abc import Callable, Mapping
from math import prod
from types import MappingProxyType
from typing import Literal, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

type Rounding = Literal["floor", "ceil", "even", "up"]
ELEMENTS = MappingProxyType({"e4m3": jnp.float8_e4m3fn, "e5m2": jnp.float8_e5m2, "e2m1": jnp.float4_e2m1fn})
NAN_EXPONENT = 255
"""The NaN of e8m0."""
SMALLEST_SCALE = 2.0**-6
"""Of a block in NVFP4: the smallest normal number of e4m3."""
SMALLEST_WHOLE = 2.0**-120
"""Of a tensor in NVFP4. Under a smaller one, factors on numbers would be infinite, and its zeros NaN."""
HADAMARD = 16
"""Numbers that one random Hadamard transform mixes."""


class BlockFormat(NamedTuple):
    """Format of a tensor."""

    element: Literal["e4m3", "e5m2", "e2m1"]
    size: int
    scales: Literal["power_of_two", "float32", "nvfp4"] = "power_of_two"
    rounding: Rounding = "floor"
    least: float = 0.0
    """Scales are those of blocks whose amax is at least this."""

    @property
    def largest(self) -> float:
        """The largest number of the element's format."""
        return float(jnp.finfo(ELEMENTS[self.element]).max)


class BlockScaledTensor(NamedTuple):
    """A tensor [..., N, K] in blocks."""

    codes: Array
    """In the element's format, [..., N, K]."""
    scales: Array
    """e8m0, e4m3 or float32: [..., N, K / size], or [..., N / size, K / size] for tiles, rounded up."""
    whole: Array | None = None
    """The scale of the whole tensor, float32 []; None: 1."""


def quantize(
    x: Array, form: BlockFormat, *, tiles: bool = False, stochastic: bool = False, whole: Array | None = None
) -> BlockScaledTensor:
    """x [..., N, K] in blocks along K, or in tiles of N and K; parts of blocks at the ends count as blocks.

    stochastic: rounds to one of the two neighbours, with probabilities that keep the mean; e2m1 only. The random bits
    are a hash of the number and its place, so that a step repeats exactly.
    whole: with NVFP4, the scales of the tensors that blocks are of, which broadcast to blocks; None: x is one tensor.
    """
    parts = _parts(x.astype(jnp.float32), form.size, tiles=tiles)
    scales, whole, factor = _scales(amax_of(parts, (-3, -1)), form, whole)
    scaled = parts / _for_each(scales) if factor is None else parts * _for_each(factor)
    scaled = jnp.clip(scaled, -form.largest, form.largest)
    codes = (_stochastic(scaled) if stochastic else scaled).astype(ELEMENTS[form.element])
    # The compiler may leave out a conversion to few bits and back, and so its rounding.
    return BlockScaledTensor(lax.optimization_barrier(_joined(codes, x.shape)), scales, whole)


def amax_of(x: Array, axes: tuple[int, ...] | None = None) -> Array:
    """Largest magnitudes over these dimensions, in x's dtype; NaN where one is NaN, which float maxima of CPUs drop.

    As integers, magnitudes are in the same order, and NaN is the largest.
    """
    integers = jnp.dtype(f"uint{8 * x.dtype.itemsize}")
    bits = lax.bitcast_convert_type(x, integers) & jnp.asarray(jnp.iinfo(integers).max // 2, integers)
    return lax.bitcast_convert_type(bits.max(axes, initial=0), x.dtype)


def visible(x: Array) -> Array:
    """x with NaN for infinities, so that what is not finite stays visible in all formats."""
    return jnp.where(jnp.isinf(x), jnp.nan, x)


def dequantize(blocks: BlockScaledTensor, form: BlockFormat, dtype: jnp.dtype, *, tiles: bool = False) -> Array:
    """Codes times scales [..., N, K], without the scale of the whole tensor."""
    parts = _parts(blocks.codes, form.size, tiles=tiles).astype(dtype)
    return _joined(parts * _for_each(blocks.scales.astype(dtype)), blocks.codes.shape)


def hadamard(x: Array, *, seed: int = 0) -> Array:
    """The random Hadamard transform of each 16 numbers along the last dimension of x, H diag(signs) x / 4.

    Orthogonal, so the product of two transformed matrices is the product of the matrices. The signs are fixed.
    """
    signs = np.random.default_rng(seed).choice([-1.0, 1.0], HADAMARD)
    matrix = np.ones((1, 1))
    while len(matrix) < HADAMARD:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    groups = x.reshape(*x.shape[:-1], -1, HADAMARD)
    transform = jnp.asarray(matrix * signs / HADAMARD**0.5, x.dtype)
    mixed = jnp.einsum("...k,jk->...j", groups, transform, precision=lax.Precision.HIGHEST)
    return mixed.reshape(x.shape)


def _parts(x: Array, size: int, *, tiles: bool) -> Array:
    """[..., N, K] -> [..., blocks of N, their height, blocks of K, size], with zeros at the ends."""
    rows, columns = x.shape[-2:]
    height = size if tiles else 1
    if rows % height or columns % size:
        x = jnp.pad(x, [(0, 0)] * (x.ndim - 2) + [(0, -rows % height), (0, -columns % size)])
    return x.reshape(*x.shape[:-2], -1, height, x.shape[-1] // size, size)


def _for_each(scales: Array) -> Array:
    """Scales [..., blocks of N, blocks of K] for the numbers of `_parts`."""
    return scales[..., :, None, :, None]


def _joined(parts: Array, shape: tuple[int, ...]) -> Array:
    """The inverse of `_parts`."""
    *_, rows, height, columns, size = parts.shape
    return parts.reshape(*shape[:-2], rows * height, columns * size)[..., : shape[-2], : shape[-1]]


def whole_scale(amax: Array, form: BlockFormat) -> Array:
    """The scale of a whole tensor with this largest magnitude, with NVFP4; 1 for what is as small as zeros."""
    whole = _quotient(amax, float(jnp.finfo(jnp.float8_e4m3fn).max) * form.largest)
    return jnp.where(whole < SMALLEST_WHOLE, 1.0, whole)


def _scales(amax: Array, form: BlockFormat, whole: Array | None) -> tuple[Array, Array | None, Array | None]:
    """Scales of blocks, that of the whole tensor, and factors on numbers before they are rounded; None: 1 / scales."""
    finite = jnp.isfinite(amax)
    if form.scales == "nvfp4":
        whole = whole_scale(amax_of(amax), form) if whole is None else whole
        wanted = jnp.maximum(_quotient(amax, form.largest), -whole) / whole
        scales = jnp.clip(wanted, SMALLEST_SCALE, 448.0).astype(jnp.float8_e4m3fn)
        scales = jnp.where(finite, scales, jnp.asarray(jnp.nan, scales.dtype))
        return scales, whole, (1 / whole) / scales.astype(jnp.float32)
    if form.scales == "float32":
        scales = jnp.where(finite, _quotient(jnp.maximum(amax, form.least), form.largest), jnp.nan)
        return scales, None, None
    bits = lax.bitcast_convert_type(jnp.maximum(amax, form.least), jnp.uint32)
    mantissa = lax.bitcast_convert_type((bits & 0x7FFFFF) | 0x3F800000, jnp.float32)
    fraction, exponent = np.frexp(form.largest)
    more = ROUNDINGS[form.rounding](mantissa, 2 * float(fraction), int(jnp.finfo(ELEMENTS[form.element]).nmant))
    code = jnp.clip((bits >> 23).astype(jnp.int32) - int(exponent - 1) + more, 0, NAN_EXPONENT - 1)
    code = jnp.where(jnp.isnan(amax), NAN_EXPONENT, code)
    factor = lax.bitcast_convert_type(jnp.clip(254 - code, 1, 253).astype(jnp.uint32) << 23, jnp.float32)
    scales = lax.bitcast_convert_type(code.astype(jnp.uint8), jnp.float8_e8m0fnu)
    return scales, None, factor


ROUNDINGS: Mapping[Rounding, Callable[[Array, float, int], Array | int]] = MappingProxyType(
    {
        "floor": lambda mantissa, largest, digits: 0,
        "ceil": lambda mantissa, largest, digits: mantissa > 1,
        "even": lambda mantissa, largest, digits: mantissa >= 2 - 2.0 ** -(digits + 1),
        "up": lambda mantissa, largest, digits: mantissa > largest,
    }
)
"""Whether the exponent of a scale is one more than that of amax over that of the largest number of the format.

floor: never, as in the MX specification; numbers above the largest are clipped. ceil: unless amax is a power of two.
even: if amax, rounded to the digits of the format, has the next exponent. up: if amax would be clipped.
"""


def _quotient(x: Array, constant: float) -> Array:
    """x / constant of x >= 0, rounded once: the compiler multiplies by the reciprocal of a constant, rounded twice."""
    return x / lax.max(jnp.float32(constant), -x)


def _stochastic(x: Array) -> Array:
    """Numbers within +-6 rounded to one of the two nearest numbers of e2m1, float32."""
    size = jnp.abs(x)
    step = jnp.where(size < 2, 0.5, jnp.where(size < 4, 1.0, 2.0))
    return jnp.sign(x) * jnp.floor(size / step + _uniform(x)) * step


def _uniform(x: Array) -> Array:
    """Numbers in [0, 1) of 24 random bits, a hash of each number and its place (the finalizer of MurmurHash3)."""
    places = sum(
        lax.broadcasted_iota(jnp.uint32, x.shape, axis) * jnp.uint32(prod(x.shape[axis + 1 :]) % 2**32)
        for axis in range(x.ndim)
    )
    bits = lax.bitcast_convert_type(x, jnp.uint32) ^ (places * jnp.uint32(0x9E3779B9))
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        bits = (bits ^ (bits >> shift)) * jnp.uint32(factor)
    return ((bits ^ (bits >> 16)) >> 8).astype(jnp.float32) * 2.0**-24
