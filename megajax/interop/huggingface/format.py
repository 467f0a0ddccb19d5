"""Hugging Face model folders as a format of stored models: config.json, safetensors and tokenizer files."""

import json
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from math import prod
from pathlib import Path
from types import MappingProxyType
from typing import Any

import jax.numpy as jnp
import numpy as np

from megajax.checkpoint.weights.foreign import (
    Entry,
    Tensors,
    WeightSource,
    contiguous,
    converted,
    declared_by,
    export_tensor,
)
from megajax.checkpoint.weights.name_mapping import Mapped, resolved
from megajax.config.errors import UserError
from megajax.config.hints import did_you_mean, listed
from megajax.config.read_limits import read_json
from megajax.interop.formats import Reading, split_name
from megajax.interop.huggingface.family import Family, Settings, is_unused
from megajax.interop.huggingface.folder import CONFIG, read_model
from megajax.interop.huggingface.registry import OTHER_MODEL, families, hint, lost_settings
from megajax.interop.huggingface.rotary import ROPE, with_rope
from megajax.interop.huggingface.safetensors import ShardWriter
from megajax.interop.stored.model import SHARD_BYTES, Advance, Options, StoredModel, stored_foreign
from megajax.interop.stored.model_differences import differences
from megajax.interop.stored.weights_config import special_tokens
from megajax.interop.tokenizer_files import copy_files
from megajax.models.classifier.config import scoring
from megajax.storage.atomic_folders import new_folder

LONGEST = 60
"""Characters of a setting in a message."""


def read(name: str, reading: Reading) -> StoredModel:
    """The model of hf:DIR. Raises UserError for a missing folder, unsupported settings and damaged files."""
    return stored_foreign(name, read_model(split_name(name)[1], reading.ignore))


def write(stored: StoredModel, target: Path, options: Options, advance: Advance) -> list[str]:
    """Writes a folder of the family that the weights came from, or of the first that loses no setting."""
    origin, model = stored.origin, scoring(stored.model)
    family = family_for(model, options.family, origin.family)
    usual = jnp.dtype(origin.dtype or "float32")

    special = origin.special_tokens
    if not (special or origin.settings):
        special = special_tokens(stored.config(target, []))

    def dtype_of(name: str) -> np.dtype:
        return jnp.dtype(origin.dtypes.get(name, usual))

    with new_folder(target, stored.elements() * (options.dtype or usual).itemsize) as folder:
        table = write_model(
            folder,
            model,
            stored.weights,
            family,
            dtype=options.dtype,
            dtypes=dtype_of,
            recorded=origin.settings,
            names=origin.names if family.name == origin.family else {},
            special=special,
            extra=stored.extra if family.name == origin.family else None,
            shard_bytes=options.shard_bytes,
            advance=advance,
        )
        files = copy_files(stored.files, folder)
        count = len([*folder.glob("*.safetensors")])
        changes = _changes(origin.settings, read_json(folder / CONFIG, unique=False))
    written_paths = {piece.path for tensor in table for piece in tensor.pieces}
    left_out = [path for path in stored.weights.shapes() if path not in written_paths]
    dtypes = Counter((options.dtype or dtype_of(tensor.name)).name for tensor in table)
    return [
        f"{target}: {len(table)} tensors of {family.name} in {count} file{'s' * (count > 1)}, "
        + ", ".join(f"{number} in {dtype}" for dtype, number in dtypes.items()),
        *[f"left out, not in the format: {listed(left_out)}"] * bool(left_out),
        *[f"{CONFIG}: {changes}"] * bool(origin.settings),
        f"tokenizer: {', '.join(files)}" if files else f"tokenizer: none, because there is none in {stored.files}",
    ]


def _changes(recorded: Mapping[str, Any], written: Mapping[str, Any]) -> str:
    """A text about the settings that differ."""
    kinds = [settings.get("model_type") for settings in (recorded, written)]
    if kinds[0] != kinds[1]:
        return f"written for {kinds[1]}, the source was {kinds[0]}"
    names = [*written, *(name for name in recorded if name not in written)]
    pairs = [(name, recorded.get(name, "absent"), written.get(name, "absent")) for name in names]
    changes = "; ".join(f"{name}={_short(new)}, not {_short(old)}" for name, old, new in pairs if new != old)
    return f"that of the source, but {changes}" if changes else "that of the source"


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= LONGEST else f"{text[:LONGEST]}…"


DTYPE_SETTINGS = {"dtype", "torch_dtype"}
"""Names in a config.json, new and old."""
SPECIAL_TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")
LENGTHS = ("sequence_length", "encoder_length")
"""Settings of a model config that are numbers of positions in a row."""
LISTED_LINES = 5
"""Lines about what a family would lose."""


def family_for(model: Any, name: str = "", recorded: str = "") -> Family:
    """The family to write a model as: the named one, else the recorded or first one without loss of settings.

    Raises UserError with the settings that would be lost.
    """
    if name and name not in families():
        suggestion = hint(name, families()) or did_you_mean(name, families()) or f"there are {', '.join(families())}"
        raise UserError(f"--family={name}: there is no such family; {suggestion}")
    order = [name] if name else [*[recorded] * (recorded in families()), *families()]
    losses = {candidate: lost_settings(model, families()[candidate]) for candidate in dict.fromkeys(order)}
    if lossless := [candidate for candidate, lines in losses.items() if not lines]:
        return families()[lossless[0]]
    comparable = {name: lines for name, lines in losses.items() if not lines[0].startswith(OTHER_MODEL)} or losses
    nearest = sorted(comparable.items(), key=lambda item: len(item[1]))[:3]
    summary = "\n".join(f"  {candidate}: {_shortened(lines)}" for candidate, lines in nearest)
    raise UserError(f"no family of Hugging Face models can express this model. It would lose:\n{summary}")


def _shortened(lines: Sequence[str]) -> str:
    more = f"; and {len(lines) - LISTED_LINES} more" if len(lines) > LISTED_LINES else ""
    return "; ".join(lines[:LISTED_LINES]) + more


def config_for(
    model: Any,
    family: Family,
    recorded: Mapping[str, Any],
    names: Collection[str],
    special: Mapping[str, int | None] = MappingProxyType({}),
) -> dict[str, Any]:
    """config.json: what training changed is ours; everything else is the recorded one's.

    A model trained on shorter rows keeps the recorded length, if no weight depends on it. names: of the tensors;
    special: settings of special tokens, if the run has a tokenizer of its own or there is no recorded config.
    """
    if recorded.get("model_type") not in family.model_types:
        tokens = {name: recorded[name] for name in SPECIAL_TOKENS if name in recorded}
        return {**tokens, **special, **family.config_json(model)}
    source = _described(recorded, family, names)
    model = _at_recorded_length(model, source)
    if not differences(model, source):
        return {**recorded, **special}
    before, after = family.config_json(source), family.config_json(model)
    changed = {name: value for name, value in after.items() if name not in before or value != before[name]}
    unchanged = {name: value for name, value in recorded.items() if name in after or name not in before}
    config = {**unchanged, **changed, **special}
    config = with_rope(config, after) if ROPE & changed.keys() else config
    if not differences(model, _described(config, family, names)):
        return config
    unused = {name: value for name, value in recorded.items() if is_unused(name, family.unused)}
    return {**unused, **special, **after}


def _described(config: Mapping[str, Any], family: Family, names: Collection[str]) -> Any:
    """The model of a config.json. Raises UserError for one that a damaged checkpoint recorded."""
    try:
        return family.adjusted(family.read(Settings(dict(config))), names)
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise UserError(f"the recorded {CONFIG} of the source can't be read as {family.name} ({error})") from error


def _at_recorded_length(model: Any, source: Any) -> Any:
    """The model with the source's lengths, where they are longer and give weights of the same shapes."""
    lengths = {name: getattr(source, name, 0) for name in LENGTHS}
    longer = {name: length for name, length in lengths.items() if length > getattr(model, name, length)}
    if not longer:
        return model
    stretched = replace(model, **longer)
    shapes = [{path: spec.shape for path, spec in declared_by(config).items()} for config in (model, stretched)]
    return stretched if shapes[0] == shapes[1] else model


def write_model(
    folder: Path,
    model: Any,
    weights: WeightSource,
    family: Family,
    *,
    dtype: np.dtype | None,
    dtypes: Callable[[str], np.dtype],
    recorded: Mapping[str, Any],
    names: Mapping[str, str],
    special: Mapping[str, int | None] = MappingProxyType({}),
    extra: Tensors | None = None,
    shard_bytes: int = SHARD_BYTES,
    advance: Advance = lambda elements: None,
) -> list[Mapped]:
    """Writes config.json and the tensors into a folder -> the table.

    dtype: of all tensors; None: that of `dtypes`, a function of the name. recorded: config.json of the source;
    special: see `config_for`. names: name in the table -> name in the files, if they differ. extra: further tensors,
    which are written if the settings that describe them are those of the source.
    Raises OSError if the folder can't be written.
    """
    table = exported(family, model)
    by_name = {names.get(tensor.name, tensor.name): tensor for tensor in table}
    entries = {name: Entry(tensor.shape(), dtype or dtypes(tensor.name)) for name, tensor in by_name.items()}
    config = config_for(model, family, recorded, [tensor.name for tensor in table], special)
    if dtype is not None or not DTYPE_SETTINGS & config.keys():
        usual = Counter(entry.dtype for entry in entries.values()).most_common(1)[0][0]
        config |= dict.fromkeys(DTYPE_SETTINGS & config.keys() or {"torch_dtype"}, usual.name)
    (folder / CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    if extra is not None and all(config.get(name) == recorded.get(name) for name in family.extra_settings):
        entries |= {name: Entry(shape, dtype or stored) for name, (shape, stored) in extra.entries().items()}
    for name, file in ShardWriter(folder, entries, shard_bytes):
        if name in by_name:
            file.write(name, export_tensor(by_name[name], weights, entries[name].dtype))
            advance(sum(prod(piece.shape) for piece in by_name[name].pieces))
        elif extra is not None:
            file.write(name, contiguous(converted(extra.read(name), entries[name].dtype, name)))
    return table


def exported(family: Family, model: Any) -> list[Mapped]:
    """The family's table of a model. Raises UserError for weights that the table has no names for."""
    try:
        return resolved(family.rows(model), declared_by(model))
    except ValueError as error:
        raise UserError(f"the model can't be written as {family.name}: {error}") from error
