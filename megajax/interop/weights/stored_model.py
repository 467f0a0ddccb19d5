"""A model with its weights, as it was read from any format, and how one is written."""

import shutil
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from functools import cached_property
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from megajax.checkpoint.boxes import Box
from megajax.checkpoint.weight_source import Entry, WeightSource, contiguous
from megajax.config.dump import flatten
from megajax.config.errors import UserError
from megajax.interop.weights.foreign import ForeignModel, ForeignWeights, Tensors, declared_by, demand_fit
from megajax.interop.weights.formats import FILES, split_name
from megajax.interop.weights.model_parts import quantization_of
from megajax.interop.weights.name_mapping import tensors_of
from megajax.interop.weights.provenance import Ancestor, Provenance
from megajax.interop.weights.regrouped import groups_of, regrouped
from megajax.interop.weights.safetensors import ONE_FILE, SafetensorsFolder, TensorFile
from megajax.interop.weights.weights_config import weights_config
from megajax.layers.param import ParamSpec
from megajax.models.protocol import ids_below
from megajax.tokenizers.tokenizer_files import tokenizer_config
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
    training: TrainingState | None = None
    """The state of another library's optimizer, if it can be assigned to the weights."""
    trained: bool = False
    """Whether the weights are those of a training run, unchanged."""
    trusted: bool = False
    """Whether the configs of runs may name code that is not of MegaJAX."""

    @cached_property
    def declared(self) -> Mapping[str, ParamSpec]:
        """Weights and observations of the model on one device, by path."""
        return declared_by(self.model) if self.foreign is None else self.foreign.declared

    @property
    def settings(self) -> Mapping[str, Any]:
        """Settings of the model, by dotted name."""
        return {f"model.{name}": value for name, value in flatten(self.model).items()}

    def vocabulary(self) -> int | None:
        return ids_below(self.model)

    def ancestor(self) -> Ancestor:
        return Ancestor(self.origin, self.files.absolute(), self.vocabulary(), self.extra)

    def use[T](self, work: Callable[[WeightSource], T]) -> T:
        return work(self.weights)

    def derived(self, model: Any, weights: WeightSource) -> "StoredModel":
        """A model derived from this one, with its files, origin and config."""

        def config(run: Path, files: Sequence[str]) -> RunConfig:
            return replace(self.config(run, files), model=model)

        changes = {"foreign": None, "training": None, "trained": False}
        return replace(self, model=model, weights=weights, config=config, **changes)

    def quantized_dtype(self) -> str | None:
        """The dtype of quantized matrices as the model's config names it; None: not quantized."""
        quantization = quantization_of(self.model)
        return None if quantization is None else quantization.weights

    def elements(self) -> int:
        """Number of weights."""
        return sum(map(prod, self.weights.shapes.values()))

    def fitted(
        self, declared: Mapping[str, ParamSpec] | None = None, paths: Collection[str] | None = None
    ) -> WeightSource:
        """The weights as another model declares them, in its groups of layers; None: as this one does.

        Of another library, weights outside of layers and vocabularies, for example positions, keep their stored shapes.
        Weights outside of layers that the other model lacks, for example a head, are ignored.

        paths: the weights and observations that are needed; None: all. Raises UserError for tensors of another library
        that do not fit.
        """
        declared, theirs, foreign = self.declared if declared is None else declared, self.declared, self.foreign
        if foreign is None:
            return regrouped(self.weights, groups_of(theirs), groups_of(declared))
        specs = {
            path: theirs.get(path, spec) if not spec.layers and "vocab" not in spec.axes else spec
            for path, spec in declared.items()
        }
        tensors = tensors_of(foreign.rows, specs)
        needed = [tensor for tensor in tensors if paths is None or any(piece.path in paths for piece in tensor.pieces)]
        ignored = {path: spec for path, spec in theirs.items() if path not in declared and not spec.layers}
        unused = {tensor.name for tensor in (*tensors, *tensors_of(foreign.rows, ignored))} - {t.name for t in needed}
        demand_fit(foreign.tensors, needed, [*foreign.ignored, *unused])
        return ForeignWeights(foreign.tensors, needed, specs)

    def demand_fit(self) -> None:
        """Raises UserError for tensors of another library that do not fit the model, and for a part of a model."""
        if not hasattr(self.model, "schema"):
            kind = type(self.model).__name__.removesuffix("Config")
            raise UserError(
                f"{self.name} is only a {kind}, which no run can train alone: load it into a model that has one with "
                f"--checkpoint.weights='[{{run: \"{self.name}\", into: vision}}]'"
            )
        self.fitted()


class RenamedTensors:
    """Some tensors of a source under other names: `megajax.interop.weights.foreign.Tensors`."""

    def __init__(self, tensors: Tensors, names: Mapping[str, str]):
        """names: new name -> name in the source."""
        self.where, self._tensors, self.names = tensors.where, tensors, names
        self.entries = {name: tensors.entries[stored_name] for name, stored_name in names.items()}

    def read(self, name: str) -> np.ndarray:
        return self._tensors.read(self.names[name])


def stored_foreign(name: str, foreign: ForeignModel) -> StoredModel:
    """The weights of FORMAT:DIR. Tensors are neither read nor compared with the model yet."""
    format_name, files = split_name(name)
    table, patterns = {tensor.name for tensor in foreign.table}, (foreign.extra, foreign.ignored)
    others = [entry for entry in foreign.tensors.entries if entry not in table]
    extra, ignored = ([entry for entry in others if any(fnmatchcase(entry, p) for p in some)] for some in patterns)
    unread = {foreign.names.get(entry, entry): entry for entry in extra}  # by their names in the files
    accepted = ", ".join(f"{setting}={value}" for setting, value in foreign.accepted.items())

    def config(run: Path, files_of_run: Sequence[str]) -> RunConfig:
        tokenizer = tokenizer_config(files_of_run, run / FILES, ids_below(foreign.model), files)
        return weights_config(foreign.model, tokenizer, run)

    return StoredModel(
        name=name,
        model=foreign.model,
        weights=foreign.weights,
        files=files,
        config=config,
        origin=Provenance.of(format_name, foreign),
        extra=RenamedTensors(foreign.tensors, unread) if unread else None,
        left_out=[*(entry for entry in ignored if entry not in extra), *foreign.copies],
        note=f"ignored settings: {accepted}" * bool(accepted),
        foreign=foreign,
    )


EXTRA = "extra"
"""Folder, below that of a run's files, of tensors that its model does not read: an export has them again."""


def stored_extra(files: Path) -> Tensors | None:
    """Those that were written for a run. files: the folder of its files; it may not exist."""
    return SafetensorsFolder(files / EXTRA) if (files / EXTRA).is_dir() else None


def write_extra(tensors: Tensors | None, files: Path) -> None:
    """Writes them for a run. Raises OSError if the folder can't be written."""
    shutil.rmtree(files / EXTRA, ignore_errors=True)  # of an earlier attempt
    if tensors is None:
        return
    (files / EXTRA).mkdir(parents=True)
    with TensorFile(files / EXTRA / ONE_FILE, tensors.entries) as file:
        for name in tensors.entries:
            file.write(name, contiguous(tensors.read(name)))
