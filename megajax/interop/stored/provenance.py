"""The origin of weights, which checkpoints record, so that an export has all that the original folder had."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, NamedTuple, Self

from megajax.checkpoint.weights.foreign import WEIGHT_DTYPES, ForeignModel, Tensors
from megajax.checkpoint.weights.name_mapping import Mapped
from megajax.config.errors import UserError

FILES = "tokenizer"
"""Folder of a run for the files beside its weights, such as those of its tokenizer."""
META = "source"
"""Name of the record in a checkpoint's metadata."""


@dataclass(frozen=True, kw_only=True)
class Provenance:
    """The original source of weights. Each run copies it from the weights that it starts from."""

    format: str = ""
    folder: str = ""
    """The folder when it was read, such as the base model of adapters. It may be gone."""
    family: str = ""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """The model's description in that format, such as a config.json."""
    dtype: str = ""
    """Dtype of most tensors."""
    dtypes: Mapping[str, str] = field(default_factory=dict)
    """Dtypes of the other tensors, by name."""
    names: Mapping[str, str] = field(default_factory=dict)
    """Name in the family's table -> name in the files, if they differ."""
    special_tokens: Mapping[str, int | None] = field(default_factory=dict)
    """Special tokens for config.json, by a run's own tokenizer; {}: those in `settings`."""

    @classmethod
    def of(cls, format_name: str, foreign: ForeignModel, table: Sequence[Mapped]) -> Self:
        """Of a folder in another library's format. table: its tensors."""
        entries = foreign.tensors.entries()
        dtypes = {tensor.name: entries[tensor.name].dtype.name for tensor in table if tensor.name in entries}
        usual = max(Counter(dtypes.values()).items(), key=lambda item: item[1], default=("", 0))[0]
        return cls(
            format=format_name,
            folder=foreign.tensors.where,
            family=foreign.family,
            settings=foreign.settings,
            dtype=usual,
            dtypes={tensor: dtype for tensor, dtype in dtypes.items() if dtype != usual},
            names=foreign.names,
        )

    @classmethod
    def of_meta(cls, meta: Mapping[str, Any], where: object) -> Self:
        """The record in a checkpoint's metadata. where: the checkpoint. Raises UserError for a damaged record."""
        record = meta.get(META, {})
        known = {
            entry.name: dict if entry.name not in ("format", "folder", "family", "dtype") else str
            for entry in fields(cls)
        }
        valid = isinstance(record, dict) and all(
            name in known and isinstance(value, known[name]) for name, value in record.items()
        )
        if valid:
            dtypes = [*record.get("dtypes", {}).values(), *filter(None, [record.get("dtype")])]
            names = record.get("names", {}).values()
            valid = all(dtype in WEIGHT_DTYPES for dtype in dtypes) and all(isinstance(name, str) for name in names)
        if not valid:
            raise UserError(f"{where}: the record `{META}` of its metadata is damaged: it does not describe weights")
        return cls(**record)


class Ancestor(NamedTuple):
    """The weights that a run starts from."""

    provenance: Provenance
    files: Path
    """Folder of the tokenizer files that came with them. It may not exist."""
    vocabulary: int | None
    """Number of tokens; None if unknown."""
    extra: Tensors | None = None
    """Tensors of the original folder that the model does not read."""

    @classmethod
    def of(cls, meta: Mapping[str, Any], checkpoints: Path, vocabulary: int | None) -> Self:
        """A checkpoint of a run, by its metadata. Raises UserError for a damaged record."""
        run = checkpoints.parent if checkpoints.name == "checkpoints" else checkpoints
        return cls(Provenance.of_meta(meta, run), run / FILES, vocabulary)
