"""Numbers that stand for the entries of a table: NF4, and the 8 bits of doubly quantized scales.

From QLoRA (Dettmers et al. 2023) and 8-bit optimizers (Dettmers et al. 2022), with the tables of bitsandbytes.
"""

from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np
from jax import Array

NF4 = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip
"""Quantiles of a normal distribution, scaled to [-1, 1], with an exact zero."""


@dataclass(frozen=True, slots=True)
class NormalFloat:
    """NF4: the nearest entry of the table."""

    largest: float = 1.0

    def rounded(self, x: Array) -> Array:
        return nearest(x, np.array(NF4, np.float32)).astype(jnp.int8)

    def numbers(self, bits: Array) -> Array:
        return jnp.asarray(NF4, jnp.float32)[bits & 15]


@dataclass(frozen=True, slots=True)
class DoubleScales:
    """Scales in 8 bits: differences from the mean of an output's scales, relative to the largest of them.

    bitsandbytes has one mean for a whole matrix, and blocks of 256 scales across outputs. Here both belong to one
    output, so that outputs may be sharded.
    """

    def quantized(self, scale: Array, axes: tuple[int, ...]) -> tuple[Array, Array, Array]:
        """Float32 scales -> codes uint8, largest differences and means, which have no dimensions `axes`."""
        mean = jnp.mean(scale, axes)
        differences = scale - jnp.expand_dims(mean, axes)
        largest = jnp.max(jnp.abs(differences), axes)
        unit = jnp.where(largest == 0, 1.0, largest)
        return nearest(differences / jnp.expand_dims(unit, axes), dynamic_map()).astype(jnp.uint8), largest, mean

    def dequantized(self, codes: Array, largest: Array, mean: Array, axes: tuple[int, ...]) -> Array:
        """The scales again."""
        differences = jnp.asarray(dynamic_map())[codes.astype(jnp.int32)]
        return differences * jnp.expand_dims(largest, axes) + jnp.expand_dims(mean, axes)


def dynamic_map() -> np.ndarray:
    """The 256 numbers of dynamic 8-bit quantization, float32, sorted, from -0.993 to 1.

    An exponent in unary, 10**-6 to 1, and a linear fraction from 0.1 to 1 of all bits that remain, each in the middle
    of its interval.
    """
    numbers = [0.0, 1.0]
    for exponent in range(7):
        bounds = np.linspace(0.1, 1, 2**exponent + 1)
        middles = 10.0 ** (exponent - 6) * (bounds[:-1] + bounds[1:]) / 2
        numbers += [*middles, *-middles]
    return np.sort(np.array(numbers, np.float32))


def nearest(x: Array, table: np.ndarray) -> Array:
    """Index of the nearest entry of a sorted table, int32; the lower one of two."""
    return jnp.searchsorted(jnp.asarray((table[:-1] + table[1:]) / 2), x, side="left")
