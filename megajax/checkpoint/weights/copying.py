"""Fast copies of transposed arrays, and conversion of dtypes."""

import jax.numpy as jnp
import numpy as np

from megajax.config.errors import UserError

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
