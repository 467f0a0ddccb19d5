"""Hashes of the bytes of arrays, the same however an array is laid out over devices."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

GOLDEN, FIRST, SECOND = 0x9E3779B9, 0x85EBCA6B, 0xC2B2AE35
"""2^32 divided by the golden ratio, and the multipliers of MurmurHash3's finalizer."""
PRIME = 0x01000193
"""Larger than any dimension: the multiplier of the FNV hash."""


def array_hash(x: Array, first: Sequence[Array] = (), rows: Sequence[int] = ()) -> Array:
    """uint32 [2]: the hash of a shard's bytes. Any single changed bit changes it; so does nearly any other difference.

    Every word is mixed with its position by a bijection, and the results are summed modulo 2^32, which gives the same
    result in any order. first: for each dimension the index of the shard's first element in the whole array, uint32 [];
    (): x is the whole array. rows: numbers of the rows in place of their indices, negative for rows that do not count;
    (): their indices.
    """
    words = _as_uint32(x)
    first = [*(first or [jnp.uint32(0)] * x.ndim)]
    numbers = jnp.asarray(rows, jnp.int32).reshape(-1, *[1] * (x.ndim - 1)) if rows else None
    if numbers is not None:
        first[0] = numbers.astype(jnp.uint32) - lax.broadcasted_iota(jnp.uint32, numbers.shape, 0)
    position = _positions(words.shape, first, x.shape)
    mixed = _finalized(words ^ (position * jnp.uint32(GOLDEN)))
    mixed = mixed if numbers is None else jnp.where(numbers >= 0, mixed, jnp.uint32(0))
    weighted = mixed * (position * jnp.uint32(2) + jnp.uint32(1))
    return jnp.stack([mixed.sum(dtype=jnp.uint32), weighted.sum(dtype=jnp.uint32)])


def _as_uint32(x: Array) -> Array:
    """The bits of each element as uint32."""
    if x.dtype == jnp.bool_:
        return x.astype(jnp.uint32)
    unsigned = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32}
    bits = jax.dtypes.itemsize_bits(x.dtype) if hasattr(jax.dtypes, "itemsize_bits") else 8 * x.dtype.itemsize
    if bits < 8:  # float32 represents every value of a 4-bit format
        x, bits = x.astype(jnp.float32), 32
    return lax.bitcast_convert_type(x, unsigned[bits // 8]).astype(jnp.uint32)


def _positions(shape: Sequence[int], first: Sequence[Array], local: Sequence[int]) -> Array:
    """uint32: a number for each element that depends only on its index in the whole array.

    The strides of dimensions are powers of a prime and ignore the sizes: they only have to distinguish dimensions.
    """
    position = jnp.zeros(shape, jnp.uint32)
    stride = 1
    for dimension in reversed(range(len(local))):
        index = lax.broadcasted_iota(jnp.uint32, tuple(shape), dimension) + first[dimension]
        position = position + index * jnp.uint32(stride)
        stride = stride * PRIME % 2**32
    return position


def _finalized(x: Array) -> Array:
    """MurmurHash3's finalizer, a bijection of uint32."""
    x = (x ^ (x >> 16)) * jnp.uint32(FIRST)
    x = (x ^ (x >> 13)) * jnp.uint32(SECOND)
    return x ^ (x >> 16)


def hash_of_arrays(hashes: np.ndarray, places: Sequence[int]) -> str:
    """16 hexadecimal digits. hashes: uint32 [arrays, 2], each of a whole array, or the sums of those of its parts.

    places: an odd number for each array, because swapping two arrays must change the result.
    """
    lanes = (hashes.astype(np.uint64) * np.array(places, np.uint64)[:, None]).sum(0) & np.uint64(0xFFFFFFFF)
    return "".join(f"{int(lane):08x}" for lane in lanes)
