"""Whether converted weights are those that they were made of: names, shapes, dtypes and every byte."""

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from megajax.checkpoint.boxes import box_of, chunk_shape, chunks_of, shape_of
from megajax.checkpoint.weights.copying import converted
from megajax.checkpoint.weights.foreign import ITEMSIZE, Tensors, WeightSource, export_tensor
from megajax.checkpoint.weights.run_writer import Advance
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
            values = tensors.read(tensor.name)
            yield tensor.name, values, export_tensor(tensor, weights, values.dtype)

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
    stored, expected = made.shapes(), source.shapes()
    if wrong := [path for path in declared if path in expected and expected[path] != stored.get(path)]:
        lines = "\n".join(f"  {path}: {expected[path]}, {stored.get(path, 'absent')}" for path in wrong)
        raise UserError(f"{made.where} has other shapes than {source.where}:\n{lines}")
    if table is None:
        places = [(path, box_of((), shape)) for path, shape in stored.items()]
    else:
        places = [(piece.path, box_of(piece.index, stored[piece.path])) for tensor in table for piece in tensor.pieces]

    def pairs() -> Iterator[tuple[str, np.ndarray, np.ndarray]]:
        for path, place in places:
            for box in chunks_of(place, chunk_shape(shape_of(place), ITEMSIZE)) if path in expected else ():
                values = made.read(path, box)
                yield path, converted(source.read(path, box), values.dtype, path), values

    return _all_equal(pairs(), source.where, made.where, advance)


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
