"""Hugging Face model folders as a format of stored models."""

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from megajax.config.budget import read_json
from megajax.config.nearest import listed
from megajax.interop.conversion.weights_config import special_tokens
from megajax.interop.formats import Reading, split_name
from megajax.interop.huggingface.export import family_for, write_model
from megajax.interop.huggingface.folder import CONFIG, read_model
from megajax.interop.runs.writer import Advance
from megajax.interop.stored_model import Options, StoredModel, stored_foreign
from megajax.interop.tokenizers.files import copy_files
from megajax.storage.new_folder import new_folder

LONGEST = 60
"""Characters of a setting in a message."""


def read(name: str, reading: Reading) -> StoredModel:
    """The model of hf:DIR. Raises UserError for a missing folder, unsupported settings and damaged files."""
    return stored_foreign(name, read_model(split_name(name)[1], reading.ignore))


def write(stored: StoredModel, target: Path, options: Options, advance: Advance) -> list[str]:
    """Writes a folder of the family that the weights came from, or of the first that loses no setting."""
    origin = stored.origin
    family = family_for(stored.model, options.family, origin.family)
    usual = jnp.dtype(origin.dtype or "float32")

    special = origin.special_tokens
    if not (special or origin.settings):
        special = special_tokens(stored.config(target, []))

    def dtype_of(name: str) -> np.dtype:
        return jnp.dtype(origin.dtypes.get(name, usual))

    with new_folder(target, stored.elements() * (options.dtype or usual).itemsize) as folder:
        table = write_model(
            folder,
            stored.model,
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
