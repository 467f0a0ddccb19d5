"""Weights in 8 and 4 bits: rounding to nearest under a scale, packing, and dequantization.

A matrix has dimensions [..., inputs, outputs]: optional layers and experts, then the contracted dimensions of a
product, then its output dimensions. Inputs and outputs may have several dimensions.
"""

from dataclasses import dataclass
from typing import ClassVar, Literal, Protocol

import jax.numpy as jnp
from jax import Array, lax

from megajax.mesh.sharding_rules import LogicalAxes
from megajax.precision.blocks import amax_of

BITS = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class Stored:
    """What the ways to store a matrix have in common."""

    inputs: int
    """Dimensions."""
    outputs: int
    scale_dtype: ClassVar[str] = "float32"

    def whole(self, shape: tuple[int, ...], axes: LogicalAxes) -> tuple[tuple[int, ...], LogicalAxes] | None:
        """Shape and axes of the scales of whole matrices; None: there are none."""

    def misfit(self, shape: tuple[int, ...]) -> str:
        """Why a matrix of this shape can't be stored in this form; "" if it can."""
        del shape
        return ""

    def _axis(self, ndim: int) -> int:
        """The last dimension of the inputs."""
        return ndim - self.outputs - 1

    def _divided(self, shape: tuple[int, ...], by: int) -> tuple[int, ...]:
        axis = self._axis(len(shape))
        return (*shape[:axis], shape[axis] // by, *shape[axis + 1 :])


@dataclass(frozen=True, slots=True)
class Channels(Stored):
    """One scale per output: w is approximately values * scale."""

    dtype: Literal["int8", "float8_e4m3fn"]

    def stored(self, shape: tuple[int, ...]) -> tuple[tuple[int, ...], str]:
        """Shape and dtype of the stored numbers."""
        return shape, self.dtype

    def scales(self, shape: tuple[int, ...], axes: LogicalAxes) -> tuple[tuple[int, ...], LogicalAxes]:
        """Shape and logical axes of the scales, which are float32."""
        end = len(shape) - self.outputs
        first = end - self.inputs
        return (*shape[:first], *shape[end:]), _whole_at_rest((*axes[:first], *axes[end:]))

    def quantized(self, w: Array) -> tuple[Array, Array]:
        """A float matrix -> (stored numbers, scales).

        The scale maps the largest magnitude of an output to the largest number; it is 1 for an output of zeros.
        """
        w = w.astype(jnp.float32)
        integer, top = self.dtype == "int8", largest(self.dtype)
        scale = _scale(amax_of(w, self._summed(w.ndim)), top)
        values = jnp.clip(w / self._broadcast(scale), -top, top)
        return (jnp.round(values) if integer else values).astype(self.dtype), scale

    def dequantized(self, values: Array, scale: Array) -> Array:
        """Numbers and scales -> the matrix in float32."""
        return values.astype(jnp.float32) * self._broadcast(scale)

    def _summed(self, ndim: int) -> tuple[int, ...]:
        end = ndim - self.outputs
        return tuple(range(end - self.inputs, end))

    def _broadcast(self, scale: Array) -> Array:
        return jnp.expand_dims(scale, self._summed(scale.ndim + self.inputs))


class FourBits(Protocol):
    """What the 16 values of 4 bits stand for; a frozen dataclass."""

    @property
    def largest(self) -> float:
        """The largest number."""
        ...

    def rounded(self, x: Array) -> Array:
        """Float32 numbers up to `largest` -> int8, of which the low 4 bits are kept."""
        ...

    def numbers(self, bits: Array) -> Array:
        """Int8 from -8 to 7, the 4 bits with their sign extended -> float32 numbers."""
        ...


@dataclass(frozen=True, slots=True)
class Integers:
    """-7 to 7; -8 is unused, so that positive and negative numbers have the same error."""

    largest: float = 7.0

    def rounded(self, x: Array) -> Array:
        return jnp.clip(jnp.round(x), -self.largest, self.largest).astype(jnp.int8)

    def numbers(self, bits: Array) -> Array:
        return bits.astype(jnp.float32)


@dataclass(frozen=True, slots=True)
class GroupedCodes(Stored):
    """Numbers of 4 bits, two per byte; one scale per output and group of inputs.

    Groups and pairs are along the last dimension of the inputs. The first of a pair is in the low bits.
    """

    size: int
    """Inputs per group; all inputs if there are fewer."""
    values: FourBits = Integers()

    def misfit(self, shape: tuple[int, ...]) -> str:
        size = shape[self._axis(len(shape))]
        if size % 2:
            return f"{size} inputs are odd, and two are packed into a byte"
        if size % min(self.size, size):
            return f"{size} inputs are not a multiple of the group, {self.size}"
        return ""

    def stored(self, shape: tuple[int, ...]) -> tuple[tuple[int, ...], str]:
        return self._divided(shape, 2), "uint8"

    def scales(self, shape: tuple[int, ...], axes: LogicalAxes) -> tuple[tuple[int, ...], LogicalAxes]:
        return self._divided(shape, min(self.size, shape[self._axis(len(shape))])), _whole_at_rest(axes)

    def quantized(self, w: Array) -> tuple[Array, Array]:
        """The scale maps the largest magnitude of a group to the largest number.

        It is 0 for a group of zeros, so that it does not widen the range of the scales when they are quantized too.
        """
        axis = self._axis(w.ndim)
        groups = self._grouped(w.astype(jnp.float32), w.shape[axis] // min(self.size, w.shape[axis]))
        scale = amax_of(groups, (axis + 1,)) / self.values.largest
        bits = self.values.rounded(groups / jnp.expand_dims(jnp.where(scale == 0, 1.0, scale), axis + 1))
        return pack(bits.reshape(w.shape), axis), scale

    def dequantized(self, values: Array, scale: Array) -> Array:
        axis = self._axis(values.ndim)
        unpacked = unpack(values, axis)
        groups = self._grouped(self.values.numbers(unpacked), scale.shape[axis])
        return (groups * jnp.expand_dims(scale, axis + 1)).reshape(unpacked.shape)

    def _grouped(self, w: Array, groups: int) -> Array:
        axis = self._axis(w.ndim)
        return w.reshape(*w.shape[:axis], groups, -1, *w.shape[axis + 1 :])


def pack(values: Array, axis: int) -> Array:
    """The low 4 bits of int8 [..., n, ...] -> uint8 [..., n / 2, ...] along `axis`; see `GroupedCodes`."""
    pairs = values.reshape(*values.shape[:axis], -1, 2, *values.shape[axis + 1 :]).astype(jnp.uint8)
    low, high = (lax.index_in_dim(pairs, place, axis + 1, keepdims=False) for place in (0, 1))
    return (low & 15) | (high << BITS)


def unpack(packed: Array, axis: int) -> Array:
    """The inverse of `pack`, with signs extended: int8 from -8 to 7."""
    signed = lax.bitcast_convert_type(packed, jnp.int8)
    pairs = jnp.stack([(signed << BITS) >> BITS, signed >> BITS], axis + 1)
    return pairs.reshape(*packed.shape[:axis], -1, *packed.shape[axis + 1 :])


def largest(dtype: str) -> float:
    """The largest number of an 8-bit dtype that is used."""
    return 127.0 if dtype == "int8" else float(jnp.finfo(dtype).max)


def rounded(x: Array, dtype: str, axes: int) -> tuple[Array, Array]:
    """x -> 8-bit numbers and float32 scales; elements along the last `axes` dimensions share a scale."""
    x, top = x.astype(jnp.float32), largest(dtype)
    scale = _scale(amax_of(x, tuple(range(-axes, 0))), top)
    values = jnp.clip(x / scale.reshape(*scale.shape, *[1] * axes), -top, top)
    return (jnp.round(values) if dtype == "int8" else values).astype(dtype), scale


def _scale(amax: Array, top: float) -> Array:
    """NaN and infinity stay, so that products show them."""
    return jnp.where(amax == 0, 1.0, amax / top)


def _whole_at_rest(axes: LogicalAxes) -> LogicalAxes:
    """Scales are small, so they are not sharded over data-parallel devices, as weights are along `embed`."""
    return tuple(None if name == "embed" else name for name in axes)
