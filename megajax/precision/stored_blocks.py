"""Weights stored in the blocks of MXFP8 and NVFP4, and in tiles of fp8: see `blocks`."""

from dataclasses import dataclass
from math import prod
from typing import ClassVar

import jax.numpy as jnp
from jax import Array, lax

from megajax.mesh.sharding_rules import LogicalAxes
from megajax.precision.blocks import BlockFormat, BlockScaledTensor, amax_of, dequantize, quantize, visible, whole_scale
from megajax.precision.quantization import Stored, pack, unpack

FORMATS = {"mxfp8": BlockFormat("e4m3", 32, "power_of_two", "up"), "nvfp4": BlockFormat("e2m1", 16, "nvfp4")}


@dataclass(frozen=True, slots=True)
class StoredBlocks(Stored):
    """Codes, and bits of scales; with NVFP4 also a float32 scale for each layer's, or expert's, matrix.

    Blocks lie along the last dimension of the inputs.
    """

    weights: str
    """A key of FORMATS."""
    scale_dtype: ClassVar[str] = "uint8"

    @property
    def form(self) -> BlockFormat:
        return FORMATS[self.weights]

    def misfit(self, shape: tuple[int, ...]) -> str:
        size = shape[self._axis(len(shape))]
        return f"{size} inputs are not a multiple of the block, {self.form.size}" if size % self.form.size else ""

    def stored(self, shape: tuple[int, ...]) -> tuple[tuple[int, ...], str]:
        """Two numbers of NVFP4 are in a byte."""
        return (self._divided(shape, 2), "uint8") if self.weights == "nvfp4" else (shape, "float8_e4m3fn")

    def scales(self, shape: tuple[int, ...], axes: LogicalAxes) -> tuple[tuple[int, ...], LogicalAxes]:
        whole_at_rest = tuple(None if name == "embed" else name for name in axes)
        return self._divided(shape, self.form.size), whole_at_rest

    def whole(self, shape: tuple[int, ...], axes: LogicalAxes) -> tuple[tuple[int, ...], LogicalAxes] | None:
        """Shape and axes of the scales of whole matrices; None: there are none."""
        first = len(shape) - self.outputs - self.inputs
        return (shape[:first], axes[:first]) if self.weights == "nvfp4" else None

    def quantized(self, w: Array) -> tuple[Array, ...]:
        """A float matrix -> codes, scales, and with NVFP4 the scale of the whole matrix."""
        axis = self._axis(w.ndim)
        matrix, first = visible(jnp.moveaxis(w.astype(jnp.float32), axis, -1)), w.ndim - self.outputs - self.inputs
        whole = None
        if self.weights == "nvfp4":
            amax = amax_of(w, tuple(range(first, w.ndim))).astype(jnp.float32)
            whole = whole_scale(amax, self.form)
        spread = None if whole is None else whole.reshape(*whole.shape, *[1] * (w.ndim - first))
        codes, scales, _ = quantize(matrix, self.form, whole=spread)
        codes, bits = (jnp.moveaxis(part, -1, axis) for part in (codes, lax.bitcast_convert_type(scales, jnp.uint8)))
        if whole is None:
            return codes, bits
        return pack(lax.bitcast_convert_type(codes, jnp.uint4).astype(jnp.int8), axis), bits, whole

    def dequantized(self, values: Array, scale: Array, whole: Array | None = None) -> Array:
        """The matrix in float32."""
        axis = self._axis(values.ndim)
        if whole is not None:
            values = lax.bitcast_convert_type((unpack(values, axis) & 15).astype(jnp.uint4), jnp.float4_e2m1fn)
        kind = jnp.float8_e4m3fn if self.weights == "nvfp4" else jnp.float8_e8m0fnu
        codes, scales = (jnp.moveaxis(part, axis, -1) for part in (values, lax.bitcast_convert_type(scale, kind)))
        wide = jnp.moveaxis(dequantize(BlockScaledTensor(codes, scales), self.form, jnp.dtype(jnp.float32)), -1, axis)
        return wide if whole is None else wide * whole.reshape(*whole.shape, *[1] * (wide.ndim - whole.ndim))


TILES = BlockFormat("e4m3", 128, "float32", least=1e-12)


@dataclass(frozen=True, slots=True)
class StoredTiles(Stored):
    """Codes in e4m3, and a float32 scale for each 128 inputs x 128 outputs, as in checkpoints of DeepSeek-V3.

    All inputs of a matrix are one dimension of tiles, as are all outputs. Tiles at the ends may be parts.
    """

    def stored(self, shape: tuple[int, ...]) -> tuple[tuple[int, ...], str]:
        return shape, "float8_e4m3fn"

    def scales(self, shape: tuple[int, ...], axes: LogicalAxes) -> tuple[tuple[int, ...], LogicalAxes]:
        """Those of an expert's matrix lie with it; others are on all devices, as tiles may be parts of several."""
        first, sides = self._sides(shape)
        of_sides = axes[first:] if "expert" in axes else (None, None)
        return (*shape[:first], *(-(-side // TILES.size) for side in sides)), (*axes[:first], *of_sides)

    def quantized(self, w: Array) -> tuple[Array, Array]:
        """A float matrix -> codes and scales."""
        first, sides = self._sides(w.shape)
        codes, scales, _ = quantize(visible(w.reshape(*w.shape[:first], *sides)), TILES, tiles=True)
        return codes.reshape(w.shape), scales

    def dequantized(self, values: Array, scale: Array) -> Array:
        """The matrix in float32."""
        first, sides = self._sides(values.shape)
        codes = values.reshape(*values.shape[:first], *sides)
        return dequantize(BlockScaledTensor(codes, scale), TILES, jnp.dtype(jnp.float32), tiles=True).reshape(
            values.shape
        )

    def _sides(self, shape: tuple[int, ...]) -> tuple[int, tuple[int, int]]:
        """Leading dimensions; inputs and outputs of the matrices."""
        first, end = len(shape) - self.outputs - self.inputs, len(shape) - self.outputs
        return first, (prod(shape[first:end]), prod(shape[end:]))
