"""Weights from other libraries' checkpoints, read on demand, and their arrays on a mesh.

`Tensors` is the interface of a format: names, shapes, and views of files. `ForeignWeights` gives them as weights of a
model, and reads any box of one: a device's shard, or a layer.
"""

import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import cached_property
from typing import Any, Protocol

import jax.numpy as jnp
import numpy as np
from flax import nnx

from megajax.checkpoint.boxes import Box, box_of, chunk_shape, chunks_of, overlap, relative, shape_of
from megajax.checkpoint.weight_source import ITEMSIZE, Entry, WeightSource, contiguous, converted, copy_into
from megajax.config.errors import UserError
from megajax.config.hints import below, nearest_names
from megajax.interop.weights.name_mapping import MappedTensor, Row, resolved
from megajax.layers.param import Observation, ParamSpec, specs
from megajax.mesh.config import ParallelConfig
from megajax.mesh.layout import Layout
from megajax.mesh.sharding_rules import Plan
from megajax.models.protocol import ModelConfig

WEIGHT_DTYPES = ("float64", "float32", "float16", "bfloat16")
"""Dtypes of tensors that are weights without scales. A checkpoint may mix them."""
ANY_ROW = -1
"""Instead of a row: the tensor does not belong to a single row of a weight."""


class Tensors(Protocol):
    """The named tensors of a checkpoint."""

    where: str
    """The folder, for messages."""

    @property
    def entries(self) -> Mapping[str, Entry]:
        """Name -> shape and dtype."""
        ...

    def read(self, name: str) -> np.ndarray:
        """A tensor, as a view of its file if the format allows."""
        ...


@dataclass(frozen=True, kw_only=True)
class ForeignModel:
    """A checkpoint of another library as a MegaJAX model. No tensor is read or checked yet."""

    model: Any
    """The model config."""
    tensors: Tensors
    rows: Sequence[Row]
    """The table of names."""
    ignored: Sequence[str] = ()
    """Patterns of names of tensors that hold no weights."""
    extra: Sequence[str] = ()
    """Patterns of those of them that an export keeps."""
    family: str = ""
    """Name of the table of names, if the format has several."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """The format's description of the model, such as config.json."""
    text: str = ""
    """The file of the description."""
    names: Mapping[str, str] = field(default_factory=dict)
    """Name of a tensor in the table -> its name in the files, if they differ."""
    copies: Sequence[str] = ()
    """Tensors in the files that are copies of others."""
    accepted: Mapping[str, Any] = field(default_factory=dict)
    """Settings that the model lacks, accepted by the user, with their values."""

    @cached_property
    def declared(self) -> Mapping[str, ParamSpec]:
        """Weights and observations of the model on one device, by path."""
        return declared_by(self.model)

    @cached_property
    def table(self) -> Sequence[MappedTensor]:
        """The tensors of the model."""
        return resolved(self.rows, self.declared)

    @cached_property
    def weights(self) -> "ForeignWeights":
        """All weights of the model."""
        return ForeignWeights(self.tensors, self.table, self.declared)


class ForeignWeights:
    """A `WeightSource` of tensors and a table of names. Observations in the table are among the weights."""

    def __init__(self, tensors: Tensors, table: Sequence[MappedTensor], declared: Mapping[str, ParamSpec]):
        """declared: the weights that the table was resolved against."""
        self.where, self._tensors = tensors.where, tensors
        self.shapes = {piece.path: declared[piece.path].shape for tensor in table for piece in tensor.pieces}
        # By the first row in a tensor, because a model may have tens of thousands of tensors.
        self._holders: dict[str, dict[int, list[tuple[MappedTensor, int, Box]]]] = defaultdict(
            lambda: defaultdict(list)
        )
        for tensor in table:
            for number, piece in enumerate(tensor.pieces):
                place = box_of(piece.index, self.shapes[piece.path])
                row = piece.index[0] if piece.index and isinstance(piece.index[0], int) else ANY_ROW
                self._holders[piece.path][row].append((tensor, number, place))

    def read(self, path: str, box: Box) -> np.ndarray:
        """A box of a weight. Only the tensors that overlap the box are read.

        The dtype is that of the tensors; if they have several, one that holds all their values.
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

    def _holding(self, path: str, box: Box) -> Iterator[tuple[MappedTensor, int, Box]]:
        """Tensors that may hold a part of a box, the number of the piece, and its box in the weight."""
        by_row = self._holders[path]
        yield from by_row.get(ANY_ROW, ())
        for row in range(box[0].start, box[0].stop) if box else ():
            yield from by_row.get(row, ())


def export_tensor(tensor: MappedTensor, weights: WeightSource, dtype: np.dtype) -> np.ndarray:
    """A tensor of another library, contiguous, from the weights of a model.

    An observation that the source lacks is zero. Memory holds at most two copies of the tensor, and a chunk of weights.
    """
    pieces, shapes = [], weights.shapes
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


def declared_by(model: ModelConfig) -> dict[str, ParamSpec]:
    """Weights and observations of a model config, on one device, by path. Nothing is allocated."""
    abstract = nnx.eval_shape(one_device(model))
    return {**specs(abstract), **specs(abstract, Observation)}


def one_device(model: ModelConfig) -> Callable[[], nnx.Module]:
    """Builds a model config for one device."""
    layout = Layout(Plan.of(ParallelConfig(data=1)))
    return lambda: model.build(layout)


def _alike(tensor: MappedTensor, names: Sequence[str], entries: Mapping[str, Entry]) -> list[str]:
    """The names, of `names`, of tensors with the same shape in the same layer and of the same expert."""
    shape, numbers = tensor.shape(), re.findall(r"\d+", tensor.name)
    return [name for name in names if entries[name].shape == shape and re.findall(r"\d+", name) == numbers]


def demand_fit(tensors: Tensors, table: Sequence[MappedTensor], ignored: Sequence[str] = ()) -> None:
    """Raises one UserError with all tensors that are missing, unknown or of another shape.

    ignored: patterns of names of tensors that hold no weights of the model.
    """
    entries, expected = tensors.entries, {tensor.name: tensor for tensor in table}
    extra = [name for name in entries if name not in expected and not any(fnmatchcase(name, p) for p in ignored)]
    problems = []
    for name, tensor in expected.items():
        if name not in entries:
            similar = nearest_names(name, _alike(tensor, extra, entries), at_most=1)
            problems.append(f"{name}: missing" + (f"; did you mean {similar[0]}?" if similar else ""))
        elif entries[name].shape != tensor.shape():
            problems.append(
                f"{name}: shape {list(entries[name].shape)}, but {list(tensor.shape())} by the model's config"
            )
        elif entries[name].dtype.name not in WEIGHT_DTYPES:
            problems.append(f"{name}: {entries[name].dtype.name} needs scales, which are not supported: dequantize it")
    problems += [f"{name}: the model has no such weight" for name in extra]
    if problems:
        raise UserError(below(f"the tensors of {tensors.where} do not match the model:", problems))
