"""Whether converted weights are those that they were made of: names, shapes, dtypes and every byte."""

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from megajax.checkpoint.weights.array_writer import boxes, chunk_shape
from megajax.checkpoint.weights.export_tensors import theirs
from megajax.checkpoint.weights.foreign import Box, Tensors, WeightSource, box_of
from megajax.checkpoint.weights.run_writer import Advance, converted
from megajax.checkpoint.weights.tensor_table import Mapped
from megajax.config.errors import UserError
from megajax.layers.param import ParamSpec

SHOWN = 10


class Verified(NamedTuple):
    """What was compared, all of it equal."""

    arrays: int
    elements: int
    sha256: str
    """Over the bytes of all of them, in order."""


def verify_tensors(tensors: Tensors, table: Sequence[Mapped], weights: WeightSource, advance: Advance) -> Verified:
    """Compares the tensors of a source with those made back from the weights that were made of it.

    Weights in a dtype that holds all values of the source's give back its bytes. Raises UserError where some differ.
    """

    def pairs() -> Iterator[tuple[str, np.ndarray, np.ndarray]]:
        for tensor in table:
            there = tensors.read(tensor.name)
            yield tensor.name, there, theirs(tensor, weights, there.dtype)

    return _all_equal(pairs(), tensors.where, weights.where, advance)


def verify_weights(
    source: WeightSource,
    made: WeightSource,
    declared: Mapping[str, ParamSpec],
    advance: Advance,
    table: Sequence[Mapped] | None = None,
) -> Verified:
    """Compares weights with those that were made of them, in the dtypes of the latter. Raises UserError.

    table: of the format that they were written in. What no tensor of it has is not compared, such as the rows that pad
    a vocabulary. None: weights are compared whole.
    """
    places = _whole(made) if table is None else _parts(made, table)

    def pairs() -> Iterator[tuple[str, np.ndarray, np.ndarray]]:
        for path, place in places:
            if path not in here:
                continue
            sizes = [side.stop - side.start for side in place]
            for part in boxes(sizes, chunk_shape(sizes, 4)):
                box = tuple(slice(a.start + b.start, a.start + b.stop) for a, b in zip(place, part, strict=True))
                there = made.read(path, box)
                yield path, converted(source.read(path, box), there.dtype, path), there

    there, here = made.shapes(), source.shapes()
    if wrong := [path for path in declared if path in here and here[path] != there.get(path)]:
        lines = "\n".join(f"  {path}: {here[path]}, {there.get(path, 'absent')}" for path in wrong)
        raise UserError(f"{made.where} has other shapes than {source.where}:\n{lines}")
    return _all_equal(pairs(), source.where, made.where, advance)


def _whole(made: WeightSource) -> Iterator[tuple[str, Box]]:
    for path, shape in made.shapes().items():
        yield path, tuple(slice(0, size) for size in shape)


def _parts(made: WeightSource, table: Sequence[Mapped]) -> Iterator[tuple[str, Box]]:
    """What tensors hold of each weight."""
    shapes = made.shapes()
    for tensor in table:
        yield from ((piece.path, box_of(piece.index, shapes[piece.path])) for piece in tensor.pieces)


def _all_equal(
    pairs: Iterator[tuple[str, np.ndarray, np.ndarray]], source: str, made: str, advance: Advance
) -> Verified:
    names, elements, digest, wrong = set[str](), 0, hashlib.sha256(), dict[str, int]()
    for name, one, other in pairs:
        same = one.shape == other.shape and one.dtype == other.dtype and _bytes(one) == _bytes(other)
        if not same:
            wrong[name] = wrong.get(name, 0) + 1
        digest.update(_bytes(other))
        names.add(name)
        elements += other.size
        advance(other.size)
    if wrong:
        listed = ", ".join([*wrong][:SHOWN]) + (f" and {len(wrong) - SHOWN} more" if len(wrong) > SHOWN else "")
        raise UserError(f"{made} does not give back {source}: {len(wrong)} of {len(names)} arrays differ: {listed}")
    return Verified(len(names), elements, digest.hexdigest())


def _bytes(array: np.ndarray) -> memoryview:
    return memoryview(np.ascontiguousarray(array).reshape(-1).view(np.uint8))
