"""The arrays of a stored adapter for a slot of a model's matrices."""

from collections.abc import Collection, Mapping
from typing import NamedTuple

import jax
import numpy as np
from jax.sharding import NamedSharding

from megajax.batch import Params
from megajax.checkpoint.boxes import Box, shape_of
from megajax.checkpoint.weights.foreign import WeightSource, placed
from megajax.config.errors import UserError
from megajax.config.hints import listed
from megajax.inference.loaded_model import LoadedModel
from megajax.layers.param import Adapter, specs
from megajax.mesh.replicated_heads import copy_heads


class AdapterWeights(NamedTuple):
    """A stored adapter."""

    source: WeightSource
    """May hold other weights as well."""
    paths: Collection[str]
    """Paths of its matrices A and B in the source."""
    rank: int
    scale: float
    """Factor on its output."""


class _SlotWeights:
    """A `WeightSource` of an adapter in the shapes of a slot: padded with zeros, and with the scale in B."""

    def __init__(self, adapter: AdapterWeights, shapes: Mapping[str, tuple[int, ...]], rank_axes: Mapping[str, int]):
        """shapes: of a slot, by path; rank_axes: path -> dimension of the rank."""
        self.where, self._adapter, self._shapes, self._rank_axes = adapter.source.where, adapter, shapes, rank_axes

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return self._shapes

    def read(self, path: str, box: Box) -> np.ndarray:
        values, axis = np.zeros(shape_of(box), np.float32), self._rank_axes[path]
        ranks = slice(box[axis].start, min(box[axis].stop, self._adapter.rank))
        if path in self._adapter.paths and ranks.start < ranks.stop:
            stored = self._adapter.source.read(path, (*box[:axis], ranks, *box[axis + 1 :])).astype(np.float32)
            is_output = axis < len(box) - 1
            place = (*[slice(None)] * axis, slice(0, ranks.stop - ranks.start))
            values[place] = stored * np.float32(self._adapter.scale) if is_output else stored
        return values


def slot_values(loaded: LoadedModel, adapter: AdapterWeights) -> Params:
    """The arrays of an adapter for `Programs.write_adapter`, on the devices; may be called from any thread.

    Raises UserError for a model without slots, a larger rank, and matrices that have no slot.
    """
    slots, where = loaded.adapters, adapter.source.where
    if slots is None:
        raise UserError(f"{where}: the engine has no slots for adapters: set inference.adapters")
    if adapter.rank > slots.rank:
        message = f"{where} has rank {adapter.rank}, and slots have rank {slots.rank}"
        raise UserError(f"{message}: set inference.adapter_rank={adapter.rank}")
    declared = specs(loaded.model, Adapter)
    if others := sorted(path for path in adapter.paths if path not in declared):
        names = listed([path.rpartition(".")[0] for path in others])
        raise UserError(f"{where} adapts {names}, which can't have several adapters, such as experts: merge it instead")
    axes = {path: spec.axes.index("rank") for path, spec in declared.items()}
    shapes = {
        path: (*spec.shape[: axes[path]], slots.rank, *spec.shape[axes[path] + 1 :]) for path, spec in declared.items()
    }
    source, rules, values = _SlotWeights(adapter, shapes, axes), loaded.layout.plan.compute, {}
    with jax.set_mesh(loaded.mesh):
        for path, spec in declared.items():
            sharding = NamedSharding(loaded.mesh, rules.spec(spec.axes))
            like = jax.ShapeDtypeStruct(shapes[path], jax.tree.leaves(loaded.weights[path])[0].dtype, sharding=sharding)
            stored = placed(source, path, like, range(len(spec.layers)))
            values[path] = jax.block_until_ready(copy_heads(loaded.layout, stored, spec.axes))
    return values
