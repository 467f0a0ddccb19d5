"""Tensors of other libraries made of our weights, one at a time."""

import numpy as np

from megajax.checkpoint.weights.array_writer import boxes, chunk_shape
from megajax.checkpoint.weights.copying import contiguous
from megajax.checkpoint.weights.foreign import WeightSource, box_of
from megajax.checkpoint.weights.run_writer import converted
from megajax.checkpoint.weights.tensor_table import Mapped, Piece

ITEMSIZE = 4
"""Bytes of an element of ours, at most, when the parts that are read at once are measured."""


def theirs(tensor: Mapped, weights: WeightSource, dtype: np.dtype) -> np.ndarray:
    """A tensor, contiguous. Memory has it twice at most, and a part of our weights."""
    return contiguous(tensor.theirs([_piece(piece, weights, dtype) for piece in tensor.pieces]))


def _piece(piece: Piece, weights: WeightSource, dtype: np.dtype) -> np.ndarray:
    """A piece of our weights; zeros for an observation that the source does not keep."""
    shape = weights.shapes().get(piece.path)
    if shape is None:
        return np.zeros(piece.shape, dtype)
    place = box_of(piece.index, shape)
    sizes = [side.stop - side.start for side in place]
    result = np.empty(sizes, dtype)
    for part in boxes(sizes, chunk_shape(sizes, ITEMSIZE)):
        box = tuple(slice(a.start + b.start, a.start + b.stop) for a, b in zip(place, part, strict=True))
        result[part] = converted(weights.read(piece.path, box), dtype, f"{weights.where}: {piece.path}")
    return result.reshape(piece.shape)
