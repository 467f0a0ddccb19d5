"""The arrays of a stored adapter for a slot of a model's matrices."""

from collections.abc import Collection
from typing import NamedTuple

import jax
import numpy as np

from megajax.checkpoint.weights.foreign import WeightSource
from megajax.config.errors import UserError
from megajax.config.hints import listed
from megajax.inference.loaded_model import LoadedModel
from megajax.layers.param import Adapter, specs
from megajax.mesh.replicated_heads import with_copied_heads


class AdapterWeights(NamedTuple):
    """A stored adapter."""

    source: WeightSource
    """May hold other weights as well."""
    paths: Collection[str]
    """Paths of its matrices A and B in the source."""
    rank: int
    scale: float
    """Factor on its output."""


def slot_values(loaded: LoadedModel, adapter: AdapterWeights) -> dict[str, np.ndarray]:
    """The arrays of an adapter for `Programs.write_adapter`, on the host; may be called from any thread.

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
    values = {}
    for path, spec in declared.items():
        axis, dtype = spec.axes.index("rank"), jax.tree.leaves(loaded.weights[path])[0].dtype
        slot = np.zeros((*spec.shape[:axis], slots.rank, *spec.shape[axis + 1 :]), dtype)
        if path in adapter.paths:
            box = tuple(slice(0, adapter.rank if at == axis else size) for at, size in enumerate(slot.shape))
            stored, is_output = adapter.source.read(path, box).astype(np.float32), axis < slot.ndim - 1
            slot[box] = stored * np.float32(adapter.scale) if is_output else stored
        values[path] = with_copied_heads(slot, spec.axes, loaded.layout.plan.tensor)
    return values
