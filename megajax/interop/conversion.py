"""The work of `python -m megajax.convert`: weights are streamed from one folder to another, and compared.

Verification compares names, shapes, dtypes and every byte.
"""

import hashlib
import secrets
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import jax.numpy as jnp
import numpy as np

from megajax.checkpoint.boxes import box_of, chunk_shape, chunks_of, shape_of
from megajax.checkpoint.weight_source import ITEMSIZE, WeightSource, converted
from megajax.config.class_references import resolve
from megajax.config.errors import UserError
from megajax.config.hints import below, listed
from megajax.interop.weights.adapters import merged
from megajax.interop.weights.foreign import ForeignModel, export_tensor
from megajax.interop.weights.formats import FORMATS, Reading, format_of, open_stored, split_name
from megajax.interop.weights.model_parts import adapters_of, without_teacher
from megajax.interop.weights.provenance import Provenance
from megajax.interop.weights.regrouped import groups_of, regrouped
from megajax.interop.weights.run_format import mean_of, newest_steps
from megajax.interop.weights.stored_model import SHARD_BYTES, Advance, Options, StoredModel


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
    if last is not None and not format_of(name).steps:
        raise UserError(f"--average-last: {name} has no steps to average")
    steps = [(Path(path), None) for path in average] if last is None else newest_steps(name, last)
    stored = mean_of(steps, reading) if steps else open_stored(name, reading)
    stored.demand_fit()
    if (student := without_teacher(stored.model)) is not stored.model:
        stored = stored.derived(student, stored.weights)
    if merge and adapters_of(stored.model) is None:
        raise UserError("--merge: the model has no adapters (model.lora)")
    return merged(stored) if merge else stored


def options(dtype: str | None, family: str = "", shard_gigabytes: float = SHARD_BYTES / 1e9, base: str = "") -> Options:
    """The options of a command line."""
    return Options(jnp.dtype(dtype) if dtype else None, family, int(shard_gigabytes * 1e9), base)


def write(stored: StoredModel, target: str, options: Options, advance: Advance) -> list[str]:
    """Writes a run, or the folder of FORMAT:DIR. Returns a summary, line by line.

    Raises UserError for a target that exists, can't be written, or can't hold the model.
    """
    (prefix, folder), form, origin = split_name(target), format_of(target), stored.origin
    if adapters_of(stored.model) is not None and form.adapters == "merged":
        apart = next(prefix for prefix, other in FORMATS.items() if other.adapters == "only")
        remedy = f"--merge adds them to the weights, --to={apart}:DIR writes only them"
        raise UserError(f"--to={target}: the model has adapters, which this format can't hold; {remedy}")
    if stored.quantized_dtype() is not None and not form.quantized and form.adapters != "only":
        problem = f"the weights are quantized ({stored.quantized_dtype()}), which is written to runs only"
        raise UserError(f"--to={target}: {problem}\nConvert from the unquantized weights.")
    if form.adapters == "merged" and origin.format != prefix:  # another format's description of the model
        stored = replace(stored, origin=Provenance(special_tokens=origin.special_tokens))
    lines = resolve(form.writer)(stored, folder, options, advance)
    return [*lines, *[stored.note] * bool(stored.note)]


def verify(stored: StoredModel, target: str, options: Options, advance: Advance) -> str:
    """Reads the target back and compares it. Returns a summary.

    Raises UserError if they differ; the folder is renamed to NAME.unverified, so that nothing mistakes it for a valid
    one.
    """
    try:
        return resolve(format_of(target).verifier)(stored, target, options, advance)
    except UserError as error:
        folder = split_name(target)[1].absolute()
        aside = folder.with_name(f"{folder.name}.unverified")
        if aside.exists():
            aside = folder.with_name(f"{folder.name}.{secrets.token_hex(4)}.unverified")
        raise UserError(f"{error}\nThe folder was renamed to {folder.rename(aside)}.") from error


type Pairs = Iterator[tuple[str, np.ndarray, np.ndarray]]
"""Name of an array, its expected values, and its actual ones."""


def verify_all(stored: StoredModel, name: str, options: Options, advance: Advance) -> str:
    """Compares all weights of a model with those of its copy. Returns a summary; raises UserError if they differ.

    Other libraries' tensors are rebuilt from the copy, unless its dtype can't hold their values.
    """
    copy = open_stored(name, Reading(trusted=stored.trusted, ignore=["*"]))
    copy.demand_fit()
    if stored.foreign is not None and _holds_all(stored, copy):
        source, pairs = stored.foreign.tensors.where, _exported(stored.foreign, copy.weights)
    else:
        weights = regrouped(stored.weights, groups_of(stored.declared), groups_of(copy.declared))
        source, pairs = weights.where, _converted(weights, copy)
    result = _all_equal(pairs, source, copy.weights.where, advance)
    if stored.extra is not None and (extra := copy.extra) is not None:
        extras = (
            (entry, converted(stored.extra.read(entry), dtype, entry), extra.read(entry))
            for entry, (_, dtype) in extra.entries.items()
        )
        _all_equal(extras, stored.extra.where, extra.where, lambda elements: None)
    return f"verified: {result}"


def _holds_all(stored: StoredModel, copy: StoredModel) -> bool:
    """Whether the dtype of the copy can hold the values of another library's tensors."""
    path, shape = next(iter(stored.weights.shapes.items()))
    dtype = copy.weights.read(path, tuple(slice(0, 0) for _ in shape)).dtype
    dtypes = {stored.origin.dtype, *stored.origin.dtypes.values()}
    return all(jnp.promote_types(source_dtype, dtype) == dtype for source_dtype in dtypes)


def _exported(foreign: ForeignModel, weights: WeightSource) -> Pairs:
    """Tensors of a source, and the same exported again from the weights that were imported from it."""
    for tensor in foreign.table:
        values = foreign.tensors.read(tensor.name)
        yield tensor.name, values, export_tensor(tensor, weights, values.dtype)


def _converted(source: WeightSource, copy: StoredModel) -> Pairs:
    """Weights and their copies, in the dtypes of the copies, a chunk at a time. Raises UserError for other shapes.

    Parts that no tensor of the copy's format holds are left out, such as the rows that pad a vocabulary or the
    observations of experts' loads.
    """
    target, table = copy.weights, None if copy.foreign is None else copy.foreign.table
    stored, expected, specs = target.shapes, source.shapes, copy.declared.items()
    compared = [path for path, spec in specs if path in stored or table is None or spec.updater is None]
    if mismatches := [path for path in compared if path in expected and expected[path] != stored.get(path)]:
        lines = [f"{path}: {expected[path]}, {stored.get(path, 'absent')}" for path in mismatches]
        raise UserError(below(f"{target.where} has other shapes than {source.where}:", lines))
    if table is None:
        places = [(path, box_of((), shape)) for path, shape in stored.items()]
    else:
        places = [(piece.path, box_of(piece.index, stored[piece.path])) for tensor in table for piece in tensor.pieces]
    for path, place in places:
        for box in chunks_of(place, chunk_shape(shape_of(place), ITEMSIZE)) if path in expected else ():
            values = target.read(path, box)
            yield path, converted(source.read(path, box), values.dtype, path), values


def _all_equal(pairs: Pairs, source: str, target: str, advance: Advance) -> str:
    """A summary with the hash of the bytes of all arrays, in order. Raises UserError if any differ."""
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
        count = f"{len(different)} of {len(names)} arrays differ"
        raise UserError(f"{target} does not give back {source}: {count}: {listed([*different])}")
    return f"{len(names)} arrays, {elements:,} elements, all equal (sha256 {digest.hexdigest()})"


def _bytes(array: np.ndarray) -> memoryview:
    return memoryview(np.ascontiguousarray(array).reshape(-1).view(np.uint8))
