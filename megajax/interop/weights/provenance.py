"""The origin of weights, which checkpoints record, so that an export has all that the original folder had."""

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, NamedTuple, Self

import jax.numpy as jnp
import numpy as np

from megajax.config.errors import UserError
from megajax.interop.weights.foreign import WEIGHT_DTYPES, ForeignModel, Tensors
from megajax.interop.weights.formats import FILES

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
    text: str = ""
    """The file of that description, which comes back as it is if no setting changes."""
    dtype: str = ""
    """Dtype of most tensors."""
    dtypes: Mapping[str, str] = field(default_factory=dict)
    """Dtypes of the other tensors, by name."""
    names: Mapping[str, str] = field(default_factory=dict)
    """Name in the family's table -> name in the files, if they differ."""
    special_tokens: Mapping[str, int | None] = field(default_factory=dict)
    """Special tokens for config.json, by a run's own tokenizer; {}: those in `settings`."""

    @classmethod
    def of(cls, format_name: str, foreign: ForeignModel) -> Self:
        """Of a folder in another library's format."""
        entries = foreign.tensors.entries
        dtypes = {tensor.name: entries[tensor.name].dtype.name for tensor in foreign.table if tensor.name in entries}
        usual = max(Counter(dtypes.values()).items(), key=lambda item: item[1], default=("", 0))[0]
        return cls(
            format=format_name,
            folder=foreign.tensors.where,
            family=foreign.family,
            settings=foreign.settings,
            text=foreign.text,
            dtype=usual,
            dtypes={tensor: dtype for tensor, dtype in dtypes.items() if dtype != usual},
            names=foreign.names,
        )

    def dtype_of(self, tensor: str) -> np.dtype:
        """The dtype of a tensor in the table."""
        return jnp.dtype(self.dtypes.get(tensor, self.dtype or "float32"))

    def record(self) -> dict[str, Any]:
        """The record for the metadata of a checkpoint, which is JSON without infinities."""
        text = json.dumps(self.settings)
        return asdict(self) | {"settings": json.loads(text, parse_constant=lambda name: {TAG: str(float(name))})}

    @classmethod
    def of_meta(cls, meta: Mapping[str, Any], where: object) -> Self:
        """The record in a checkpoint's metadata. where: the checkpoint. Raises UserError for a damaged record."""
        record = meta.get(META, {})
        known = {entry.name: str if entry.default == "" else dict for entry in fields(cls)}
        valid = isinstance(record, dict) and all(isinstance(record[name], known.get(name, ())) for name in record)
        if valid:
            dtypes = [*record.get("dtypes", {}).values(), *filter(None, [record.get("dtype")])]
            names = record.get("names", {}).values()
            valid = all(dtype in WEIGHT_DTYPES for dtype in dtypes) and all(isinstance(name, str) for name in names)
        if not valid:
            raise UserError(f"{where}: the record `{META}` of its metadata is damaged: it does not describe weights")
        return cls(**record | {"settings": json.loads(json.dumps(record.get("settings", {})), object_hook=_untagged)})


TAG, TAGGED = "__number__", ("inf", "-inf", "nan")
"""A number that JSON lacks is recorded as {TAG: one of TAGGED}."""


def _untagged(value: dict[str, Any]) -> dict[str, Any] | float:
    return float(value[TAG]) if value.keys() == {TAG} and value[TAG] in TAGGED else value


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
    def of(cls, meta: Mapping[str, Any], checkpoints: Path) -> Self:
        """A checkpoint of a run, by its metadata. Raises UserError for a damaged record."""
        run = checkpoints.parent if checkpoints.name == "checkpoints" else checkpoints
        return cls(Provenance.of_meta(meta, run), run / FILES, meta.get("facts", {}).get("model.vocabulary_size"))
