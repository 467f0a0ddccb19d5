"""Writing a Hugging Face model folder: config.json and safetensors, a tensor at a time."""

import json
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from math import prod
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from megajax.checkpoint.huggingface.family import UNUSED, Family, Settings
from megajax.checkpoint.huggingface.folder import CONFIG
from megajax.checkpoint.huggingface.registry import expressed, families
from megajax.checkpoint.huggingface.shards import ShardWriter
from megajax.checkpoint.weights.foreign import Entry, WeightSource, declared_by, export_tensor
from megajax.checkpoint.weights.model_differences import differences
from megajax.checkpoint.weights.run_writer import Advance
from megajax.checkpoint.weights.tensor_table import Mapped, resolved
from megajax.config.errors import UserError
from megajax.config.nearest import did_you_mean

SHARD_BYTES = 5_000_000_000
DTYPE_SETTINGS = {"dtype", "torch_dtype"}
"""Names in a config.json, new and old."""
SHOWN = 5
"""Lines on what a family would lose."""


def family_for(model: Any, name: str = "", recorded: str = "") -> Family:
    """The family to write a model as: that of the name; else the recorded one or the first that loses nothing of it.

    Raises UserError with what is lost.
    """
    if name and name not in families():
        near = did_you_mean(name, families()) or f"there are {', '.join(families())}"
        raise UserError(f"--family={name}: there is no such family; {near}")
    order = [name] if name else [*[recorded] * (recorded in families()), *families()]
    lost = {each: expressed(model, families()[each]) for each in dict.fromkeys(order)}
    if fitting := [each for each, lines in lost.items() if not lines]:
        return families()[fitting[0]]
    nearest = sorted(lost, key=lambda each: len(lost[each]))[:3]
    shown = "\n".join(f"  {each}: {_some(lost[each])}" for each in nearest)
    raise UserError(f"no family of Hugging Face models has all that the model has. What would be lost:\n{shown}")


def _some(lines: Sequence[str]) -> str:
    more = f"; and {len(lines) - SHOWN} more" if len(lines) > SHOWN else ""
    return "; ".join(lines[:SHOWN]) + more


def config_for(
    model: Any,
    family: Family,
    recorded: Mapping[str, Any],
    names: Collection[str],
    special: Mapping[str, int | None] = MappingProxyType({}),
) -> dict[str, Any]:
    """config.json: the recorded one if it still is of this model, else what the family says of it.

    Recorded settings that no forward pass reads, such as ids of special tokens, stay. names: of the tensors; special:
    settings of special tokens where none are recorded.
    """
    if recorded.get("model_type") not in family.model_types:
        return {**special, **family.config_json(model)}
    if not differences(model, family.adjusted(family.read(Settings(dict(recorded))), names)):
        return dict(recorded)
    kept = {name: value for name, value in recorded.items() if name in UNUSED or name in family.unused}
    return {**kept, **family.config_json(model)}


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
    shard_bytes: int = SHARD_BYTES,
    advance: Advance = lambda elements: None,
) -> list[Mapped]:
    """Writes into a folder.

    dtype: of all tensors; None: each in its own of `dtypes`, by name. recorded: the config.json that the weights came
    with; special: ids of special tokens, where there was none. names: of tensors in the table -> in the files, where
    they differ.
    Returns the table. Raises OSError if it can't be written.
    """
    table = exported(family, model)
    by_name = {names.get(tensor.name, tensor.name): tensor for tensor in table}
    entries = {name: Entry(tensor.shape(), dtype or dtypes(tensor.name)) for name, tensor in by_name.items()}
    config = config_for(model, family, recorded, [tensor.name for tensor in table], special)
    if dtype is not None or not DTYPE_SETTINGS & config.keys():
        usual = Counter(entry.dtype for entry in entries.values()).most_common(1)[0][0]
        config |= dict.fromkeys(DTYPE_SETTINGS & config.keys() or {"torch_dtype"}, usual.name)
    (folder / CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    for name, file in ShardWriter(folder, entries, shard_bytes):
        file.write(name, export_tensor(by_name[name], weights, entries[name].dtype))
        advance(sum(prod(piece.shape) for piece in by_name[name].pieces))
    return table


def exported(family: Family, model: Any) -> list[Mapped]:
    """The table of a model that was not read from the family. Raises UserError for weights that it has no names for."""
    try:
        return resolved(family.rows(model), declared_by(model))
    except ValueError as error:
        raise UserError(f"the model can't be written as {family.name}: {error}") from error
