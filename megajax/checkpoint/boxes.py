"""Boxes: parts of arrays with a start and a stop in each dimension."""

from collections.abc import Iterator, Sequence
from itertools import product
from math import prod

type Box = tuple[slice, ...]
"""A slice with a start and a stop for each dimension of an array."""

CHUNK_BYTES = 2**25
"""Largest chunk. Reading any part of a chunk reads and buffers the whole chunk."""


def box_of(index: Sequence[int | slice], shape: Sequence[int]) -> Box:
    """An index into an array of this shape as a box: a number becomes a slice of 1, a missing dimension is full."""
    full = [*index, *[slice(None)] * (len(shape) - len(index))]
    bounds = [(i, i + 1) if isinstance(i, int) else i.indices(size)[:2] for i, size in zip(full, shape, strict=True)]
    return tuple(slice(start, stop) for start, stop in bounds)


def shape_of(box: Box) -> tuple[int, ...]:
    """The shape of a box."""
    return tuple(side.stop - side.start for side in box)


def overlap(a: Box, b: Box) -> Box | None:
    """The elements that two boxes of one array have in common, or None if there are none."""
    common = tuple(slice(max(i.start, j.start), min(i.stop, j.stop)) for i, j in zip(a, b, strict=True))
    return common if all(side.start < side.stop for side in common) else None


def relative(box: Box, outer: Box) -> Box:
    """A box as an index into an array that holds only the elements of `outer`."""
    return tuple(slice(i.start - j.start, i.stop - j.start) for i, j in zip(box, outer, strict=True))


def chunks_of(box: Box, chunk: Sequence[int]) -> Iterator[Box]:
    """Cuts a box into boxes of at most this shape, the last dimension fastest."""
    starts = [range(side.start, side.stop, step) for side, step in zip(box, chunk, strict=True)]
    for corner in product(*starts):
        sides = zip(corner, chunk, box, strict=True)
        yield tuple(slice(start, min(start + step, side.stop)) for start, step, side in sides)


def chunk_shape(shape: Sequence[int], itemsize: int) -> list[int]:
    """A chunk of at most CHUNK_BYTES: full last dimensions, and even parts of the ones before them."""
    chunk, most = [*shape], max(1, CHUNK_BYTES // itemsize)
    for axis, size in enumerate(shape):
        rest = prod(shape[axis + 1 :])
        parts = -(-size // max(1, most // rest))
        chunk[axis] = -(-size // parts)
        if rest <= most:
            break
    return chunk
