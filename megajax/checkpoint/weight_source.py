"""Weights as readers give them: any box of one, from any source, and the array of a mesh that holds it."""

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from math import prod
from typing import NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from megajax.checkpoint.boxes import Box, box_of, shape_of
from megajax.config.errors import UserError

ITEMSIZE = 4
"""Largest bytes of an element of a weight, for the size of chunks."""


class Entry(NamedTuple):
    """A stored array."""

    shape: tuple[int, ...]
    dtype: np.dtype


class WeightSource(Protocol):
    """Weights of a model, by path. Stacked weights have their layers in natural order."""

    where: str
    """The folder, for messages."""

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Path -> shape."""
        ...

    def read(self, path: str, box: Box) -> np.ndarray:
        """A box of a weight, in its stored dtype."""
        ...


TILE = 128
"""Elements along both sides of a tile. Tiles of two bytes an element fit into a second-level cache."""


def copy_into(target: np.ndarray, source: np.ndarray) -> None:
    """target[...] = source. Copies of transposed arrays go tile by tile, five times as fast as numpy."""
    sides = [
        (abs(stride), axis)
        for axis, (size, stride) in enumerate(zip(source.shape, source.strides, strict=True))
        if size > 1
    ]
    fastest, last = min(sides, default=(0, -1))[1], source.ndim - 1
    if (
        source.dtype != target.dtype
        or fastest in (-1, last)
        or source.size < TILE * TILE
        or min(source.shape[fastest], source.shape[last]) < TILE // 4
    ):
        target[...] = source
        return
    rows, columns = source.shape[fastest], source.shape[last]
    # As integers: numpy copies foreign dtypes such as bfloat16 an element at a time.
    bits = f"u{source.itemsize}"
    source, target = (np.moveaxis(array.view(bits), (fastest, last), (-2, -1)) for array in (source, target))
    for place in np.ndindex(source.shape[:-2]):
        target_matrix, source_matrix = target[place], source[place]
        for row in range(0, rows, TILE):
            for column in range(0, columns, TILE):
                tile = slice(row, row + TILE), slice(column, column + TILE)
                target_matrix[tile] = source_matrix[tile]


def contiguous(array: np.ndarray) -> np.ndarray:
    """The array, or a C-contiguous copy."""
    if array.flags.c_contiguous:
        return array
    result = np.empty(array.shape, array.dtype)
    copy_into(result, array)
    return result


def converted(values: np.ndarray, dtype: np.dtype, name: str) -> np.ndarray:
    """The values in another dtype, contiguous. Raises UserError for finite values that overflow."""
    with np.errstate(over="ignore"):
        result = values.astype(dtype, order="C", copy=False)
    if values.dtype == dtype:
        return result
    if 2 * float(jnp.finfo(dtype).max) < float(jnp.finfo(values.dtype).max):
        overflow = np.isfinite(values) & ~np.isfinite(result)
        if overflow.any():
            largest = float(np.abs(values[overflow].astype(np.float64)).max())
            fits = largest <= float(jnp.finfo(jnp.bfloat16).max)
            advice = ": use --dtype=bfloat16" if fits else ", and neither can float32"
            raise UserError(f"{name} has values up to {largest:g}, which {dtype.name} can't hold{advice}")
    return result


PART_ELEMENTS = 2**24
"""Elements of a stacked weight to read at once, rounded up to whole rows."""


def placed(weights: WeightSource, path: str, like: jax.ShapeDtypeStruct, rows: Sequence[int] | None) -> Array:
    """A weight in the shape, dtype and sharding of `like`.

    rows: of a stacked weight, the layer of each row, -1 for padding rows of zeros; None: it is not stacked.
    """

    def read(box: Box) -> np.ndarray:
        if rows is None:
            return _cast(weights.read(path, box), like.dtype, f"{weights.where}: {path}")
        return _rows(weights, path, rows[box[0]], box[1:], like.dtype)

    return array_of(like, read)


def array_of(like: jax.ShapeDtypeStruct, read: Callable[[Box], np.ndarray]) -> Array:
    """An array in the shape and sharding of `like`. read: returns a box; called once for each box on local devices."""
    read_once = cache(read)  # several devices may hold the same box
    return jax.make_array_from_callback(
        like.shape, like.sharding, lambda index: read_once(box_of(index or (), like.shape))
    )


def _rows(weights: WeightSource, path: str, rows: Sequence[int], inner: Box, dtype: np.dtype) -> np.ndarray:
    """A box of these rows of a stacked weight in another dtype, read a part at a time."""
    shape = shape_of(inner)
    result, first, most_rows = np.zeros((len(rows), *shape), dtype), 0, -(-PART_ELEMENTS // max(1, prod(shape)))
    while first < len(rows):
        row, end = rows[first], first + 1
        while end < len(rows) and row >= 0 and rows[end] == row + end - first and end - first < most_rows:
            end += 1
        if row >= 0:
            values = weights.read(path, (slice(row, row + end - first), *inner))
            result[first:end] = _cast(values, result.dtype, f"{weights.where}: {path}")
        first = end
    return result


def _cast(values: np.ndarray, dtype: np.dtype, name: str) -> np.ndarray:
    """The values in another dtype. Raises UserError for one of 8 bits, whose numbers mean nothing without scales."""
    if values.dtype != dtype and 1 in (values.dtype.itemsize, dtype.itemsize):
        raise UserError(f"{name} is stored in {values.dtype.name}, and this model has {dtype.name}")
    return values.astype(dtype, copy=False)


def whole(weights: WeightSource, path: str) -> np.ndarray:
    """All of a weight, in its stored dtype."""
    return weights.read(path, box_of((), weights.shapes[path]))
