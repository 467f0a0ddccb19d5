"""The same layers in other groups: equal blocks of a stack are stacked together, or by their place in a pattern."""

import re
from collections.abc import Mapping, Sequence

import numpy as np

from megajax.checkpoint.boxes import Box, shape_of
from megajax.checkpoint.weight_source import WeightSource
from megajax.config.errors import UserError
from megajax.layers.low_rank import ADAPTERS
from megajax.layers.param import ParamSpec

type Groups = Mapping[str, Sequence[int]]
"""Path of a stacked weight -> the layer of each row, numbered from the first of the stack."""
_GROUP = re.compile(r"(.*?blocks)\.\d+(\..*)")


def group_name(path: str) -> str:
    """The path without the number of the group, which is that of the weight in each block."""
    return _GROUP.sub(r"\1\2", path)


def layers_of(spec: ParamSpec) -> tuple[int, ...]:
    """Numbers of the layers in a stacked weight, sorted."""
    return tuple(sorted(layer for layer in spec.layers if layer >= 0))


def groups_of(declared: Mapping[str, ParamSpec]) -> Groups:
    """The groups of the weights of a model on one device."""
    return numbered({path: spec.layers for path, spec in declared.items() if spec.layers})


def numbered(layers: Groups) -> Groups:
    """The groups of layers that are numbered through all stacks of a model, and may be padded with -1."""
    rows = {path: sorted(layer for layer in some if layer >= 0) for path, some in layers.items()}
    first = dict[str, int]()
    for path, some in rows.items():
        first[_stack(path)] = min(first.get(_stack(path), some[0]), *some)
    return {path: [layer - first[_stack(path)] for layer in some] for path, some in rows.items()}


def _stack(path: str) -> str:
    return path.partition("blocks.")[0]


def same_groups(stored: Groups, wanted: Groups) -> bool:
    """Whether all weights that both have are in the same groups."""
    names = {group_name(path) for path in stored}
    return all(stored.get(path) == rows for path, rows in wanted.items() if group_name(path) in names)


def demand_same_depth(where: str, stored: Groups, wanted: Groups) -> None:
    """Raises UserError if a stack that both have has another number of layers."""
    stored_depths, depths = _depths(stored), _depths(wanted)
    for stack in stored_depths.keys() & depths.keys():
        if stored_depths[stack] != depths[stack]:
            raise UserError(f"{where} has {stored_depths[stack]} layers with {stack}blocks, this model {depths[stack]}")


def _depths(groups: Groups) -> dict[str, int]:
    """Stack -> number of its layers."""
    stacks = {_stack(path) for path in groups}
    return {stack: 1 + max(max(rows) for path, rows in groups.items() if _stack(path) == stack) for stack in stacks}


def regrouped(weights: WeightSource, stored: Groups, wanted: Groups) -> WeightSource:
    """The weights in the groups `wanted`; the source itself if its groups, `stored`, are the same."""
    return weights if same_groups(stored, wanted) else RegroupedWeights(weights, stored, wanted)


class RegroupedWeights:
    """A `WeightSource`: see `regrouped`. Weights of which a layer is absent are left out; absent adapters are zero."""

    def __init__(self, weights: WeightSource, stored: Groups, wanted: Groups):
        self.where, self._weights = weights.where, weights
        shapes = weights.shapes
        places = {
            (group_name(path), layer): (path, row)
            for path, layers in stored.items()
            for row, layer in enumerate(layers)
            if path in shapes
        }
        self.shapes = {path: shape for path, shape in shapes.items() if path not in stored}
        self._places = dict[str, list[tuple[str, int] | None]]()
        for path, layers in wanted.items():
            self._places[path] = [places.get((group_name(path), layer)) for layer in layers]
            present = [place for place in self._places[path] if place is not None]
            if present and (len(present) == len(layers) or path.endswith(ADAPTERS)):
                self.shapes[path] = (len(layers), *shapes[present[0][0]][1:])

    def read(self, path: str, box: Box) -> np.ndarray:
        if path not in self._places:
            return self._weights.read(path, box)
        inner, parts = box[1:], list[np.ndarray]()
        for place in self._places[path][box[0]]:
            if place is None:
                parts.append(np.zeros((1, *shape_of(inner)), np.float32))
            else:
                parts.append(self._weights.read(place[0], (slice(place[1], place[1] + 1), *inner)))
        return np.concatenate(parts)
