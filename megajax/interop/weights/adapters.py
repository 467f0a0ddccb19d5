"""Low-rank adapters of a stored model: beside its weights, and merged into them."""

from typing import Any

import numpy as np

from megajax.checkpoint.boxes import Box
from megajax.checkpoint.weight_source import WeightSource
from megajax.interop.weights.foreign import declared_by
from megajax.interop.weights.model_parts import without_adapters
from megajax.interop.weights.quantize_on_load import Quantizing
from megajax.interop.weights.stored_model import StoredModel
from megajax.layers.low_rank import ADAPTERS, LORA_A, LORA_B, MAGNITUDE, SMALLEST_SQUARE
from megajax.layers.param import ParamSpec


def merged(stored: StoredModel) -> StoredModel:
    """The model with its adapters merged into its weights, which are dequantized for that."""
    return stored.derived(without_adapters(stored.model), MergedWeights(stored.weights, stored.model))


def leading(spec: ParamSpec) -> int:
    """Number of leading dimensions of a weight for layers and experts."""
    return sum(name in ("layer", "expert") for name in spec.axes)


def merge(
    w: np.ndarray, a: np.ndarray, b: np.ndarray, scale: float, leading: int, change: np.ndarray | None = None
) -> np.ndarray:
    """w + scale * a b in float32. With DoRA, the norm of each output becomes that of w plus the change.

    w: [..., inputs, outputs]; a: [..., inputs, rank]; b: [..., rank, outputs]; change: [..., outputs]; leading: number
    of leading dimensions for layers and experts. Inputs and outputs may be several dimensions each.
    """
    lead, rank, inputs = w.shape[:leading], a.shape[-1], tuple(range(leading, a.ndim - 1))
    a, b = a.astype(np.float32).reshape(*lead, -1, rank), b.astype(np.float32).reshape(*lead, rank, -1)
    w = w.astype(np.float32)
    merged = w + np.float32(scale) * (a @ b).reshape(w.shape)
    if change is None:
        return merged
    norm, now = (np.sqrt(np.sum(matrix * matrix, axis=inputs, keepdims=True)) for matrix in (w, merged))
    return merged * ((norm + np.expand_dims(change, inputs)) / np.maximum(now, np.sqrt(np.float32(SMALLEST_SQUARE))))


class MergedWeights:
    """A `WeightSource` of a model with its adapters merged into the weights, which are dequantized before."""

    def __init__(self, weights: WeightSource, model: Any):
        """weights: of the model with adapters; model: its config, with `lora`."""
        quantizing = Quantizing.if_any(model)
        self.where, self._scale = weights.where, model.lora.scale()
        self._weights = weights if quantizing is None else quantizing.inverse(weights)
        self.shapes = {path: shape for path, shape in self._weights.shapes.items() if not path.endswith(ADAPTERS)}
        self._declared = declared_by(model) if quantizing is None else quantizing.plain

    def read(self, path: str, box: Box) -> np.ndarray:
        """A box of a weight. Only the part of the adapter for the box is read, with DoRA that for whole columns."""
        if (spec := self._declared.get(path + LORA_A)) is None:
            return self._weights.read(path, box)
        first, end = leading(spec), len(spec.axes) - 1
        magnitude = self._declared.get(path + MAGNITUDE)
        whole = tuple(slice(0, size) for size in spec.shape)
        inputs = box[first:end] if magnitude is None else whole[first:end]
        w = self._weights.read(path, (*box[:first], *inputs, *box[end:]))
        a = self._weights.read(path + LORA_A, (*box[:first], *inputs, whole[-1]))
        b = self._weights.read(path + LORA_B, (*box[:first], whole[-1], *box[end:]))
        if magnitude is None:
            return merge(w, a, b, self._scale, first)
        change = self._weights.read(path + MAGNITUDE, (*box[:first], *box[end:]))
        return merge(w, a, b, self._scale, first, change)[(slice(None),) * first + tuple(box[first:end])]


class JoinedWeights:
    """A `WeightSource` of the weights of a model and those of its adapters."""

    def __init__(self, weights: WeightSource, adapters: WeightSource):
        """adapters: may have further weights, such as those of a whole run, which are not read."""
        self.where = f"{weights.where} and {adapters.where}"
        self._source_of = {path: source for source in (adapters, weights) for path in source.shapes}
        self.shapes = {path: source.shapes[path] for path, source in self._source_of.items()}

    def read(self, path: str, box: Box) -> np.ndarray:
        return self._source_of[path].read(path, box)
