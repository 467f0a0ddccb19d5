"""Weights of a `WeightSource` on a mesh: each process reads the shards of its devices."""

from collections.abc import Callable, Sequence
from functools import cache
from math import prod
from typing import Any

import jax
import numpy as np
from jax import Array

from megajax.checkpoint.boxes import Box, box_of, shape_of
from megajax.checkpoint.weights.foreign import WeightSource

PART_ELEMENTS = 2**24
"""Elements of a stacked weight to read at once, rounded up to whole rows."""


def placed(weights: WeightSource, path: str, like: jax.ShapeDtypeStruct, rows: Sequence[int] | None) -> Array:
    """A weight in the shape, dtype and sharding of `like`.

    rows: of a stacked weight, the layer of each row, -1 for padding rows of zeros; None: it is not stacked.
    """

    def read(box: Box) -> np.ndarray:
        if rows is None:
            return weights.read(path, box).astype(like.dtype)
        return _rows(weights, path, rows[box[0]], box[1:], like.dtype)

    return array_of(like, read)


def array_of(like: jax.ShapeDtypeStruct, read: Callable[[Box], np.ndarray]) -> Array:
    """An array in the shape and sharding of `like`. read: returns a box; called once for each box on local devices."""
    read_once = cache(read)  # several devices may hold the same box
    return jax.make_array_from_callback(
        like.shape, like.sharding, lambda index: read_once(box_of(index or (), like.shape))
    )


def _rows(weights: WeightSource, path: str, rows: Sequence[int], inner: Box, dtype: Any) -> np.ndarray:
    """A box of these rows of a stacked weight in another dtype, read a part at a time."""
    shape = shape_of(inner)
    result, first, most_rows = np.zeros((len(rows), *shape), dtype), 0, -(-PART_ELEMENTS // max(1, prod(shape)))
    while first < len(rows):
        row, end = rows[first], first + 1
        while end < len(rows) and row >= 0 and rows[end] == row + end - first and end - first < most_rows:
            end += 1
        if row >= 0:
            result[first:end] = weights.read(path, (slice(row, row + end - first), *inner))
        first = end
    return result
