"""Tables of names: the tensors of another library's checkpoint and the weights of a model here that they hold.

A family of models has one table, a list of `Row`s, for import and export. Resolved against the weights that a model
declares, a row gives a `MappedTensor` for each layer and expert. A row without a weight in the model gives none, so one
table serves all variants of a family.
"""

import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from megajax.layers.param import ParamSpec

type Index = tuple[int | slice, ...]
_NAME = re.compile(r"[a-z_]+")


@dataclass(frozen=True, slots=True)
class Row:
    """A tensor of the other library, and the weights that it holds."""

    tensor: str
    """Name of the tensor, with {layer} and {expert} for their numbers from 0."""
    paths: str | tuple[str, ...]
    """Path of the weight, with "stack.*." for the blocks of a stack. Several paths: a fused tensor, in which the
    weights follow one another along `axis`."""
    pattern: str | tuple[str, ...] = ""
    """Pattern from the tensor to the weight in the notation of einops, such as "(n h) d -> d n h"; "": no change. For a
    fused tensor, the pattern from each piece to its weight, or one pattern for each piece."""
    split: str = ""
    """Pattern that rearranges a fused tensor before it is split into pieces."""
    axis: int = 0
    """Dimension, after `split`, along which a fused tensor is split."""
    sizes: Mapping[str, int] = field(default_factory=dict)
    """Sizes of dimensions in patterns that do not follow from the shapes of the weights."""
    index: Index = ()
    """Place of the tensor in the weight, after the dimensions of layers and experts; the rest of the weight is 0."""
    first: int = 0
    """Number of the first layer of the stack in the names of tensors."""
    requires: str = ""
    """The row is only of blocks that have this weight: in hybrids, several types of blocks share names of weights."""


class WeightPiece(NamedTuple):
    """The part of a weight that a tensor holds."""

    path: str
    index: Index
    """weight[index] is the part."""
    shape: tuple[int, ...]
    """Shape of the part."""


@dataclass(frozen=True, slots=True)
class MappedTensor:
    """A tensor of the other library, and the pieces of weights in it."""

    name: str
    pieces: tuple[WeightPiece, ...]
    row: Row

    def to_weights(self, tensor: np.ndarray) -> list[np.ndarray]:
        """The tensor as pieces of weights; views of the tensor where numpy can."""
        if len(self.pieces) == 1:
            return [_rearranged(tensor, *self._patterns()[0])]
        fused = _rearranged(tensor, self.row.split, self.row.sizes)
        stops = np.cumsum([shape[self.row.axis] for shape in self._piece_shapes()])
        parts = np.split(fused, stops[:-1], axis=self.row.axis)
        return [_rearranged(part, *pattern) for part, pattern in zip(parts, self._patterns(), strict=True)]

    def from_weights(self, pieces: Sequence[np.ndarray]) -> np.ndarray:
        """The reverse of `to_weights`."""
        parts = [_inverted(part, *pattern) for part, pattern in zip(pieces, self._patterns(), strict=True)]
        if len(parts) == 1:
            return parts[0]
        return self._unsplit(np.concatenate(parts, axis=self.row.axis))

    def shape(self) -> tuple[int, ...]:
        """Shape of the tensor."""
        shapes = self._piece_shapes()
        if len(shapes) == 1:
            return shapes[0]
        axis, first = self.row.axis, shapes[0]
        fused_shape = [*first[:axis], sum(shape[axis] for shape in shapes), *first[axis + 1 :]]
        return self._unsplit(_unallocated(fused_shape)).shape

    def _piece_shapes(self) -> list[tuple[int, ...]]:
        """Shapes of the pieces in the fused tensor."""
        parts = [_unallocated(piece.shape) for piece in self.pieces]
        return [_inverted(part, *pattern).shape for part, pattern in zip(parts, self._patterns(), strict=True)]

    def _patterns(self) -> list[tuple[str, dict[str, int]]]:
        """The pattern of each piece, and sizes of its dimensions."""
        row = self.row
        patterns = (row.pattern,) * len(self.pieces) if isinstance(row.pattern, str) else row.pattern
        pairs = zip(patterns, self.pieces, strict=True)
        return [(pattern, {**_sizes(pattern, piece.shape), **row.sizes}) for pattern, piece in pairs]

    def _unsplit(self, fused: np.ndarray) -> np.ndarray:
        return _rearranged(fused, _inverse(self.row.split), {**_sizes(self.row.split, fused.shape), **self.row.sizes})


def resolved(rows: Iterable[Row], declared: Mapping[str, ParamSpec]) -> list[MappedTensor]:
    """The tensors of a model, in the order of layers.

    declared: the weights and observations of the model on one device, by path.
    Raises ValueError for a weight that no row or more than one row holds: an error of the table.
    """
    tensors = tensors_of(rows, declared)
    holders: dict[str, list[MappedTensor]] = defaultdict(list)
    for tensor in tensors:
        for piece in tensor.pieces:
            holders[piece.path].append(tensor)
    if lacking := sorted(path for path, spec in declared.items() if spec.updater is None and path not in holders):
        raise ValueError(f"no row of the table holds {', '.join(lacking)}")
    duplicates = [name for name, count in Counter(tensor.name for tensor in tensors).items() if count > 1]
    places = Counter((piece.path, repr(piece.index)) for tensor in tensors for piece in tensor.pieces)
    duplicates += [f"{path}{index}" for (path, index), count in places.items() if count > 1]
    if duplicates:
        raise ValueError(f"the table has two rows for {', '.join(duplicates)}")
    return sorted(tensors, key=_by_layer)


def tensors_of(rows: Iterable[Row], declared: Mapping[str, ParamSpec]) -> list[MappedTensor]:
    """The tensors that hold any of these weights, in the order of rows. `resolved` checks that they hold all."""
    return [tensor for row in rows for tensor in _tensors(row, declared)]


def _by_layer(tensor: MappedTensor) -> tuple[int, int]:
    """Sort key: embedding tables first, then layers by number, then the rest."""
    numbers = re.findall(r"\.(\d+)\.", tensor.name) if "{layer}" in tensor.row.tensor else []
    return (1, int(numbers[0])) if numbers else (0 if "embed" in tensor.name or "wte" in tensor.name else 2, 0)


def _tensors(row: Row, declared: Mapping[str, ParamSpec]) -> Iterator[MappedTensor]:
    """The tensors of a row; none if the model lacks its weights."""
    patterns = (row.paths,) if isinstance(row.paths, str) else row.paths
    by_layer: dict[int | None, list[str]] = defaultdict(list)
    for pattern in patterns:
        for layer, path in _layers_of(pattern, row.requires, declared):
            by_layer[layer].append(path)
    for layer, paths in by_layer.items():
        if len(paths) < len(patterns):
            raise ValueError(f"{row.tensor}: of {', '.join(patterns)}, the model has only {', '.join(paths)}")
        specs = [declared[path] for path in paths]
        places = [() if layer is None else (_row_of(path, layer, declared),) for path in paths]
        experts = specs[0].shape[len(places[0])] if "{expert}" in row.tensor else None
        for expert in range(experts) if experts is not None else (None,):
            leading = [place if expert is None else (*place, expert) for place in places]
            indices = [(*lead, *row.index) for lead in leading]
            pieces = [_piece(path, index, spec) for path, index, spec in zip(paths, indices, specs, strict=True)]
            number = None if layer is None else layer + row.first
            yield MappedTensor(row.tensor.format(layer=number, expert=expert), tuple(pieces), row)


def _piece(path: str, index: Index, spec: ParamSpec) -> WeightPiece:
    return WeightPiece(path, index, _unallocated(spec.shape)[index].shape)


def _layers_of(pattern: str, requires: str, declared: Mapping[str, ParamSpec]) -> Iterator[tuple[int | None, str]]:
    """(number of a layer in its stack, path) of every weight that matches a path with *."""
    if "*" not in pattern:
        yield from [(None, pattern)] if pattern in declared else ()
        return
    matches = re.compile(re.escape(pattern).replace(r"\*", r"(blocks\.\d+)"))
    for path, spec in declared.items():
        match = matches.fullmatch(path)
        if match and (not requires or requires.replace("*", match[1]) in declared):
            first = _first_layer(path, declared)
            yield from ((layer - first, path) for layer in spec.layers)


def _first_layer(path: str, declared: Mapping[str, ParamSpec]) -> int:
    """Number of the first layer of the stack that a weight belongs to."""
    stack = path.partition("blocks.")[0] + "blocks."
    return min(min(spec.layers) for name, spec in declared.items() if name.startswith(stack))


def _row_of(path: str, layer: int, declared: Mapping[str, ParamSpec]) -> int:
    return declared[path].layers.index(layer + _first_layer(path, declared))


def _inverted(part: np.ndarray, pattern: str, sizes: Mapping[str, int]) -> np.ndarray:
    return _rearranged(part, _inverse(pattern), sizes)


def _rearranged(array: np.ndarray, pattern: str, sizes: Mapping[str, int]) -> np.ndarray:
    """Split, permute and merge dimensions as the pattern says; a view where numpy can."""
    if not pattern:
        return array
    source, target = (re.findall(r"\([^)]*\)|[a-z_]+|1", side) for side in pattern.split("->"))
    extents: dict[str, int] = {}
    for group, size in zip(source, array.shape, strict=True):
        names = _NAME.findall(group)
        known = math.prod(sizes.get(name, 1) for name in names)
        extents |= {name: sizes.get(name, size // known) for name in names}
    order = [[*extents].index(name) for name in _NAME.findall(" ".join(target))]
    merged = [math.prod(extents[name] for name in _NAME.findall(group)) for group in target]
    return array.reshape([*extents.values()]).transpose(order).reshape(merged)


def _inverse(pattern: str) -> str:
    source, arrow, target = pattern.partition("->")
    return f"{target.strip()} {arrow} {source.strip()}" if pattern else ""


def _sizes(pattern: str, shape: Sequence[int]) -> dict[str, int]:
    """Size of each single dimension on the right side of a pattern, for an array of that shape."""
    names = re.findall(r"\([^)]*\)|[a-z_]+|1", pattern.partition("->")[2])
    return {name: size for name, size in zip(names, shape, strict=True) if name.isidentifier()} if names else {}


def _unallocated(shape: Sequence[int]) -> np.ndarray:
    """Zeros of this shape without memory."""
    return np.broadcast_to(np.int8(0), tuple(shape))
