"""Tables of names: which tensor of another library's checkpoint holds which weights of ours.

A family of models has one table, a list of `Row`s, which is read in both directions. Resolved against the weights that
a model declares, a row gives a `Mapped` tensor for each layer and expert. A row whose weight the model lacks gives
none, so one table serves all variants of a family.
"""

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from einops import rearrange

from megajax.layers.param import ParamSpec

type Index = tuple[int | slice, ...]


@dataclass(frozen=True, slots=True)
class Row:
    """A tensor of the other library, and the weights of ours that it holds."""

    theirs: str
    """Name of the tensor; {layer} and {expert} stand for their numbers from 0."""
    ours: str | tuple[str, ...]
    """Path of the weight; "stack.*." stands for the blocks of a stack. Several weights: a fused tensor, in which they
    follow one another along `axis`."""
    move: str | tuple[str, ...] = ""
    """einops pattern from their dimensions to ours, such as "(n h) d -> d n h"; "": the same. Of a fused tensor, from
    each piece to its weight; several patterns: one for each piece."""
    cut: str = ""
    """einops pattern that a fused tensor is rearranged by before it is cut into pieces."""
    axis: int = 0
    """Dimension, after `cut`, along which a fused tensor is cut."""
    sizes: Mapping[str, int] = field(default_factory=dict)
    """Sizes of dimensions in patterns that do not follow from the shapes of our weights."""
    inside: Index = ()
    """Where in our weight, behind the dimensions of layers and experts, the tensor is; the rest of the weight is 0."""
    beside: str = ""
    """A weight that tells which blocks the row is of, where blocks of several types have weights of the same name."""


class Piece(NamedTuple):
    """The part of one of our weights that a tensor holds."""

    path: str
    index: Index
    """weight[index] is the part, of this shape:"""
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Mapped:
    """One tensor of the other library with the pieces of our weights in it."""

    name: str
    pieces: tuple[Piece, ...]
    row: Row

    def ours(self, tensor: np.ndarray) -> list[np.ndarray]:
        """Their tensor -> the piece of each of our weights; views of the tensor where numpy can."""
        if len(self.pieces) == 1:
            return [_rearranged(tensor, *self._moves()[0])]
        whole = _rearranged(tensor, self.row.cut, self.row.sizes)
        ends = np.cumsum([piece[self.row.axis] for piece in self._piece_shapes()])
        parts = np.split(whole, ends[:-1], axis=self.row.axis)
        return [_rearranged(part, *move) for part, move in zip(parts, self._moves(), strict=True)]

    def theirs(self, ours: Sequence[np.ndarray]) -> np.ndarray:
        """Pieces of our weights -> their tensor."""
        parts = [_moved_back(part, *move) for part, move in zip(ours, self._moves(), strict=True)]
        if len(parts) == 1:
            return parts[0]
        return self._joined(np.concatenate(parts, axis=self.row.axis))

    def shape(self) -> tuple[int, ...]:
        """Of their tensor."""
        first, *others = self._piece_shapes()
        if not others:
            return first
        axis = self.row.axis
        joined = [*first[:axis], sum(shape[axis] for shape in (first, *others)), *first[axis + 1 :]]
        return self._joined(_unallocated(joined)).shape

    def _piece_shapes(self) -> list[tuple[int, ...]]:
        parts = [_unallocated(piece.shape) for piece in self.pieces]
        return [_moved_back(part, *move).shape for part, move in zip(parts, self._moves(), strict=True)]

    def _moves(self) -> list[tuple[str, dict[str, int]]]:
        """The pattern of each piece, and sizes of its dimensions."""
        row = self.row
        patterns = (row.move,) * len(self.pieces) if isinstance(row.move, str) else row.move
        both = zip(patterns, self.pieces, strict=True)
        return [(pattern, {**_sizes(pattern, piece.shape), **row.sizes}) for pattern, piece in both]

    def _joined(self, whole: np.ndarray) -> np.ndarray:
        return _rearranged(whole, _inverse(self.row.cut), {**_sizes(self.row.cut, whole.shape), **self.row.sizes})


def resolved(rows: Iterable[Row], declared: Mapping[str, ParamSpec]) -> list[Mapped]:
    """The tensors of a model, in the order of layers.

    declared: the weights and observations of the model on one device, by path.
    Raises ValueError for a weight that no row holds or two do: the table is wrong.
    """
    tensors = tensors_of(rows, declared)
    holders: dict[str, list[Mapped]] = defaultdict(list)
    for tensor in tensors:
        for piece in tensor.pieces:
            holders[piece.path].append(tensor)
    if lacking := sorted(path for path, spec in declared.items() if spec.updater is None and path not in holders):
        raise ValueError(f"no row of the table holds {', '.join(lacking)}")
    twice = [name for name, count in _counted(tensor.name for tensor in tensors).items() if count > 1]
    places = _counted((piece.path, repr(piece.index)) for tensor in tensors for piece in tensor.pieces)
    twice += [f"{path}{index}" for (path, index), count in places.items() if count > 1]
    if twice:
        raise ValueError(f"the table has two rows for {', '.join(twice)}")
    return sorted(tensors, key=_by_layer)


def tensors_of(rows: Iterable[Row], declared: Mapping[str, ParamSpec]) -> list[Mapped]:
    """The tensors that hold some of these weights, in the order of rows. `resolved` checks that all are held."""
    return [tensor for row in rows for tensor in _tensors(row, declared)]


def _counted[T](things: Iterable[T]) -> dict[T, int]:
    counts: dict[T, int] = defaultdict(int)
    for thing in things:
        counts[thing] += 1
    return counts


def _by_layer(tensor: Mapped) -> tuple[int, int]:
    """Tables before layers, layers by number, the rest behind: a key of a stable sort."""
    numbers = re.findall(r"\.(\d+)\.", tensor.name) if "{layer}" in tensor.row.theirs else []
    return (1, int(numbers[0])) if numbers else (0 if "embed" in tensor.name or "wte" in tensor.name else 2, 0)


def _tensors(row: Row, declared: Mapping[str, ParamSpec]) -> Iterator[Mapped]:
    """The tensors of a row; none if the model lacks its weights."""
    patterns = (row.ours,) if isinstance(row.ours, str) else row.ours
    by_layer: dict[int | None, list[str]] = defaultdict(list)
    for pattern in patterns:
        for layer, path in _places(pattern, row.beside, declared):
            by_layer[layer].append(path)
    for layer, paths in by_layer.items():
        if len(paths) < len(patterns):
            raise ValueError(f"{row.theirs}: of {', '.join(patterns)}, the model has {', '.join(paths)} alone")
        specs = [declared[path] for path in paths]
        places = [() if layer is None else (_row_of(path, layer, declared),) for path in paths]
        experts = specs[0].shape[len(places[0])] if "{expert}" in row.theirs else None
        for expert in range(experts) if experts is not None else (None,):
            leading = [place if expert is None else (*place, expert) for place in places]
            indices = [(*lead, *row.inside) for lead in leading]
            pieces = [_piece(path, index, spec) for path, index, spec in zip(paths, indices, specs, strict=True)]
            yield Mapped(row.theirs.format(layer=layer, expert=expert), tuple(pieces), row)


def _piece(path: str, index: Index, spec: ParamSpec) -> Piece:
    return Piece(path, index, _unallocated(spec.shape)[index].shape)


def _places(pattern: str, beside: str, declared: Mapping[str, ParamSpec]) -> Iterator[tuple[int | None, str]]:
    """(number of a layer in its stack, path) of every weight that a path with * stands for."""
    if "*" not in pattern:
        yield from [(None, pattern)] if pattern in declared else ()
        return
    matches = re.compile(re.escape(pattern).replace(r"\*", r"(blocks\.\d+)"))
    for path, spec in declared.items():
        match = matches.fullmatch(path)
        if match and (not beside or beside.replace("*", match[1]) in declared):
            first = _first_layer(path, declared)
            yield from ((layer - first, path) for layer in spec.layers)


def _first_layer(path: str, declared: Mapping[str, ParamSpec]) -> int:
    """Number of the first layer of the stack that a weight belongs to."""
    stack = path.partition("blocks.")[0] + "blocks."
    return min(min(spec.layers) for other, spec in declared.items() if other.startswith(stack))


def _row_of(path: str, layer: int, declared: Mapping[str, ParamSpec]) -> int:
    return declared[path].layers.index(layer + _first_layer(path, declared))


def _moved_back(part: np.ndarray, pattern: str, sizes: Mapping[str, int]) -> np.ndarray:
    return _rearranged(part, _inverse(pattern), sizes)


def _rearranged(array: np.ndarray, pattern: str, sizes: Mapping[str, int]) -> np.ndarray:
    if not pattern:
        return array
    names = set(re.findall(r"[a-z_]+", pattern.partition("->")[0]))
    return rearrange(array, pattern, **{name: size for name, size in sizes.items() if name in names})


def _inverse(pattern: str) -> str:
    left, arrow, right = pattern.partition("->")
    return f"{right.strip()} {arrow} {left.strip()}" if pattern else ""


def _sizes(pattern: str, shape: Sequence[int]) -> dict[str, int]:
    """Size of each dimension that stands alone on the right of a pattern, of an array of that shape."""
    names = re.findall(r"\([^)]*\)|[a-z_]+|1", pattern.partition("->")[2])
    return {name: size for name, size in zip(names, shape, strict=True) if name.isidentifier()} if names else {}


def _unallocated(shape: Sequence[int]) -> np.ndarray:
    """Zeros of this shape that take no memory."""
    return np.broadcast_to(np.int8(0), tuple(shape))
