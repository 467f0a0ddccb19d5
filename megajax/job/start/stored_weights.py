"""Loads weights of another run or of another library's checkpoint in this run's layout."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from megajax.checkpoint.reader import DamagedStep, open_checkpoints
from megajax.checkpoint.weights.foreign import (
    ForeignModel,
    ForeignWeights,
    WeightSource,
    declared_by,
    demand_fit,
    placed,
)
from megajax.checkpoint.weights.name_mapping import tensors_of
from megajax.checkpoint.weights.quantize_on_load import QuantizedWeights, Quantizing
from megajax.checkpoint.zarr_reader import OBSERVED, WEIGHTS
from megajax.config.dump import flatten
from megajax.config.errors import UserError
from megajax.interop.formats import Reading, open_stored, split_name
from megajax.interop.runs.format import StepWeights
from megajax.interop.stored.provenance import Ancestor
from megajax.job.start.layer_order import layers_of, like_stored, reorder, same_order, stored_chunks
from megajax.layers.param import ParamSpec, RowOrder
from megajax.models.protocol import ids_below
from megajax.pipeline.partition import row_order
from megajax.training.program import Program


class TargetArray(NamedTuple):
    """The shape, layout and declaration of an array in this run."""

    like: jax.ShapeDtypeStruct
    """Has a sharding."""
    spec: ParamSpec

    def fits(self, shape: tuple[int, ...]) -> bool:
        """Whether a stored array has this shape; stacked arrays may have another number of rows."""
        like = tuple(self.like.shape)
        return shape == like or bool(self.spec.layers and shape[1:] == like[1:])


class StoredWeights(Protocol):
    """Stored weights and observations by path in their model."""

    @property
    def where(self) -> str:
        """The source, for messages."""
        ...

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Path -> shape; the first dimension of a stacked array is its number of stored rows."""
        ...

    def read(self, targets: Mapping[str, TargetArray], order: RowOrder) -> dict[str, Array]:
        """Arrays by path, in the shapes and layouts of the targets, with layers in the given order of rows."""
        ...

    def host_array(self, path: str) -> np.ndarray:
        """A whole stored array on the host, in float32."""
        ...

    def settings(self) -> Mapping[str, Any]:
        """Settings of the model by name, for example model.height."""
        ...

    def vocabulary(self) -> int | None:
        """Number of tokens without padding; None if unknown."""
        ...

    def model(self) -> Any | None:
        """The model's config; None if only shapes are compared."""
        ...

    def note(self) -> str:
        """A text to follow `where`, about settings that were ignored."""
        ...

    def ancestor(self) -> Ancestor:
        """What a run that starts from these weights records about them."""
        ...


def open_weights(
    name: Path,
    declared: Mapping[str, ParamSpec],
    paths: set[str],
    replicated: Any,
    ignore: Sequence[str],
    quantizing: Quantizing | None = None,
) -> StoredWeights:
    """The weights of a run, or of FORMAT:DIR.

    Args:
        name: the run's folder or FORMAT:DIR.
        declared: all weights and observations of this run's model, on one device.
        paths: the weights and observations to load.
        replicated: the sharding of an array that every device holds whole.
        ignore: patterns of unknown settings of another library's model that are accepted.
        quantizing: turns stored weights, unless they are quantized, into those of this run's model; None: it has
            none.

    Raises UserError for a folder without checkpoints, and if another library's tensors do not fit.
    """
    if split_name(name)[0]:
        return ForeignFolder(name, declared, paths, ignore, quantizing)
    run = RunWeights(name, replicated)
    if quantizing is None or quantizing.scales() & run.shapes().keys():
        return run
    return QuantizedRun(name, replicated, quantizing)


def all_weights(name: Path, program: Program, ignore: Sequence[str] = ()) -> tuple[dict[str, Array], str]:
    """The weights and observations of a run or of FORMAT:DIR, as inputs of `Program.eval_step`, and their source.

    ignore: patterns of unknown settings of another library's model that are accepted.
    Missing observations are zeros. Raises one UserError with all weights that are missing or do not fit.
    """
    state = program.state_like()
    likes: dict[str, Any] = {**state.params, **state.observed}
    replicated = getattr(state.step, "sharding", None)
    model = program.cfg.model
    stored = open_weights(name, declared_by(model), set(likes), replicated, ignore, Quantizing.if_any(model))
    return read_intact(stored, lambda: _fitting_weights(stored, likes, program)), stored.where + stored.note()


def read_intact[T](stored: StoredWeights, load: Callable[[], T]) -> T:
    """The result of `load`, which is called again with the step before if the newest step of a run proves damaged."""
    while True:
        try:
            return load()
        except DamagedStep:
            if not isinstance(stored, RunWeights):
                raise
            stored.choose()


def _fitting_weights(stored: StoredWeights, likes: Mapping[str, Any], program: Program) -> dict[str, Array]:
    state = program.state_like()
    shapes, targets = stored.shapes(), {path: TargetArray(like, program.arrays[path]) for path, like in likes.items()}
    stored_tokens, tokens = stored.vocabulary(), ids_below(program.cfg.model)
    problems = []
    if stored_tokens is not None and stored_tokens != tokens:
        problems.append(f"model.vocabulary_size: stored {stored_tokens}, this model has {tokens}")
    for path, target in targets.items():
        if path not in shapes:
            problems += [f"{path}: missing"] * (path in state.params)
        elif not target.fits(shapes[path]):
            problems.append(shape_problem(path, shapes[path], target.like.shape))
    if problems:
        raise UserError("\n  ".join([f"the weights of {stored.where} do not fit this model:", *problems]))
    present = {path: target for path, target in targets.items() if path in shapes}
    missing = {path: like for path, like in likes.items() if path not in shapes}
    zeros = {path: jnp.zeros(like.shape, like.dtype, device=like.sharding) for path, like in missing.items()}
    return stored.read(present, program.partition.order_of) | zeros


def shape_problem(path: str, stored: Sequence[int], shape: Sequence[int]) -> str:
    """A line about an array that does not fit."""
    return f"{path}: stored shape {list(stored)}, this model has {list(shape)}"


class RunWeights:
    """The weights of a MegaJAX checkpoint."""

    def __init__(self, path: Path, replicated: Any):
        self._replicated, self.path = replicated, path
        self.reader, step = open_checkpoints(path)
        if step is None:
            self.choose()
        else:
            self.step = step

    def choose(self) -> None:
        """Takes the newest step that no restore found damaged. Raises UserError if there is none."""
        step = self.reader.newest_intact()
        if step is None:
            raise UserError(f"no checkpoints to load weights from in {self.path}")
        self.step = step

    @property
    def where(self) -> str:
        return f"{self.path}, step {self.step}"

    @property
    def _names(self) -> dict[str, str]:
        """Path -> name in the checkpoint."""
        names = self.reader.shapes(self.step)
        return {
            name.removeprefix(kind): name for kind in (OBSERVED, WEIGHTS) for name in names if name.startswith(kind)
        }

    def shapes(self) -> dict[str, tuple[int, ...]]:
        stored, names = self.reader.shapes(self.step), self._names
        return {path: stored[name] for path, name in names.items()}

    def read(self, targets: Mapping[str, TargetArray], order: RowOrder) -> dict[str, Array]:
        """Raises UserError for other numbers of layers."""
        names = self._names
        declared = {names[path]: target.spec for path, target in targets.items()}
        like: dict[str, Any] = {names[path]: target.like for path, target in targets.items()}
        chunks, shapes = stored_chunks(self.reader.meta(self.step)), self.reader.shapes(self.step)
        stored = partial(row_order, chunks)
        numbers = {name: layers_of(spec) for name, spec in declared.items() if spec.layers}
        total = 1 + max((max(layers) for layers in numbers.values()), default=-1)
        if len(chunks) > 1 and total != sum(map(len, chunks)):
            raise UserError(f"{self.path} has {sum(map(len, chunks))} layers, this model {total}")
        for name, layers in numbers.items():
            if (stored_rows := shapes[name][0]) != len(stored(layers)):
                path = name.partition(".")[2]
                raise UserError(f"{self.path} has {stored_rows} layers with {path}, this model {len(layers)}")
        if same_order(declared, stored, order):
            arrays = self.reader.restore(self.step, like, partial=True)[0]
        else:
            arrays = self.reader.restore(self.step, like_stored(like, declared, stored), partial=True)[0]
            arrays = reorder(arrays, like, declared, stored, order)
        return {path: arrays[names[path]] for path in targets}

    def host_array(self, path: str) -> np.ndarray:
        name = self._names[path]
        like = jax.ShapeDtypeStruct(self.reader.shapes(self.step)[name], np.float32, sharding=self._replicated)
        return np.asarray(self.reader.restore(self.step, {name: like}, partial=True)[0][name])

    def settings(self) -> Mapping[str, Any]:
        return self.reader.meta(self.step)["facts"]

    def vocabulary(self) -> int | None:
        return self.settings().get("model.vocabulary_size")

    def model(self) -> None:
        """None: a run may start from another kind of model, for example experts from a dense model."""

    def note(self) -> str:
        return ""

    def ancestor(self) -> Ancestor:
        return Ancestor.of(self.reader.meta(self.step), self.reader.folder, self.vocabulary())


class QuantizedRun(RunWeights):
    """The weights of a MegaJAX checkpoint, quantized a layer at a time: each process reads its devices' parts."""

    def __init__(self, path: Path, replicated: Any, quantizing: Quantizing):
        super().__init__(path, replicated)
        self._quantizing = quantizing

    def _weights(self) -> QuantizedWeights:
        chunks = [range(*bounds) for bounds in self.reader.meta(self.step).get("rows", [])]
        stored, plain = super().shapes(), self._quantizing.plain
        source = StepWeights(
            self.reader.demand(self.step), {path: plain[path] for path in plain if path in stored}, chunks
        )
        return self._quantizing.weights(source)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return dict(self._weights().shapes())

    def read(self, targets: Mapping[str, TargetArray], order: RowOrder) -> dict[str, Array]:
        return _placed(self._weights(), targets, order)

    def note(self) -> str:
        return f", quantized to {self._quantizing.format}"


class ForeignFolder:
    """The weights of another library's checkpoint: each process reads its devices' parts, one layer at a time."""

    def __init__(
        self,
        name: Path,
        declared: Mapping[str, ParamSpec],
        paths: set[str],
        ignore: Sequence[str],
        quantizing: Quantizing | None = None,
    ):
        self.where, self._stored, self._quantizing = str(name), open_stored(name, Reading(ignore=ignore)), quantizing
        if (foreign := self._stored.foreign) is None:
            raise UserError(f"{name}: a run can't start from this format; convert it to a run first")
        self._weights: WeightSource
        if quantizing is None:
            self._weights = _fitting(foreign, declared, paths)
        else:
            self._weights = quantizing.weights(_fitting(foreign, quantizing.plain, paths & quantizing.plain.keys()))

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return self._weights.shapes()

    def read(self, targets: Mapping[str, TargetArray], order: RowOrder) -> dict[str, Array]:
        return _placed(self._weights, targets, order)

    def host_array(self, path: str) -> np.ndarray:
        box = tuple(slice(0, size) for size in self.shapes()[path])
        return self._weights.read(path, box).astype(np.float32)

    def settings(self) -> Mapping[str, Any]:
        return {f"model.{name}": value for name, value in flatten(self._stored.model).items()}

    def vocabulary(self) -> int | None:
        return ids_below(self._stored.model)

    def model(self) -> Any:
        return self._stored.model

    def note(self) -> str:
        quantized = "" if self._quantizing is None else f"quantized to {self._quantizing.format}"
        return "".join(f", {note}" for note in (self._stored.note, quantized) if note)

    def ancestor(self) -> Ancestor:
        stored = self._stored
        return Ancestor(stored.origin, stored.files.absolute(), self.vocabulary(), stored.extra)


def _placed(weights: WeightSource, targets: Mapping[str, TargetArray], order: RowOrder) -> dict[str, Array]:
    rows = {path: order(layers) if (layers := layers_of(target.spec)) else None for path, target in targets.items()}
    return {path: placed(weights, path, target.like, rows[path]) for path, target in targets.items()}


def _fitting(foreign: ForeignModel, declared: Mapping[str, ParamSpec], paths: set[str]) -> ForeignWeights:
    """The weights `paths` of a foreign model, as this run's model declares them.

    Weights outside of layers and vocabularies, for example positions, keep their stored shapes. Weights outside of
    layers that this run's model lacks, for example a head, are ignored.
    """
    theirs = declared_by(foreign.model)
    specs = {
        path: theirs.get(path, spec) if not spec.layers and "vocab" not in spec.axes else spec
        for path, spec in declared.items()
    }
    tensors = tensors_of(foreign.rows, specs)
    needed = [tensor for tensor in tensors if any(piece.path in paths for piece in tensor.pieces)]
    ignored = {path: spec for path, spec in theirs.items() if path not in declared and not spec.layers}
    unused = [tensor.name for tensor in (*tensors, *tensors_of(foreign.rows, ignored)) if tensor not in needed]
    demand_fit(foreign.tensors, needed, [*foreign.ignored, *unused])
    return ForeignWeights(foreign.tensors, needed, specs)
