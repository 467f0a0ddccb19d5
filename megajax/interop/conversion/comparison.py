"""Verification of converted weights against their source: names, shapes, dtypes and every byte."""

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from megajax.checkpoint.boxes import box_of, chunk_shape, chunks_of, shape_of
from megajax.checkpoint.weights.foreign import ITEMSIZE, Tensors, WeightSource, converted, export_tensor
from megajax.checkpoint.weights.tensor_table import Mapped
from megajax.config.errors import UserError
from megajax.interop.formats import Reading, open_stored
from megajax.interop.runs.writer import Advance
from megajax.interop.stored_model import Options, StoredModel
from megajax.layers.param import ParamSpec

LISTED_NAMES = 10
"""Names of differing arrays in a message."""


class Verified(NamedTuple):
    """Size and hash of the arrays that were compared and are equal."""

    arrays: int
    elements: int
    sha256: str
    """Hash of the bytes of all arrays, in order."""


def verify_all(stored: StoredModel, name: str, options: Options, advance: Advance) -> str:
    """Compares all weights of a model with those of its copy. Returns a summary; raises UserError if they differ.

    Other libraries' tensors are rebuilt from the copy, unless its dtype can't hold their values.
    """
    copy = open_stored(name, Reading(trusted=stored.trusted, ignore=["*"]))
    copy.demand_fit()
    if stored.foreign is not None and stored.table is not None and _holds_all(stored, copy):
        result = verify_tensors(stored.foreign.tensors, stored.table, copy.weights, advance)
    else:
        result = verify_weights(stored.weights, copy.weights, stored.declared, advance, copy.table)
    if stored.extra is not None and copy.extra is not None:
        verify_copies(stored.extra, copy.extra)
    return f"verified: {result.arrays} arrays, {result.elements:,} elements, all equal (sha256 {result.sha256})"


def _holds_all(stored: StoredModel, copy: StoredModel) -> bool:
    """Whether the dtype of the copy can hold the values of another library's tensors."""
    path, shape = next(iter(stored.weights.shapes().items()))
    dtype = copy.weights.read(path, tuple(slice(0, 0) for _ in shape)).dtype
    dtypes = {stored.origin.dtype, *stored.origin.dtypes.values()}
    return all(jnp.promote_types(source_dtype, dtype) == dtype for source_dtype in dtypes)


def verify_tensors(tensors: Tensors, table: Sequence[Mapped], weights: WeightSource, advance: Advance) -> Verified:
    """Compares the tensors of a source with those exported again from the weights that were imported from it.

    The bytes are equal if the dtype of the weights holds all values of the source. Raises UserError if any differ.
    """

    def pairs() -> Iterator[tuple[str, np.ndarray, np.ndarray]]:
        for tensor in table:
            values = tensors.read(tensor.name)
            yield tensor.name, values, export_tensor(tensor, weights, values.dtype)

    return _all_equal(pairs(), tensors.where, weights.where, advance)


def verify_weights(
    source: WeightSource,
    target: WeightSource,
    declared: Mapping[str, ParamSpec],
    advance: Advance,
    table: Sequence[Mapped] | None = None,
) -> Verified:
    """Compares converted weights with their source, in the dtypes of the target. Raises UserError if any differ.

    table: of the target's format; parts that no tensor of it holds, such as the rows that pad a vocabulary or the
    observations of experts' loads, are not compared. None: all parts are compared.
    """
    stored, expected = target.shapes(), source.shapes()
    compared = [path for path, spec in declared.items() if path in stored or table is None or spec.updater is None]
    if mismatches := [path for path in compared if path in expected and expected[path] != stored.get(path)]:
        lines = "\n".join(f"  {path}: {expected[path]}, {stored.get(path, 'absent')}" for path in mismatches)
        raise UserError(f"{target.where} has other shapes than {source.where}:\n{lines}")
    if table is None:
        places = [(path, box_of((), shape)) for path, shape in stored.items()]
    else:
        places = [(piece.path, box_of(piece.index, stored[piece.path])) for tensor in table for piece in tensor.pieces]

    def pairs() -> Iterator[tuple[str, np.ndarray, np.ndarray]]:
        for path, place in places:
            for box in chunks_of(place, chunk_shape(shape_of(place), ITEMSIZE)) if path in expected else ():
                values = target.read(path, box)
                yield path, converted(source.read(path, box), values.dtype, path), values

    return _all_equal(pairs(), source.where, target.where, advance)


def verify_copies(source: Tensors, target: Tensors) -> None:
    """Compares tensors with their copies, in the dtypes of the target. Raises UserError if any differ."""
    pairs = (
        (name, converted(source.read(name), dtype, name), target.read(name))
        for name, (_, dtype) in target.entries().items()
    )
    _all_equal(pairs, source.where, target.where, lambda elements: None)


def _all_equal(
    pairs: Iterator[tuple[str, np.ndarray, np.ndarray]], source: str, target: str, advance: Advance
) -> Verified:
    names, elements, digest, different = set[str](), 0, hashlib.sha256(), dict[str, None]()
    for name, expected, actual in pairs:
        content = _bytes(actual)
        if (expected.shape, expected.dtype) != (actual.shape, actual.dtype) or _bytes(expected) != content:
            different[name] = None
        digest.update(content)
        names.add(name)
        elements += actual.size
        advance(actual.size)
    if different:
        more = f" and {len(different) - LISTED_NAMES} more" if len(different) > LISTED_NAMES else ""
        listed = ", ".join([*different][:LISTED_NAMES]) + more
        raise UserError(
            f"{target} does not give back {source}: {len(different)} of {len(names)} arrays differ: {listed}"
        )
    return Verified(len(names), elements, digest.hexdigest())


def _bytes(array: np.ndarray) -> memoryview:
    return memoryview(np.ascontiguousarray(array).reshape(-1).view(np.uint8))
