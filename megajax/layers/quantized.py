"""Products with quantized matrices. A matrix is dequantized for at most one layer at a time."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import jax
import jax.numpy as jnp
from jax import Array, lax

from megajax.mesh.layout import exact
from megajax.mesh.sharding_rules import LogicalAxes
from megajax.precision import fp8
from megajax.precision.codebooks import DoubleScales, NormalFloat
from megajax.precision.matmul import Letters
from megajax.precision.quantization import Channels, FourBits, GroupedCodes, Integers, largest, rounded
from megajax.precision.stored_blocks import FORMATS, StoredBlocks, StoredTiles

ARRAY, SCALE, FACTOR, AMAX = "", ".scale", ".input_factor", ".input_amax"
"""Path suffixes of a quantized matrix's leaves: quantized values, scales, factors on inputs, and the expected largest
magnitude of inputs."""
DIFFERENCE, MEAN = ".scale_difference", ".scale_mean"
"""Of scales that are quantized themselves: see `DoubleScales`."""
WHOLE = ".scale_whole"
"""Scales of whole matrices: see `StoredBlocks`."""
BESIDE = (SCALE, DIFFERENCE, MEAN, WHOLE, FACTOR, AMAX)
"""The suffixes of leaves beside the values."""
E4M3 = "float8_e4m3fn"

type Leaves = Mapping[str, Array]
type Form = Channels | GroupedCodes | StoredBlocks | StoredTiles
"""How a matrix is stored. All have the same methods."""


class StoredProduct(Protocol):
    """How a `Matrix` that is not a float array is multiplied by. leaves: its arrays by name."""

    def whole(self, leaves: Leaves) -> Array:
        """The matrix that inputs are multiplied by."""
        ...

    def product(self, equation: str, x: Array, leaves: Leaves) -> Array:
        """einsum of x and the matrix, in x's dtype."""
        ...


@dataclass(frozen=True, slots=True)
class Quantized:
    """How a matrix is stored and multiplied by. Hashable; its arrays are leaves of the `Matrix` that it belongs to."""

    form: Form
    balanced: bool = False
    """Inputs are multiplied by factors."""
    activations: bool = False
    """Inputs are rounded to 8 bits; the form is Channels in e4m3."""
    static: bool = False
    """Inputs have one scale, from their expected largest magnitude."""
    double: bool = False
    """Scales are quantized too; the form is Groups."""

    def declared(
        self, shape: tuple[int, ...], axes: LogicalAxes
    ) -> dict[str, tuple[tuple[int, ...], LogicalAxes, str]]:
        """Leaf name -> shape, logical axes and dtype, for a matrix of this shape."""
        form, end = self.form, len(shape) - self.form.outputs
        numbers, dtype = form.stored(shape)
        leaves = {
            ARRAY: (numbers, axes, dtype),
            SCALE: (*form.scales(shape, axes), "uint8" if self.double else form.scale_dtype),
        }
        if (whole := form.whole(shape, axes)) is not None:
            leaves[WHOLE] = (*whole, "float32")
        if self.double:
            of_outputs = Channels("int8", inputs=form.inputs, outputs=form.outputs).scales(shape, axes)
            leaves |= {DIFFERENCE: (*of_outputs, "float32"), MEAN: (*of_outputs, "float32")}
        if self.balanced:
            leaves[FACTOR] = (shape[:end], tuple(None if name == "embed" else name for name in axes[:end]), "float32")
        if self.static:
            first = end - form.inputs
            leaves[AMAX] = (shape[:first], axes[:first], "float32")
        return leaves

    def quantized(self, w: Array, factor: Array | None = None, amax: Array | None = None) -> dict[str, Array]:
        """The leaves of a float matrix. factor [..., inputs]: on inputs, amax [...]: of inputs: leaves if given."""
        leaves = {}
        if factor is not None:
            leaves[FACTOR] = factor
            w = w.astype(jnp.float32) / self._along_inputs(factor)
        if amax is not None:
            leaves[AMAX] = amax
        values, scale, *whole = self.form.quantized(w)
        if not self.double:
            return {ARRAY: values, SCALE: scale, **dict(zip((WHOLE,), whole, strict=False)), **leaves}
        scales = DoubleScales().quantized(scale, self._inputs(w.ndim))
        return {ARRAY: values, **dict(zip((SCALE, DIFFERENCE, MEAN), scales, strict=True)), **leaves}

    def whole(self, leaves: Leaves) -> Array:
        """The matrix that inputs are multiplied by, float32, before they are rounded."""
        w = self._dequantized(leaves)
        return w * self._along_inputs(leaves[FACTOR]) if self.balanced else w

    def product(self, equation: str, x: Array, leaves: Leaves) -> Array:
        """einsum of x and the matrix, in x's dtype. Its gradient dequantizes the matrix again, so none is kept."""
        return jax.checkpoint(partial(self._product, equation))(x, leaves)

    def _product(self, equation: str, x: Array, leaves: Leaves) -> Array:
        first, second, result = equation.replace("->", ",").split(",")
        inputs, outputs = second[: self.form.inputs], second[self.form.inputs :]
        if not (first.endswith(inputs) and result.endswith(outputs)) or {*inputs} & {*result}:
            return exact(equation, x, self.whole(leaves).astype(x.dtype))
        if self.balanced:
            x = x * _behind(x.ndim, leaves[FACTOR].astype(x.dtype))
        if self.activations:
            return self._rounded_product(Letters(first, second, result), x, leaves)
        if not isinstance(self.form, Channels):
            return exact(equation, x, self._dequantized(leaves).astype(x.dtype))
        # Sums of integers may exceed 65504, the maximum of float16.
        dtype = jnp.float32 if x.dtype == jnp.float16 else x.dtype
        y = jnp.einsum(equation, x, leaves[ARRAY].astype(x.dtype), preferred_element_type=dtype)
        return (y * _behind(y.ndim, leaves[SCALE])).astype(x.dtype)

    def _rounded_product(self, letters: Letters, x: Array, leaves: Leaves) -> Array:
        """Product of 8-bit values, inputs and matrix in e4m3; both scales are applied to the result."""
        if self.static:
            scale = leaves[AMAX] / largest(E4M3)
            values = jnp.clip(x.astype(jnp.float32) / scale, -largest(E4M3), largest(E4M3)).astype(E4M3)
        else:
            values, scale = rounded(x, E4M3, self.form.inputs)
            # The remaining dimensions of x, then outputs: [B, S] -> [B, S, 1, 1] for "bsnh".
            scale = scale.reshape(*scale.shape, *[1] * (len(letters[2]) - scale.ndim))
        unit_scale = jnp.float32(1)
        small, matrix = (fp8.QuantizedTensor(x, unit_scale, unit_scale) for x in (values, leaves[ARRAY]))
        dtype = jnp.dtype(jnp.float32) if x.dtype == jnp.float16 else x.dtype
        y = fp8.product(letters, small, matrix, dtype=dtype, precision=lax.Precision.DEFAULT)
        return (y * scale * _behind(y.ndim, leaves[SCALE])).astype(x.dtype)

    def _dequantized(self, leaves: Leaves) -> Array:
        """The matrix without factors on inputs, float32."""
        scale = leaves[SCALE]
        if self.double:
            scale = DoubleScales().dequantized(scale, leaves[DIFFERENCE], leaves[MEAN], self._inputs(scale.ndim))
        return self.form.dequantized(leaves[ARRAY], scale, *(leaves[end] for end in (WHOLE,) if end in leaves))

    def _inputs(self, ndim: int) -> tuple[int, ...]:
        """The dimensions of inputs of an array like the matrix."""
        end = ndim - self.form.outputs
        return tuple(range(end - self.form.inputs, end))

    def _along_inputs(self, factor: Array) -> Array:
        return factor.reshape(*factor.shape, *[1] * self.form.outputs)


def _behind(ndim: int, x: Array) -> Array:
    """x with leading dimensions of 1 added, `ndim` in total."""
    return x.reshape(*[1] * (ndim - x.ndim), *x.shape)


FOUR_BITS: Mapping[str, FourBits] = {"int4": Integers(), "nf4": NormalFloat()}
"""Formats of 4 bits by their names in configs."""


def form_of(weights: str, group: int, inputs: int, outputs: int) -> Form:
    """The storage format that the config calls `weights`."""
    sides = {"inputs": inputs, "outputs": outputs}
    if weights in FORMATS:
        return StoredBlocks(weights, **sides)
    if weights == "fp8_blocks":
        return StoredTiles(**sides)
    if weights in FOUR_BITS:
        return GroupedCodes(group, FOUR_BITS[weights], **sides)
    return Channels("int8" if weights == "int8" else E4M3, **sides)
