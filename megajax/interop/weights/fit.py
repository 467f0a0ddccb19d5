"""Where the weights of a model come from, and which of its arrays they fit: for training, evaluation and inference."""

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from megajax.checkpoint.reader import DamagedStep, open_checkpoints
from megajax.checkpoint.weight_source import WeightSource, placed, whole
from megajax.checkpoint.zarr_reader import StoredArrays
from megajax.config.errors import UserError
from megajax.config.hints import below
from megajax.interop.weights.adapters import merged
from megajax.interop.weights.foreign import declared_by
from megajax.interop.weights.formats import Reading, open_stored, split_name
from megajax.interop.weights.model_parts import adapters_of, quantization_of
from megajax.interop.weights.provenance import Ancestor
from megajax.interop.weights.quantize_on_load import Quantizing
from megajax.interop.weights.regrouped import demand_same_depth, groups_of, layers_of, regrouped
from megajax.interop.weights.run_format import StepWeights, stored_groups
from megajax.interop.weights.stored_model import StoredModel
from megajax.layers.param import ParamSpec, RowOrder
from megajax.models.protocol import ModelConfig, ids_below
from megajax.training.program import Program


class TargetArray(NamedTuple):
    """The shape, layout and declaration of an array in this run."""

    like: jax.ShapeDtypeStruct
    """Has a sharding."""
    spec: ParamSpec

    def fits(self, shape: tuple[int, ...]) -> bool:
        """Whether a stored array has this shape, which has a row for each layer and none for padding."""
        like = tuple(self.like.shape)
        return shape == ((len(layers_of(self.spec)), *like[1:]) if self.spec.layers else like)


type StoredWeights = WeightsOfRun | StoredModel
"""Stored weights and observations, by path in their model."""


def source_of(
    name: Path, declared: Mapping[str, ParamSpec], paths: set[str], ignore: Sequence[str], quantizing: Quantizing | None
) -> StoredWeights:
    """The weights of a run, or of FORMAT:DIR.

    Args:
        name: the run's folder or FORMAT:DIR.
        declared: all weights and observations of this run's model, on one device.
        paths: the weights and observations to load.
        ignore: patterns of unknown settings of another library's model that are accepted.
        quantizing: turns stored weights, unless they are quantized, into those of this run's model; None: it has
            none.

    Raises UserError for a folder without checkpoints, for another number of layers, and if another library's tensors do
    not fit.
    """
    if not split_name(name)[0]:
        return WeightsOfRun(name, declared, paths, quantizing)
    stored = open_stored(name, Reading(ignore=ignore))
    if stored.foreign is None:
        raise UserError(f"{name}: a run can't start from this format; convert it to a run first")
    stored = replace(stored, name=str(name))
    if quantizing is None:
        return replace(stored, weights=stored.fitted(declared, paths))
    weights = quantizing.weights(stored.fitted(quantizing.plain, paths & quantizing.plain.keys()))
    return replace(stored, weights=weights, note=joined(stored.note, quantizing.note))


def joined(*texts: str) -> str:
    """The texts that are not empty, separated by commas."""
    return ", ".join(filter(None, texts))


class Fit(NamedTuple):
    """What of the targets a source has."""

    fitting: dict[str, TargetArray]
    missing: list[str]
    reshaped: list[str]
    """Those that are stored with other shapes."""


def fit(shapes: Mapping[str, tuple[int, ...]], targets: Mapping[str, TargetArray]) -> Fit:
    """Compares the targets with the shapes of stored arrays."""
    fitting = {path: target for path, target in targets.items() if path in shapes and target.fits(shapes[path])}
    missing = [path for path in targets if path not in shapes]
    return Fit(fitting, missing, [path for path in targets if path in shapes and path not in fitting])


def shape_problem(path: str, stored: Sequence[int], shape: Sequence[int]) -> str:
    """A line about an array that does not fit."""
    return f"{path}: stored shape {list(stored)}, this model has {list(shape)}"


def read_arrays(stored: StoredWeights, targets: Mapping[str, TargetArray], order: RowOrder) -> dict[str, Array]:
    """Arrays by path, in the shapes and layouts of the targets, with layers in the given order of rows.

    Each process reads its devices' parts, a layer at a time.
    """
    rows = {path: order(layers) if (layers := layers_of(target.spec)) else None for path, target in targets.items()}
    return stored.use(
        lambda weights: {path: placed(weights, path, target.like, rows[path]) for path, target in targets.items()}
    )


def host_array(stored: StoredWeights, path: str) -> np.ndarray:
    """A whole stored array on the host, in float32."""
    return stored.use(lambda weights: whole(weights, path).astype(np.float32))


def stored_shapes(stored: StoredWeights) -> dict[str, tuple[int, ...]]:
    """Path -> shape; the first dimension of a stacked array is its number of layers."""
    return stored.use(lambda weights: dict(weights.shapes))


def read_intact[T](stored: StoredWeights, load: Callable[[], T]) -> T:
    """The result of `load`, which is called again with the step before if the newest step of a run proves damaged."""
    while True:
        try:
            return load()
        except DamagedStep:
            if not isinstance(stored, WeightsOfRun):
                raise
            stored.choose()


def all_weights(name: Path, program: Program, ignore: Sequence[str] = ()) -> tuple[dict[str, Array], str]:
    """The weights and observations of a run or of FORMAT:DIR, as inputs of `Program.eval_step`, and their source.

    ignore: patterns of unknown settings of another library's model that are accepted.
    Missing observations are zeros. Raises one UserError with all weights that are missing or do not fit.
    """
    state, model = program.state_like(), program.cfg.model
    likes: dict[str, Any] = {**state.params, **state.observed}
    stored = source_of(name, declared_by(model), set(likes), ignore, Quantizing.if_any(model))
    targets = {path: TargetArray(like, program.arrays[path]) for path, like in likes.items()}

    def load() -> dict[str, Array]:
        shapes, problems = stored_shapes(stored), list[str]()
        stored_tokens, tokens = stored.vocabulary(), ids_below(model)
        if stored_tokens is not None and stored_tokens != tokens:
            problems.append(f"model.vocabulary_size: stored {stored_tokens}, this model has {tokens}")
        fitting, missing, reshaped = fit(shapes, targets)
        problems += [f"{path}: missing" for path in missing if path in state.params]
        problems += [shape_problem(path, shapes[path], likes[path].shape) for path in reshaped]
        if problems:
            raise UserError(below(f"the weights of {stored.name} do not fit this model:", problems))
        zeros = {path: jnp.zeros(likes[path].shape, likes[path].dtype, device=likes[path].sharding) for path in missing}
        return read_arrays(stored, fitting, program.partition.order_of) | zeros

    return read_intact(stored, load), joined(stored.name, stored.note)


def weights_of(stored: StoredModel, model: ModelConfig) -> WeightSource:
    """The weights of a model from stored ones: with adapters merged, and quantized on reading if only the model is.

    model: without adapters. Raises UserError for another vocabulary size, and for another library's tensors that do not
    fit.
    """
    where, stored_tokens, tokens = stored.weights.where, ids_below(stored.model), ids_below(model)
    if stored_tokens != tokens:
        raise UserError(f"the weights of {where} are for {stored_tokens} tokens, this model has {tokens}")
    if stored.note:
        print(f"{where}: {stored.note}", file=sys.stderr)
    if adapters_of(stored.model) is not None:
        stored = merged(stored)
    if (quantizing := Quantizing.if_any(model)) is None or quantization_of(stored.model) is not None:
        return stored.fitted(declared_by(model))
    return quantizing.weights(stored.fitted(quantizing.plain))


class WeightsOfRun:
    """The weights of a run: of the newest step that proves intact, or of the one that the path names."""

    model = None
    """Only shapes are compared: a run may start from another kind of model, for example experts from a dense one."""

    def __init__(self, path: Path, declared: Mapping[str, ParamSpec], paths: set[str], quantizing: Quantizing | None):
        """As in `source_of`."""
        self.path, self._quantizing = path, None
        self.reader, step = open_checkpoints(path)
        if step is None:
            self.choose()
        else:
            self.step = step
        self._groups = groups_of(declared)
        wanted = {path: rows for path, rows in self._groups.items() if path in paths}
        demand_same_depth(str(path), stored_groups(self.reader.meta(self.step)), wanted)
        if quantizing is not None and not quantizing.scales() & stored_shapes(self).keys():
            self._quantizing, self._groups = quantizing, groups_of(quantizing.plain)

    def choose(self) -> None:
        """Takes the newest step that no restore found damaged. Raises UserError if there is none."""
        step = self.reader.newest_intact()
        if step is None:
            raise UserError(f"no checkpoints to load weights from in {self.path}")
        self.step = step

    @property
    def name(self) -> str:
        return f"{self.path}, step {self.step}"

    @property
    def note(self) -> str:
        return "" if self._quantizing is None else self._quantizing.note

    @property
    def settings(self) -> Mapping[str, Any]:
        return self.reader.meta(self.step)["facts"]

    def use[T](self, work: Callable[[WeightSource], T]) -> T:
        """The result of `work`, which may read any box, with layers in natural order.

        Raises DamagedStep on all processes if one of them finds a file damaged.
        """
        meta = self.reader.meta(self.step)

        def read(stored: StoredArrays) -> T:
            weights = regrouped(StepWeights(stored, meta, agreed=True), stored_groups(meta), self._groups)
            return work(weights if self._quantizing is None else self._quantizing.weights(weights))

        return self.reader.use_arrays(self.step, read)

    def vocabulary(self) -> int | None:
        return self.settings.get("model.vocabulary_size")

    def ancestor(self) -> Ancestor:
        return Ancestor.of(self.reader.meta(self.step), self.reader.folder)
