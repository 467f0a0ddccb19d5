"""Weights from other libraries' checkpoints, read on demand, and their arrays on a mesh.

`Tensors` is the interface of a format: names, shapes, and views of files. `ForeignWeights` gives them as weights of a
model, and reads any box of one: a device's shard, or a layer.
"""

import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import cache
from math import prod
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array

from megajax.checkpoint.boxes import Box, box_of, chunk_shape, chunks_of, overlap, relative, shape_of
from megajax.checkpoint.weights.name_mapping import Mapped, Row
from megajax.config.errors import UserError
from megajax.config.hints import nearest_names
from megajax.layers.param import Observation, ParamSpec, specs
from megajax.mesh.config import ParallelConfig
from megajax.mesh.layout import Layout
from megajax.mesh.rules import Plan

WEIGHT_DTYPES = ("float64", "float32", "float16", "bfloat16")
"""Dtypes of tensors that are weights without scales. A checkpoint may mix them."""
ITEMSIZE = 4
"""Largest bytes of an element of a weight, for the size of chunks."""
ANY_ROW = -1
"""Instead of a row: the tensor does not belong to a single row of a weight."""


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
        """A tensor, as a view of its file if the format allows."""
        ...


class WeightSource(Protocol):
    """Weights of a model, by path. Stacked weights have their layers in natural order."""

    where: str
    """The folder, for messages."""

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Path -> shape."""
        ...

    def read(self, path: str, box: Box) -> np.ndarray:
        """A box of a weight, in its stored dtype."""
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
    names: Mapping[str, str] = field(default_factory=dict)
    """Name of a tensor in the table -> its name in the files, if they differ."""
    copies: Sequence[str] = ()
    """Tensors in the files that are copies of others."""
    accepted: Mapping[str, Any] = field(default_factory=dict)
    """Settings that the model lacks, accepted by the user, with their values."""

    def unread(self, table: Sequence[Mapped]) -> dict[str, str]:
        """The tensors outside of the table that an export keeps: name in the files -> name in `tensors`."""
        used = {tensor.name for tensor in table}
        names = [name for name in self.tensors.entries() if name not in used]
        return {self.names.get(name, name): name for name in names if any(fnmatchcase(name, p) for p in self.extra)}

    def note(self) -> str:
        """A text about the accepted settings, such as "ignored settings: a=1"; "" without any."""
        values = ", ".join(f"{name}={value}" for name, value in self.accepted.items())
        return f"ignored settings: {values}" if values else ""


class ForeignWeights:
    """A `WeightSource` of tensors and a table of names. Observations in the table are among the weights."""

    def __init__(self, tensors: Tensors, table: Sequence[Mapped], declared: Mapping[str, ParamSpec]):
        """declared: the weights that the table was resolved against."""
        self.where, self._tensors = tensors.where, tensors
        self._shapes = {piece.path: declared[piece.path].shape for tensor in table for piece in tensor.pieces}
        # By the first row in a tensor, because a model may have tens of thousands of tensors.
        self._holders: dict[str, dict[int, list[tuple[Mapped, int, Box]]]] = defaultdict(lambda: defaultdict(list))
        for tensor in table:
            for number, piece in enumerate(tensor.pieces):
                place = box_of(piece.index, self._shapes[piece.path])
                row = piece.index[0] if piece.index and isinstance(piece.index[0], int) else ANY_ROW
                self._holders[piece.path][row].append((tensor, number, place))

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return self._shapes

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

    def _holding(self, path: str, box: Box) -> Iterator[tuple[Mapped, int, Box]]:
        """Tensors that may hold a part of a box, the number of the piece, and its box in the weight."""
        by_row = self._holders[path]
        yield from by_row.get(ANY_ROW, ())
        for row in range(box[0].start, box[0].stop) if box else ():
            yield from by_row.get(row, ())


def export_tensor(tensor: Mapped, weights: WeightSource, dtype: np.dtype) -> np.ndarray:
    """A tensor of another library, contiguous, from the weights of a model.

    An observation that the source lacks is zero. Memory holds at most two copies of the tensor, and a chunk of weights.
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


def _alike(tensor: Mapped, names: Sequence[str], entries: Mapping[str, Entry]) -> list[str]:
    """The names, of `names`, of tensors with the same shape in the same layer and of the same expert."""
    shape, numbers = tensor.shape(), re.findall(r"\d+", tensor.name)
    return [name for name in names if entries[name].shape == shape and re.findall(r"\d+", name) == numbers]


def demand_fit(tensors: Tensors, table: Sequence[Mapped], ignored: Sequence[str] = ()) -> None:
    """Raises one UserError with all tensors that are missing, unknown or of another shape.

    ignored: patterns of names of tensors that hold no weights of the model.
    """
    entries, expected = tensors.entries(), {tensor.name: tensor for tensor in table}
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
        listing = problems[:40] + [f"and {len(problems) - 40} more"] * (len(problems) > 40)
        raise UserError(
            f"the tensors of {tensors.where} do not match the model:\n" + "\n".join(f"  {line}" for line in listing)
        )


TILE = 128
"""Elements along both sides of a tile. Tiles of two bytes an element fit into a second-level cache."""


def copy_into(target: np.ndarray, source: np.ndarray) -> None:
    """target[...] = source. Copies of transposed arrays go tile by tile, five times as fast as numpy."""
    sides = [
        (abs(stride), axis)
        for axis, (size, stride) in enumerate(zip(source.shape, source.strides, strict=True))
        if size > 1
    ]
    fastest, last = min(sides, default=(0, -1))[1], source.ndim - 1
    if (
        source.dtype != target.dtype
        or fastest in (-1, last)
        or source.size < TILE * TILE
        or min(source.shape[fastest], source.shape[last]) < TILE // 4
    ):
        target[...] = source
        return
    rows, columns = source.shape[fastest], source.shape[last]
    # As integers: numpy copies foreign dtypes such as bfloat16 an element at a time.
    bits = f"u{source.itemsize}"
    source, target = (np.moveaxis(array.view(bits), (fastest, last), (-2, -1)) for array in (source, target))
    for place in np.ndindex(source.shape[:-2]):
        target_matrix, source_matrix = target[place], source[place]
        for row in range(0, rows, TILE):
            for column in range(0, columns, TILE):
                tile = slice(row, row + TILE), slice(column, column + TILE)
                target_matrix[tile] = source_matrix[tile]


def contiguous(array: np.ndarray) -> np.ndarray:
    """The array, or a C-contiguous copy."""
    if array.flags.c_contiguous:
        return array
    result = np.empty(array.shape, array.dtype)
    copy_into(result, array)
    return result


def converted(values: np.ndarray, dtype: np.dtype, name: str) -> np.ndarray:
    """The values in another dtype, contiguous. Raises UserError for finite values that overflow."""
    with np.errstate(over="ignore"):
        result = values.astype(dtype, order="C", copy=False)
    if values.dtype == dtype:
        return result
    if 2 * float(jnp.finfo(dtype).max) < float(jnp.finfo(values.dtype).max):
        overflow = np.isfinite(values) & ~np.isfinite(result)
        if overflow.any():
            largest = float(np.abs(values[overflow].astype(np.float64)).max())
            fits = largest <= float(jnp.finfo(jnp.bfloat16).max)
            advice = ": use --dtype=bfloat16" if fits else ", and neither can float32"
            raise UserError(f"{name} has values up to {largest:g}, which {dtype.name} can't hold{advice}")
    return result


PART_ELEMENTS = 2**24
"""Elements of a stacked weight to read at once, rounded up to whole rows."""


def placed(weights: WeightSource, path: str, like: jax.ShapeDtypeStruct, rows: Sequence[int] | None) -> Array:
    """A weight in the shape, dtype and sharding of `like`.

    rows: of a stacked weight, the layer of each row, -1 for padding rows of zeros; None: it is not stacked.
    """

    def read(box: Box) -> np.ndarray:
        if rows is None:
            return weights.read(path, box).astype(like.dtype)
        return _rows(weights, path, rows[box[0]], box[1:], like.dtype)

    return array_of(like, read)


def array_of(like: jax.ShapeDtypeStruct, read: Callable[[Box], np.ndarray]) -> Array:
    """An array in the shape and sharding of `like`. read: returns a box; called once for each box on local devices."""
    read_once = cache(read)  # several devices may hold the same box
    return jax.make_array_from_callback(
        like.shape, like.sharding, lambda index: read_once(box_of(index or (), like.shape))
    )


def _rows(weights: WeightSource, path: str, rows: Sequence[int], inner: Box, dtype: Any) -> np.ndarray:
    """A box of these rows of a stacked weight in another dtype, read a part at a time."""
    shape = shape_of(inner)
    result, first, most_rows = np.zeros((len(rows), *shape), dtype), 0, -(-PART_ELEMENTS // max(1, prod(shape)))
    while first < len(rows):
        row, end = rows[first], first + 1
        while end < len(rows) and row >= 0 and rows[end] == row + end - first and end - first < most_rows:
            end += 1
        if row >= 0:
            result[first:end] = weights.read(path, (slice(row, row + end - first), *inner))
        first = end
    return result
