"""Low-rank adapters of a model: merged into the matrices that they adapt, or stored beside them."""

from collections.abc import Mapping

import numpy as np

from megajax.checkpoint.boxes import Box
from megajax.checkpoint.weights.foreign import WeightSource
from megajax.config.errors import UserError
from megajax.layers.param import ParamSpec

LORA_A, LORA_B = ".lora_a", ".lora_b"
"""Suffixes of the paths of an adapter's matrices, after the path of the adapted matrix."""


def leading(spec: ParamSpec) -> int:
    """Number of leading dimensions of a weight for layers and experts."""
    return sum(name in ("layer", "expert") for name in spec.axes)


def merge(w: np.ndarray, a: np.ndarray, b: np.ndarray, scale: float, leading: int) -> np.ndarray:
    """w + scale * a b in float32.

    w: [..., inputs, outputs]; a: [..., inputs, rank]; b: [..., rank, outputs]; leading: number of leading dimensions
    for layers and experts. Inputs and outputs may be several dimensions each.
    """
    lead, rank = w.shape[:leading], a.shape[-1]
    a, b = a.astype(np.float32).reshape(*lead, -1, rank), b.astype(np.float32).reshape(*lead, rank, -1)
    return w.astype(np.float32) + np.float32(scale) * (a @ b).reshape(w.shape)


class MergedWeights:
    """A `WeightSource` of a model with its adapters merged into the weights."""

    def __init__(self, weights: WeightSource, declared: Mapping[str, ParamSpec], scale: float):
        """weights: of the model with adapters; declared: their specs on one device, by path; scale: of the adapters.

        Raises UserError for quantized weights.
        """
        if any(spec.role == "quantized" for spec in declared.values()):
            raise UserError(
                f"the weights of {weights.where} are quantized, and adapters can't be added to them: "
                "convert with --merge before --quantize"
            )
        self.where, self._weights, self._declared, self._scale = weights.where, weights, declared, scale

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return {path: shape for path, shape in self._weights.shapes().items() if not path.endswith((LORA_A, LORA_B))}

    def read(self, path: str, box: Box) -> np.ndarray:
        """A box of a weight. Only the part of the adapter for the box is read."""
        w = self._weights.read(path, box)
        if (spec := self._declared.get(path + LORA_A)) is None:
            return w
        first, end, rank = leading(spec), len(spec.axes) - 1, slice(0, spec.shape[-1])
        a = self._weights.read(path + LORA_A, (*box[:end], rank))
        b = self._weights.read(path + LORA_B, (*box[:first], rank, *box[end:]))
        return merge(w, a, b, self._scale, first)


class JoinedWeights:
    """A `WeightSource` of the weights of a model and those of its adapters."""

    def __init__(self, weights: WeightSource, adapters: WeightSource):
        self.where = f"{weights.where} and {adapters.where}"
        self._source_of = {path: source for source in (weights, adapters) for path in source.shapes()}

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return {path: source.shapes()[path] for path, source in self._source_of.items()}

    def read(self, path: str, box: Box) -> np.ndarray:
        return self._source_of[path].read(path, box)
