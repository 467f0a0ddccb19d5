"""Hugging Face model folders as a format of stored models: config.json, safetensors and tokenizer files."""

import json
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from math import prod
from pathlib import Path
from types import MappingProxyType
from typing import Any

import jax.numpy as jnp

from megajax.checkpoint.weight_source import Entry, WeightSource, contiguous, converted
from megajax.config.errors import UserError
from megajax.config.hints import below, did_you_mean, listed
from megajax.config.read_limits import parse_json, read_json
from megajax.interop.huggingface.family import UNREADABLE, Family, Settings, is_unused, written_floats
from megajax.interop.huggingface.folder import CONFIG, read_model
from megajax.interop.huggingface.registry import OTHER_MODEL, candidates, families, hint, lost_settings
from megajax.interop.huggingface.rotary import ROPE, with_rope
from megajax.interop.weights.foreign import Tensors, declared_by, export_tensor
from megajax.interop.weights.formats import Reading, split_name
from megajax.interop.weights.model_differences import describe_differences, differences
from megajax.interop.weights.name_mapping import MappedTensor, resolved
from megajax.interop.weights.provenance import Provenance
from megajax.interop.weights.safetensors import ShardWriter
from megajax.interop.weights.stored_model import Advance, Options, StoredModel, stored_foreign
from megajax.interop.weights.weights_config import special_tokens
from megajax.models.classifier.config import scoring
from megajax.models.protocol import ModelConfig
from megajax.storage.atomic_folders import new_folder
from megajax.tokenizers.tokenizer_files import copy_files

LONGEST = 60
"""Characters of a setting in a message."""


def read(name: str, reading: Reading) -> StoredModel:
    """The model of hf:DIR. Raises UserError for a missing folder, unsupported settings and damaged files."""
    return stored_foreign(name, read_model(split_name(name)[1], reading.ignore))


def write(stored: StoredModel, target: Path, options: Options, advance: Advance) -> list[str]:
    """Writes a folder; see `chosen_family` for the family."""
    origin, model, extra = stored.origin, scoring(stored.model), stored.extra
    family, reason = chosen_family(model, options.family, origin)
    if not (origin.special_tokens or origin.settings):
        cfg = stored.config(target, [])
        origin = replace(origin, special_tokens=special_tokens(cfg.model, cfg.tokenizer))
    if family.name != origin.family:
        origin, extra = replace(origin, names={}), None
    itemsize = (options.dtype or jnp.dtype(origin.dtype or "float32")).itemsize
    with new_folder(target, stored.elements() * itemsize) as folder:
        table = write_model(
            folder, model, stored.weights, family, origin, options=options, extra=extra, advance=advance
        )
        files = copy_files(stored.files, folder)
        count = len([*folder.glob("*.safetensors")])
        changes = _changes(origin.settings, read_json(folder / CONFIG, unique=False))
    written_paths = {piece.path for tensor in table for piece in tensor.pieces}
    left_out = [path for path in stored.weights.shapes if path not in written_paths]
    dtypes = Counter((options.dtype or origin.dtype_of(tensor.name)).name for tensor in table)
    return [
        f"{target}: {len(table)} tensors of {family.name} in {count} file{'s' * (count > 1)}, "
        + ", ".join(f"{number} in {dtype}" for dtype, number in dtypes.items()),
        *[reason] * bool(reason),
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


def _short(value: object) -> str:
    text = str(value)
    return text if len(text) <= LONGEST else f"{text[:LONGEST]}…"


DTYPE_SETTINGS = {"dtype", "torch_dtype"}
"""Names in a config.json, new and old."""
START_TOKEN = "decoder_start_token_id"
"""The token with which the decoder's answers begin; in runs it is bos."""
SPECIAL_TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")
LENGTHS = ("sequence_length", "encoder_length")
"""Settings of a model config that are numbers of positions in a row."""
LISTED_LINES = 5
"""Lines about what a family would lose."""


def chosen_family(model: ModelConfig, name: str = "", origin: Provenance | None = None) -> tuple[Family, str]:
    """The family to write a model as, and why, if no one said it.

    The named one; else the one of the folder that the weights came from; else that of the model's config, which a
    preset states; else the first of `candidates`. A family that would lose settings is left out.
    Raises UserError with the settings that would be lost.
    """
    origin = origin or Provenance()
    if name and name not in families():
        suggestion = hint(name, families()) or did_you_mean(name, families()) or f"there are {', '.join(families())}"
        raise UserError(f"--family={name}: there is no such family; {suggestion}")
    recorded_names = [origin.family, getattr(model, "family", "")]
    known, losses = [name] if name else dict.fromkeys(recorded_names), dict[str, list[str]]()
    for family in (family for family in known if family in families()):
        recorded = origin.settings if family == origin.family else {}
        if not (lines := _lost(model, families()[family], recorded)):
            lost = "".join(f"{other} would lose {_shortened(losses[other])}; " for other in losses)
            return families()[family], f"family: {family}; {lost.removesuffix('; ')}" * bool(losses)
        losses[family] = lines
    others = {} if name else {other: _lost(model, families()[other]) for other in candidates(model)}
    if lossless := [other for other, lines in others.items() if not lines]:
        reasons = [f"the {family} of its config would lose {_shortened(lines)}" for family, lines in losses.items()]
        reasons += [f"also {', '.join(lossless[1:])} (--family)"] * (len(lossless) > 1)
        return families()[lossless[0]], "; ".join([f"family: {lossless[0]}, the plainest that fits", *reasons])
    comparable = {name: lines for name, lines in (losses | others).items() if not lines[0].startswith(OTHER_MODEL)}
    nearest = sorted((comparable or losses | others).items(), key=lambda item: len(item[1]))[:3]
    summary = [f"{candidate}: {_shortened(lines)}" for candidate, lines in nearest]
    raise UserError(below("no family of Hugging Face models can express this model. It would lose:", summary))


def _lost(model: ModelConfig, family: Family, recorded: Mapping[str, Any] = MappingProxyType({})) -> list[str]:
    """Settings of a model that are lost in its config.json, a line each. recorded: config.json of the source."""
    if not recorded:
        return lost_settings(model, family)
    try:
        names = [tensor.name for tensor in exported(family, model)]
        written = _described(config_for(model, family, recorded, names), family, names)
    except (*UNREADABLE, UserError) as error:
        return [f"{OTHER_MODEL} {family.name} model ({error})"]
    return describe_differences(differences(_at_recorded_length(model, written), written))


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
    if model.memory_length() and special.get("bos_token_id") is not None:
        special = {**special, START_TOKEN: special["bos_token_id"]}  # as in training
    if recorded.get("model_type") not in family.model_types:
        tokens = {name: recorded[name] for name in SPECIAL_TOKENS if name in recorded}
        return {**tokens, **special, **family.config_json(model), **special}
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
    return {**unused, **special, **after, **special}


def _described(config: Mapping[str, Any], family: Family, names: Collection[str]) -> Any:
    """The model of a config.json. Raises UserError for one that a damaged checkpoint recorded."""
    return family.adjusted(family.model_of(Settings(config, f"the recorded {CONFIG} of the source")), names)


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
    model: ModelConfig,
    weights: WeightSource,
    family: Family,
    origin: Provenance | None = None,
    *,
    options: Options | None = None,
    extra: Tensors | None = None,
    advance: Advance = lambda elements: None,
) -> list[MappedTensor]:
    """Writes config.json and the tensors into a folder -> the table.

    origin: the folder that the weights came from, for dtypes, names in the files, and settings. extra: further tensors,
    which are written if the settings that describe them are those of the source.
    Raises OSError if the folder can't be written.
    """
    origin, options = origin or Provenance(), options or Options()
    table, dtype, recorded = exported(family, model), options.dtype, origin.settings
    by_name = {origin.names.get(tensor.name, tensor.name): tensor for tensor in table}
    entries = {name: Entry(tensor.shape(), dtype or origin.dtype_of(tensor.name)) for name, tensor in by_name.items()}
    config = config_for(model, family, recorded, [tensor.name for tensor in table], origin.special_tokens)
    if dtype is not None or not DTYPE_SETTINGS & config.keys():
        usual = Counter(entry.dtype for entry in entries.values()).most_common(1)[0][0]
        config |= dict.fromkeys(DTYPE_SETTINGS & config.keys() or {"torch_dtype"}, usual.name)
    (folder / CONFIG).write_text(_config_text(config, recorded, origin.text), encoding="utf-8")
    if extra is not None and all(config.get(name) == recorded.get(name) for name in family.extra_settings):
        entries |= {name: Entry(shape, dtype or stored) for name, (shape, stored) in extra.entries.items()}
    for name, file in ShardWriter(folder, entries, options.shard_bytes):
        if name in by_name:
            file.write(name, export_tensor(by_name[name], weights, entries[name].dtype))
            advance(sum(prod(piece.shape) for piece in by_name[name].pieces))
        elif extra is not None:
            file.write(name, contiguous(converted(extra.read(name), entries[name].dtype, name)))
    return table


def _config_text(config: Mapping[str, Any], recorded: Mapping[str, Any], text: str) -> str:
    """config.json: the source's bytes if no setting changed, even those that are no JSON."""
    with suppress(ValueError):
        if text and parse_json(text, unique=False) == config:
            return text
    values = {name: value if recorded.get(name) == value else written_floats(value) for name, value in config.items()}
    return json.dumps(values, indent=2) + "\n"


def exported(family: Family, model: ModelConfig) -> list[MappedTensor]:
    """The family's table of a model. Raises UserError for weights that the table has no names for."""
    try:
        return resolved(family.rows(model), declared_by(model))
    except ValueError as error:
        raise UserError(f"the model can't be written as {family.name}: {error}") from error
