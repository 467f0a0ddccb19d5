"""Weights of another run or of another library's checkpoint, brought onto this run's layout."""

from collections.abc import Mapping
from functools import cached_property, partial
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from megajax.checkpoint.reader import open_checkpoints
from megajax.checkpoint.stored_arrays import OBSERVED, WEIGHTS
from megajax.checkpoint.weights.foreign import ForeignModel, ForeignWeights, declared_by, demand_fit
from megajax.checkpoint.weights.formats import foreign_format, read_foreign
from megajax.checkpoint.weights.placement import placed
from megajax.checkpoint.weights.tensor_table import tensors_of
from megajax.config.dump import flatten
from megajax.config.errors import UserError
from megajax.job.layer_order import layers_of, like_stored, reorder, same_order, stored_chunks
from megajax.layers.param import ParamSpec, RowOrder
from megajax.models.protocol import ids_below
from megajax.pipeline.partition import row_order
from megajax.training.program import Program


class Wanted(NamedTuple):
    """An array as this run has it."""

    like: jax.ShapeDtypeStruct
    """With a sharding."""
    spec: ParamSpec

    def fits(self, shape: tuple[int, ...]) -> bool:
        """Whether a stored array has this shape, but for the rows of a stacked one."""
        like = tuple(self.like.shape)
        return shape == like or bool(self.spec.layers and shape[1:] == like[1:])


class StoredWeights(Protocol):
    """Weights and observations by path in the model that they were stored of."""

    where: str
    """For messages."""

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Path -> shape; the first dimension of a stacked one counts rows of its own order."""
        ...

    def read(self, wanted: Mapping[str, Wanted], order: RowOrder) -> dict[str, Array]:
        """Arrays by path, in the shapes and layouts that are given, with layers in this order of rows."""
        ...

    def whole(self, path: str) -> np.ndarray:
        """An array as it is stored, on the host, in float32."""
        ...

    def settings(self) -> Mapping[str, Any]:
        """Of the model, by names such as model.height."""
        ...

    def vocabulary(self) -> int | None:
        """Number of its tokens, without padding; None where it is not known."""
        ...

    def model(self) -> Any | None:
        """The model's config, where it is to be compared."""
        ...


def open_weights(name: Path, declared: Mapping[str, ParamSpec], asked: set[str], everywhere: Any) -> StoredWeights:
    """The weights of a run, or of FORMAT:DIR.

    declared: all weights and observations of the model that takes them, on one device; asked: paths of them;
    everywhere: the sharding of an array that all devices have.
    Raises UserError for a folder without checkpoints, and where another library's tensors do not fit.
    """
    if foreign_format(name) is None:
        return RunWeights(name, everywhere)
    return ForeignFolder(name, declared, asked)


def all_weights(name: Path, program: Program) -> tuple[dict[str, Array], str]:
    """The weights and observations of a run, or of FORMAT:DIR, where `Program.eval_step` takes them; and where from.

    Missing observations are zeros. Raises one UserError that lists every weight that is missing or does not fit.
    """
    state = program.state_like()
    likes: dict[str, Any] = {**state.params, **state.observed}
    stored = open_weights(name, declared_by(program.cfg.model), set(likes), getattr(state.step, "sharding", None))
    there, wanted = stored.shapes(), {path: Wanted(like, program.arrays[path]) for path, like in likes.items()}
    old, new = stored.vocabulary(), ids_below(program.cfg.model)
    wrong = [f"model.vocabulary_size: {old} there, {new} here"] if old is not None and old != new else []
    for path, one in wanted.items():
        if path not in there:
            wrong += [f"{path}: missing"] * (path in state.params)
        elif not one.fits(there[path]):
            wrong.append(f"{path}: {list(there[path])} there, {list(one.like.shape)} here")
    if wrong:
        raise UserError(f"the weights of {stored.where} are not this model's:\n" + "\n".join(f"  {w}" for w in wrong))
    read = stored.read({path: one for path, one in wanted.items() if path in there}, program.partition.order_of)
    absent = {path: one.like for path, one in wanted.items() if path not in there}
    zeros = {path: jnp.zeros(like.shape, like.dtype, device=like.sharding) for path, like in absent.items()}
    return read | zeros, stored.where


class RunWeights:
    """The weights of a checkpoint of ours."""

    def __init__(self, path: Path, everywhere: Any):
        self._everywhere = everywhere
        self.reader, step = open_checkpoints(path)
        step = self.reader.newest_whole() if step is None else step
        if step is None:
            raise UserError(f"there are no checkpoints to take weights from: {path} holds none")
        self.step, self.path, self.where = step, path, f"{path}, step {step}"

    @cached_property
    def _names(self) -> dict[str, str]:
        """Path -> name in the checkpoint."""
        names = self.reader.shapes(self.step)
        return {
            name.removeprefix(kind): name for kind in (OBSERVED, WEIGHTS) for name in names if name.startswith(kind)
        }

    def shapes(self) -> dict[str, tuple[int, ...]]:
        stored = self.reader.shapes(self.step)
        return {path: stored[name] for path, name in self._names.items()}

    def read(self, wanted: Mapping[str, Wanted], order: RowOrder) -> dict[str, Array]:
        """Raises UserError for other numbers of layers."""
        declared = {self._names[path]: one.spec for path, one in wanted.items()}
        like: dict[str, Any] = {self._names[path]: one.like for path, one in wanted.items()}
        chunks, shapes = stored_chunks(self.reader.meta(self.step)), self.reader.shapes(self.step)
        stored = partial(row_order, chunks)
        numbers = {name: layers_of(spec) for name, spec in declared.items() if spec.layers}
        total = 1 + max((max(layers) for layers in numbers.values()), default=-1)
        if len(chunks) > 1 and total != sum(map(len, chunks)):
            raise UserError(f"{self.path} has {sum(map(len, chunks))} layers, this model {total}")
        for name, layers in numbers.items():
            if (there := shapes[name][0]) != len(stored(layers)):
                path = name.partition(".")[2]
                raise UserError(f"{self.path} has {there} layers with {path}, this model {len(layers)}")
        if same_order(declared, stored, order):
            read = self.reader.restore(self.step, like, partial=True)[0]
        else:
            read = self.reader.restore(self.step, like_stored(like, declared, stored), partial=True)[0]
            read = reorder(read, like, declared, stored, order)
        return {path: read[self._names[path]] for path in wanted}

    def whole(self, path: str) -> np.ndarray:
        name = self._names[path]
        like = jax.ShapeDtypeStruct(self.reader.shapes(self.step)[name], np.float32, sharding=self._everywhere)
        return np.asarray(self.reader.restore(self.step, {name: like}, partial=True)[0][name])

    def settings(self) -> Mapping[str, Any]:
        return self.reader.meta(self.step)["facts"]

    def vocabulary(self) -> int | None:
        return self.settings().get("model.vocabulary_size")

    def model(self) -> None:
        """Shapes alone are compared: a run may start another kind of model, such as a mixture of experts."""


class ForeignFolder:
    """The weights of another library's checkpoint: each process reads what its devices hold, a layer at a time."""

    def __init__(self, name: Path, declared: Mapping[str, ParamSpec], asked: set[str]):
        self.where, self._foreign = str(name), read_foreign(name)
        self._weights = _fitting(self._foreign, declared, asked)

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return self._weights.shapes()

    def read(self, wanted: Mapping[str, Wanted], order: RowOrder) -> dict[str, Array]:
        rows = {path: order(layers) if (layers := layers_of(one.spec)) else None for path, one in wanted.items()}
        return {path: placed(self._weights, path, one.like, rows[path]) for path, one in wanted.items()}

    def whole(self, path: str) -> np.ndarray:
        box = tuple(slice(0, size) for size in self.shapes()[path])
        return self._weights.read(path, box).astype(np.float32)

    def settings(self) -> Mapping[str, Any]:
        return {f"model.{name}": value for name, value in flatten(self._foreign.model).items()}

    def vocabulary(self) -> int | None:
        return ids_below(self._foreign.model)

    def model(self) -> Any:
        return self._foreign.model


def _fitting(foreign: ForeignModel, declared: Mapping[str, ParamSpec], asked: set[str]) -> ForeignWeights:
    """The weights of a foreign model that are asked for, as the model that takes them declares them.

    Those outside of layers and vocabularies, such as positions, have the shapes that they have there. What the other
    model has outside of its layers and this one lacks, such as a head, is left.
    """
    theirs = declared_by(foreign.model)
    own = {
        path: theirs.get(path, spec) if not spec.layers and "vocab" not in spec.axes else spec
        for path, spec in declared.items()
    }
    tensors = tensors_of(foreign.rows, own)
    needed = [tensor for tensor in tensors if any(piece.path in asked for piece in tensor.pieces)]
    lacking = {path: spec for path, spec in theirs.items() if path not in declared and not spec.layers}
    others = [tensor.name for tensor in (*tensors, *tensors_of(foreign.rows, lacking)) if tensor not in needed]
    demand_fit(foreign.tensors, needed, [*foreign.ignored, *others])
    return ForeignWeights(foreign.tensors, needed, own)
