"""Weights of a `WeightSource` on a mesh: each process reads what its devices have."""

from collections.abc import Sequence
from math import prod
from typing import Any

import jax
import numpy as np
from jax import Array

from megajax.checkpoint.weights.foreign import Box, WeightSource

PART = 2**24
"""Elements of a stacked weight from which on no more rows are read at once."""


def placed(weights: WeightSource, path: str, like: jax.ShapeDtypeStruct, rows: Sequence[int] | None) -> Array:
    """A weight in the shape, dtype and sharding of `like`.

    rows: of a stacked weight, the layer of each row, -1 for zeros that are no layer; None: it is not stacked.
    """
    shards: dict[Box, np.ndarray] = {}

    def shard(index: tuple[slice, ...] | None) -> np.ndarray:
        ends = [side.indices(size)[:2] for side, size in zip(index or (), like.shape, strict=True)]
        box = tuple(slice(start, stop) for start, stop in ends)
        if box in shards:  # several devices have the same
            return shards[box]
        if rows is None:
            shards[box] = weights.read(path, box).astype(like.dtype)
        else:
            shards[box] = _rows(weights, path, rows[box[0]], box[1:], like.dtype)
        return shards[box]

    return jax.make_array_from_callback(like.shape, like.sharding, shard)


def _rows(weights: WeightSource, path: str, rows: Sequence[int], inner: Box, dtype: Any) -> np.ndarray:
    """A box of these rows of a stacked weight in another dtype, read a part at a time."""
    shape = [side.stop - side.start for side in inner]
    result, first = np.zeros((len(rows), *shape), dtype), 0
    while first < len(rows):
        row, end = rows[first], first + 1
        while end < len(rows) and row >= 0 and rows[end] == row + end - first and (end - first) * prod(shape) < PART:
            end += 1
        if row >= 0:
            result[first:end] = weights.read(path, (slice(row, row + end - first), *inner))
        first = end
    return result
