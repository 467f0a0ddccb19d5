"""The work of `python -m megajax.convert`: weights are streamed from one folder to another."""

import secrets
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import jax.numpy as jnp

from megajax.checkpoint.reader import open_checkpoints
from megajax.config.errors import UserError
from megajax.interop.conversion.provenance import Provenance
from megajax.interop.formats import FORMATS, Reading, format_of, open_stored, split_name
from megajax.interop.peft.folder import MergedWeights
from megajax.interop.runs.format import mean_of
from megajax.interop.runs.reader import open_step
from megajax.interop.runs.writer import Advance
from megajax.interop.stored_model import SHARD_BYTES, Options, StoredModel


def open_source(
    name: str | None,
    average: Sequence[str] = (),
    last: int | None = None,
    reading: Reading | None = None,
    *,
    merge: bool = False,
) -> StoredModel:
    """FORMAT:DIR, a run or one of its steps; or the mean of the steps `average`, or of the `last` newest of a run.

    merge: add adapters to the weights. Raises UserError if the source does not exist or its tensors do not fit the
    model.
    """
    name, reading = name or "", reading or Reading()
    if average:
        stored = mean_of([open_step(Path(path), trusted=reading.trusted) for path in average])
    elif last is not None:
        stored = _mean_of_newest(name, last, reading.trusted)
    else:
        stored = open_stored(name, reading)
    stored.demand_fit()
    if not merge:
        return stored
    if (lora := getattr(stored.model, "lora", None)) is None:
        raise UserError("--merge: the model has no adapters (model.lora)")
    merged = MergedWeights(stored.weights, stored.declared, lora.scale())
    return stored.derived(replace(stored.model, lora=None), merged)


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
    if stored.quantized_dtype() is not None and not form.quantized:
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
