"""Weights of our models out of other libraries' checkpoints, read where they are asked for.

`Tensors` is what a format gives: names, shapes, and views of files. `ForeignWeights` shows them as weights of ours, of
which any box can be read: a device's shard, or a layer.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any, NamedTuple, Protocol

import jax.numpy as jnp
import numpy as np
from flax import nnx

from megajax.checkpoint.boxes import Box, box_of, chunk_shape, chunks_of, overlap, relative, shape_of
from megajax.checkpoint.weights.copying import contiguous, converted, copy_into
from megajax.checkpoint.weights.tensor_table import Mapped, Row
from megajax.config.errors import UserError
from megajax.config.nearest import nearest_names
from megajax.layers.param import Observation, ParamSpec, specs
from megajax.mesh.config import ParallelConfig
from megajax.mesh.layout import Layout
from megajax.mesh.rules import Plan

WEIGHT_DTYPES = ("float64", "float32", "float16", "bfloat16")
"""Of tensors that are weights as they stand. They may be mixed."""
ITEMSIZE = 4
"""Bytes of an element of our weights, at most, when chunks of them are measured."""
ANY_ROW = -1
"""In place of a row: a tensor that is not of one row of a weight."""


class Entry(NamedTuple):
    """A stored array."""

    shape: tuple[int, ...]
    dtype: np.dtype


class Tensors(Protocol):
    """The named tensors of a checkpoint."""

    where: str
    """The folder, for messages."""

    def entries(self) -> Mapping[str, Entry]:
        """Name -> shape and dtype."""
        ...

    def read(self, name: str) -> np.ndarray:
        """A tensor, as a view of its file where the format has one."""
        ...


class WeightSource(Protocol):
    """Weights of a model, by path, with the layers of stacked ones in natural order."""

    where: str
    """The folder, for messages."""

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Path -> shape."""
        ...

    def read(self, path: str, box: Box) -> np.ndarray:
        """A box of a weight, in the dtype that it is stored in."""
        ...


@dataclass(frozen=True, kw_only=True)
class ForeignModel:
    """A checkpoint of another library as a model of ours. No tensor has been read yet, and none compared."""

    model: Any
    """The model config."""
    tensors: Tensors
    rows: Sequence[Row]
    """The table of names."""
    ignored: Sequence[str] = ()
    """Patterns of names of tensors that hold no weights."""
    family: str = ""
    """What its format calls a table of names, if it has several."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """The description of the model as the format has it, such as a config.json."""
    names: Mapping[str, str] = field(default_factory=dict)
    """Name of a tensor in the table -> in the files, where it is another one."""
    copies: Sequence[str] = ()
    """Tensors in the files that are equal to others."""


class ForeignWeights:
    """A `WeightSource` of tensors and a table of names. Observations that the table has are among its weights."""

    def __init__(self, tensors: Tensors, table: Sequence[Mapped], declared: Mapping[str, ParamSpec]):
        """declared: what the table was resolved against."""
        self.where, self._tensors = tensors.where, tensors
        self._shapes = {piece.path: declared[piece.path].shape for tensor in table for piece in tensor.pieces}
        # By the first row that a tensor has: a model may have tens of thousands of them.
        self._holders: dict[str, dict[int, list[tuple[Mapped, int, Box]]]] = defaultdict(lambda: defaultdict(list))
        for tensor in table:
            for number, piece in enumerate(tensor.pieces):
                place = box_of(piece.index, self._shapes[piece.path])
                row = piece.index[0] if piece.index and isinstance(piece.index[0], int) else ANY_ROW
                self._holders[piece.path][row].append((tensor, number, place))

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return self._shapes

    def read(self, path: str, box: Box) -> np.ndarray:
        """Only the tensors that the box touches are read, and of them no more than the box.

        Tensors of several dtypes give one that holds the values of all.
        """
        result: np.ndarray | None = None
        for tensor, number, place in self._holding(path, box):
            if (common := overlap(box, place)) is None:
                continue
            piece = tensor.to_weights(self._tensors.read(tensor.name))[number].reshape(shape_of(place))
            if result is None:
                result = np.zeros(shape_of(box), piece.dtype)
            elif result.dtype != piece.dtype:
                result = result.astype(jnp.promote_types(result.dtype, piece.dtype))
            copy_into(result[relative(common, box)], piece[relative(common, place)])
        return np.zeros(shape_of(box), np.float32) if result is None else result

    def _holding(self, path: str, box: Box) -> Iterator[tuple[Mapped, int, Box]]:
        """Tensors that may hold a part of a box, which of their pieces does, and where that is in the weight."""
        by_row = self._holders[path]
        yield from by_row.get(ANY_ROW, ())
        for row in range(box[0].start, box[0].stop) if box else ():
            yield from by_row.get(row, ())


def export_tensor(tensor: Mapped, weights: WeightSource, dtype: np.dtype) -> np.ndarray:
    """A tensor of another library made of our weights, contiguous.

    Zeros stand for an observation that the source does not keep. Memory has the tensor twice at most, and a chunk of
    our weights.
    """
    pieces, shapes = [], weights.shapes()
    for piece in tensor.pieces:
        if piece.path not in shapes:
            pieces.append(np.zeros(piece.shape, dtype))
            continue
        place = box_of(piece.index, shapes[piece.path])
        values = np.empty(shape_of(place), dtype)
        for box in chunks_of(place, chunk_shape(shape_of(place), ITEMSIZE)):
            part = converted(weights.read(piece.path, box), dtype, f"{weights.where}: {piece.path}")
            values[relative(box, place)] = part
        pieces.append(values.reshape(piece.shape))
    return contiguous(tensor.from_weights(pieces))


def declared_by(model: Any) -> dict[str, ParamSpec]:
    """Weights and observations of a model config, on one device, by path. Nothing is allocated."""
    abstract = nnx.eval_shape(one_device(model))
    return {**specs(abstract), **specs(abstract, Observation)}


def one_device(model: Any) -> Callable[[], nnx.Module]:
    """Builds a model config for one device."""
    layout = Layout(Plan.of(ParallelConfig(data=1)))
    return lambda: model.build(layout)


def demand_fit(tensors: Tensors, table: Sequence[Mapped], ignored: Sequence[str] = ()) -> None:
    """Raises one UserError with all tensors that are missing, left over or of another shape.

    ignored: patterns of names of tensors that hold no weights of ours.
    """
    entries, wanted = tensors.entries(), {tensor.name: tensor for tensor in table}
    extra = [name for name in entries if name not in wanted and not any(fnmatchcase(name, each) for each in ignored)]
    problems = []
    for name, tensor in wanted.items():
        if name not in entries:
            near = nearest_names(name, extra, at_most=1)
            problems.append(f"{name}: missing" + (f"; did you mean {near[0]}?" if near else ""))
        elif entries[name].shape != tensor.shape():
            problems.append(f"{name}: {list(entries[name].shape)} there, {list(tensor.shape())} by the model's config")
        elif entries[name].dtype.name not in WEIGHT_DTYPES:
            problems.append(f"{name}: {entries[name].dtype.name} needs scales, which are not supported: dequantize it")
    problems += [f"{name}: the model has no such weight" for name in extra]
    if problems:
        shown = problems[:40] + [f"and {len(problems) - 40} more"] * (len(problems) > 40)
        raise UserError(
            f"the tensors of {tensors.where} are not those of the model:\n" + "\n".join(f"  {line}" for line in shown)
        )
