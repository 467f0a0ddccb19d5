"""Products with quantized matrices. A matrix is dequantized for at most one layer at a time."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import jax.numpy as jnp
from jax import Array, lax

from megajax.mesh.layout import exact
from megajax.mesh.rules import LogicalAxes
from megajax.precision import fp8
from megajax.precision.quantization import Channels, Form, Groups, largest, rounded

ARRAY, SCALE, FACTOR, AMAX = "", ".scale", ".input_factor", ".input_amax"
"""Path suffixes of a quantized matrix's leaves: quantized values, scales, factors on inputs, and the expected largest
magnitude of inputs."""
E4M3 = "float8_e4m3fn"

type Leaves = Mapping[str, Array]


class Product(Protocol):
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

    def declared(
        self, shape: tuple[int, ...], axes: LogicalAxes
    ) -> dict[str, tuple[tuple[int, ...], LogicalAxes, str]]:
        """Leaf name -> shape, logical axes and dtype, for a matrix of this shape."""
        form, end = self.form, len(shape) - self.form.outputs
        numbers, dtype = form.stored(shape)
        leaves = {ARRAY: (numbers, axes, dtype), SCALE: (*form.scales(shape, axes), "float32")}
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
        values, scale = self.form.quantized(w)
        return {ARRAY: values, SCALE: scale, **leaves}

    def whole(self, leaves: Leaves) -> Array:
        """The matrix that inputs are multiplied by, float32, before they are rounded."""
        w = self.form.dequantized(leaves[ARRAY], leaves[SCALE])
        return w * self._along_inputs(leaves[FACTOR]) if self.balanced else w

    def product(self, equation: str, x: Array, leaves: Leaves) -> Array:
        """einsum of x and the matrix, in x's dtype."""
        first, second, result = equation.replace("->", ",").split(",")
        inputs, outputs = second[: self.form.inputs], second[self.form.inputs :]
        if not (first.endswith(inputs) and result.endswith(outputs)) or {*inputs} & {*result}:
            return exact(equation, x, self.whole(leaves).astype(x.dtype))
        if self.balanced:
            x = x * _behind(x.ndim, leaves[FACTOR].astype(x.dtype))
        if self.activations:
            return self._rounded_product((first, second, result), x, leaves)
        if not isinstance(self.form, Channels):
            return exact(equation, x, self.form.dequantized(leaves[ARRAY], leaves[SCALE]).astype(x.dtype))
        # Sums of integers may exceed 65504, the maximum of float16.
        dtype = jnp.float32 if x.dtype == jnp.float16 else x.dtype
        y = jnp.einsum(equation, x, leaves[ARRAY].astype(x.dtype), preferred_element_type=dtype)
        return (y * _behind(y.ndim, leaves[SCALE])).astype(x.dtype)

    def _rounded_product(self, letters: fp8.Letters, x: Array, leaves: Leaves) -> Array:
        """Product of 8-bit values, inputs and matrix in e4m3; both scales are applied to the result."""
        if self.static:
            scale = leaves[AMAX] / largest(E4M3)
            values = jnp.clip(x.astype(jnp.float32) / scale, -largest(E4M3), largest(E4M3)).astype(E4M3)
        else:
            values, scale = rounded(x, E4M3, self.form.inputs)
            # The remaining dimensions of x, then outputs: [B, S] -> [B, S, 1, 1] for "bsnh".
            scale = scale.reshape(*scale.shape, *[1] * (len(letters[2]) - scale.ndim))
        unit_scale = jnp.float32(1)
        small, matrix = (fp8.Quantized(x, unit_scale, unit_scale) for x in (values, leaves[ARRAY]))
        dtype = jnp.dtype(jnp.float32) if x.dtype == jnp.float16 else x.dtype
        y = fp8.product(letters, small, matrix, dtype=dtype, precision=lax.Precision.DEFAULT)
        return (y * scale * _behind(y.ndim, leaves[SCALE])).astype(x.dtype)

    def _along_inputs(self, factor: Array) -> Array:
        return factor.reshape(*factor.shape, *[1] * self.form.outputs)


def _behind(ndim: int, x: Array) -> Array:
    """x with leading dimensions of 1 added, `ndim` in total."""
    return x.reshape(*[1] * (ndim - x.ndim), *x.shape)


def form_of(weights: str, group: int, inputs: int, outputs: int) -> Form:
    """The storage format that the config calls `weights`."""
    if weights == "int4":
        return Groups(group, inputs, outputs)
    return Channels("int8" if weights == "int8" else E4M3, inputs, outputs)
