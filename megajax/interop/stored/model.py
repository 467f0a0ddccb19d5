"""A model with its weights, as it was read from any format, and how one is written."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from functools import cached_property
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from megajax.checkpoint.boxes import Box
from megajax.checkpoint.weights.foreign import (
    Entry,
    ForeignModel,
    ForeignWeights,
    Tensors,
    WeightSource,
    declared_by,
    demand_fit,
)
from megajax.checkpoint.weights.name_mapping import Mapped, resolved
from megajax.config.errors import UserError
from megajax.interop.formats import split_name
from megajax.interop.stored.provenance import FILES, Provenance
from megajax.interop.stored.weights_config import weights_config
from megajax.interop.tokenizer_files import tokenizer_config
from megajax.layers.param import ParamSpec
from megajax.models.protocol import ids_below
from megajax.training.run_config import RunConfig

SHARD_BYTES = 5_000_000_000


@dataclass(frozen=True)
class Options:
    """How weights are written."""

    dtype: np.dtype | None = None
    """Dtype of weights; None: float32 in a run, the dtype of the source in other formats."""
    family: str = ""
    shard_bytes: int = SHARD_BYTES
    base: str = ""
    """The base model of an adapter that is written: hf:DIR, or a name to record."""


type Advance = Callable[[int], None]
"""Called with the number of elements that were written since the last call."""


class StateArray(NamedTuple):
    """An array of a run's state that is not a weight."""

    entry: Entry
    read: Callable[[Box], np.ndarray]


class TrainingState(NamedTuple):
    """The state of another library's optimizer, with which a run continues its training."""

    iteration: int
    """Number of steps so far."""
    config: Callable[[RunConfig, Path], tuple[RunConfig, list[str]]]
    """(config of a new run with the weights, its folder) -> the config of a continued run, and settings that it
    lacks."""
    arrays: Callable[[Mapping[str, ParamSpec]], dict[str, StateArray]]
    """Weights and observations on one device, by path -> a run's state except weights, by name."""


@dataclass(frozen=True, kw_only=True)
class StoredModel:
    """A model with its weights, in any format."""

    model: Any
    """The model config."""
    weights: WeightSource
    name: str = ""
    """FORMAT:DIR, or the path of a run."""
    files: Path
    """Folder with files that came with the weights."""
    config: Callable[[Path, Sequence[str]], RunConfig]
    """(folder of a new run, its tokenizer files) -> the config of a run from these weights."""
    origin: Provenance = field(default_factory=Provenance)
    """The original source of the weights."""
    left_out: Sequence[str] = ()
    """Names of tensors that the model does not use."""
    extra: Tensors | None = None
    """Those of them that an export keeps, under their names in the files."""
    note: str = ""
    """About settings of the source that were ignored."""
    foreign: ForeignModel | None = None
    """The tensors of another library and their table; None for others."""
    table: Sequence[Mapped] | None = None
    """The mapping from those tensors to all weights."""
    training: TrainingState | None = None
    """The state of another library's optimizer, if it can be assigned to the weights."""
    trained: bool = False
    """Whether the weights are those of a training run, unchanged."""
    trusted: bool = False
    """Whether the configs of runs may name code that is not of MegaJAX."""

    @cached_property
    def declared(self) -> Mapping[str, ParamSpec]:
        """Weights and observations of the model on one device, by path."""
        return declared_by(self.model)

    def derived(self, model: Any, weights: WeightSource) -> "StoredModel":
        """A model derived from this one, with its files, origin and config."""

        def config(run: Path, files: Sequence[str]) -> RunConfig:
            return replace(self.config(run, files), model=model)

        changes = {"foreign": None, "table": None, "training": None, "trained": False}
        return replace(self, model=model, weights=weights, config=config, **changes)

    def quantized_dtype(self) -> str | None:
        """The dtype of quantized matrices as the model's config names it; None: not quantized."""
        quantization = getattr(self.model, "quantization", None)
        return None if quantization is None else quantization.weights

    def elements(self) -> int:
        """Number of weights."""
        return sum(map(prod, self.weights.shapes().values()))

    def demand_fit(self, paths: Collection[str] | None = None) -> None:
        """Raises UserError for tensors of another library that do not fit the model, and for a part of a model.

        paths: the weights that are needed; None: all.
        """
        if self.foreign is None:
            return
        if not hasattr(self.model, "schema"):
            kind = type(self.model).__name__.removesuffix("Config")
            raise UserError(
                f"{self.name} is only a {kind}, which no run can train alone: load it into a model that has one with "
                f"--checkpoint.weights='[{{run: \"{self.name}\", into: vision}}]'"
            )
        table = self.table or ()
        needed = [tensor for tensor in table if paths is None or any(piece.path in paths for piece in tensor.pieces)]
        unused = {tensor.name for tensor in table} - {tensor.name for tensor in needed}
        demand_fit(self.foreign.tensors, needed, (*self.foreign.ignored, *unused))


class RenamedTensors:
    """Some tensors of a source under other names: `megajax.checkpoint.weights.foreign.Tensors`."""

    def __init__(self, tensors: Tensors, names: Mapping[str, str]):
        """names: new name -> name in the source."""
        self.where, self._tensors, self.names = tensors.where, tensors, names

    def entries(self) -> Mapping[str, Entry]:
        entries = self._tensors.entries()
        return {name: entries[stored_name] for name, stored_name in self.names.items()}

    def read(self, name: str) -> np.ndarray:
        return self._tensors.read(self.names[name])


def stored_foreign(name: str, foreign: ForeignModel) -> StoredModel:
    """The weights of FORMAT:DIR. Tensors are neither read nor compared with the model yet."""
    format_name, files = split_name(name)
    declared = declared_by(foreign.model)
    table = resolved(foreign.rows, declared)
    names = {tensor.name for tensor in table}
    unread = foreign.unread(table)
    unmapped = (name for name in foreign.tensors.entries() if name not in {*names, *unread.values()})

    def config(run: Path, files_of_run: Sequence[str]) -> RunConfig:
        tokenizer = tokenizer_config(files_of_run, run / FILES, ids_below(foreign.model), files)
        return weights_config(foreign.model, tokenizer, run)

    return StoredModel(
        name=name,
        model=foreign.model,
        weights=ForeignWeights(foreign.tensors, table, declared),
        files=files,
        config=config,
        origin=Provenance.of(format_name, foreign, table),
        extra=RenamedTensors(foreign.tensors, unread) if unread else None,
        left_out=[
            *(name for name in unmapped if any(fnmatchcase(name, pattern) for pattern in foreign.ignored)),
            *foreign.copies,
        ],
        note=foreign.note(),
        foreign=foreign,
        table=table,
    )
