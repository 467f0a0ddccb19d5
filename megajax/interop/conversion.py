"""The work of `python -m megajax.convert`: weights are streamed from one folder to another, and compared.

Verification compares names, shapes, dtypes and every byte.
"""

import hashlib
import secrets
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from megajax.checkpoint.boxes import box_of, chunk_shape, chunks_of, shape_of
from megajax.checkpoint.reader import open_checkpoints
from megajax.checkpoint.weights.foreign import ITEMSIZE, Tensors, WeightSource, converted, export_tensor
from megajax.checkpoint.weights.name_mapping import Mapped
from megajax.config.errors import UserError
from megajax.interop.formats import FORMATS, Reading, format_of, open_stored, split_name
from megajax.interop.origin import without_adapters, without_teacher
from megajax.interop.peft.folder import MergedWeights
from megajax.interop.runs.format import mean_of, open_step
from megajax.interop.stored.model import SHARD_BYTES, Advance, Options, StoredModel
from megajax.interop.stored.provenance import Provenance
from megajax.layers.param import ParamSpec


def open_source(
    name: str | None,
    average: Sequence[str] = (),
    last: int | None = None,
    reading: Reading | None = None,
    *,
    merge: bool = False,
) -> StoredModel:
    """FORMAT:DIR, a run or one of its steps; or the mean of the steps `average`, or of the `last` newest of a run.

    merge: add adapters to the weights. A run with a teacher gives the student. Raises UserError if the source does
    not exist or its tensors do not fit the model.
    """
    name, reading = name or "", reading or Reading()
    if average:
        stored = mean_of([open_step(Path(path), trusted=reading.trusted) for path in average])
    elif last is not None:
        stored = _mean_of_newest(name, last, reading.trusted)
    else:
        stored = open_stored(name, reading)
    stored.demand_fit()
    if (student := without_teacher(stored.model)) is not stored.model:
        stored = stored.derived(student, stored.weights)
    if not merge:
        return stored
    if getattr(stored.model, "lora", None) is None:
        raise UserError("--merge: the model has no adapters (model.lora)")
    return stored.derived(without_adapters(stored.model), MergedWeights(stored.weights, stored.model))


def _mean_of_newest(name: str, last: int, trusted: bool) -> StoredModel:
    if not format_of(name).steps:
        raise UserError(f"--average-last: {name} has no steps to average")
    steps = open_checkpoints(name)[0].steps()
    if len(steps) < last:
        count = f"{len(steps)} step{'s' * (len(steps) != 1)}"
        raise UserError(f"--average-last={last}: {name} has {count}: {', '.join(map(str, steps))}")
    return mean_of([open_step(Path(name), step, trusted=trusted) for step in steps[-last:]])


def options(dtype: str | None, family: str = "", shard_gigabytes: float = SHARD_BYTES / 1e9, base: str = "") -> Options:
    """The options of a command line."""
    return Options(jnp.dtype(dtype) if dtype else None, family, int(shard_gigabytes * 1e9), base)


def write(stored: StoredModel, target: str, options: Options, advance: Advance) -> list[str]:
    """Writes a run, or the folder of FORMAT:DIR. Returns a summary, line by line.

    Raises UserError for a target that exists, can't be written, or can't hold the model.
    """
    (prefix, folder), form = split_name(target), format_of(target)
    if getattr(stored.model, "lora", None) is not None and form.adapters == "merged":
        apart = next(prefix for prefix, other in FORMATS.items() if other.adapters == "only")
        remedy = f"--merge adds them to the weights, --to={apart}:DIR writes only them"
        raise UserError(f"--to={target}: the model has adapters, which this format can't hold; {remedy}")
    if stored.quantized_dtype() is not None and not form.quantized and form.adapters != "only":
        problem = f"the weights are quantized ({stored.quantized_dtype()}), which is written to runs only"
        raise UserError(f"--to={target}: {problem}\nConvert from the unquantized weights.")
    lines = form.write(_described_for(stored, prefix), folder, options, advance)
    return [*lines, *[stored.note] * bool(stored.note)]


def _described_for(stored: StoredModel, prefix: str) -> StoredModel:
    """The model without another format's description of it."""
    form, origin = FORMATS[prefix], stored.origin
    if form.adapters != "merged" or origin.format == prefix:
        return stored
    return replace(stored, origin=Provenance(special_tokens=origin.special_tokens))


def verify(stored: StoredModel, target: str, options: Options, advance: Advance) -> str:
    """Reads the target back and compares it. Returns a summary.

    Raises UserError if they differ; the folder is renamed to NAME.unverified, so that nothing mistakes it for a valid
    one.
    """
    try:
        return format_of(target).verify(stored, target, options, advance)
    except UserError as error:
        folder = split_name(target)[1].absolute()
        aside = folder.with_name(f"{folder.name}.unverified")
        if aside.exists():
            aside = folder.with_name(f"{folder.name}.{secrets.token_hex(4)}.unverified")
        raise UserError(f"{error}\nThe folder was renamed to {folder.rename(aside)}.") from error


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
