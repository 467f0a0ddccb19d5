"""Weights that are quantized or dequantized on reading, one matrix of one layer at a time."""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from itertools import product
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import numpy as np
from flax import nnx

from megajax.checkpoint.boxes import Box
from megajax.checkpoint.weight_source import WeightSource
from megajax.config.errors import UserError
from megajax.interop.weights.foreign import declared_by, one_device
from megajax.interop.weights.model_parts import quantization_of
from megajax.layers.param import ParamSpec, matrices_of
from megajax.layers.quantized import ARRAY, BESIDE, SCALE, Quantized
from megajax.models.protocol import ModelConfig


class Calibrated(NamedTuple):
    """Calibration of the inputs of a matrix, for all its layers."""

    factor: np.ndarray | None = None
    """[layers, *inputs]: factor on inputs; None: 1."""
    amax: np.ndarray | None = None
    """[layers]: largest magnitude of the values to round."""


class QuantizedWeights:
    """A `WeightSource` of a model with quantized matrices, from a source of the unquantized model."""

    def __init__(
        self,
        source: WeightSource,
        declared: Mapping[str, ParamSpec],
        matrices: Mapping[str, Quantized],
        calibrated: Mapping[str, Calibrated],
    ):
        """declared, matrices: of the quantized model, by path; calibrated: calibration of matrices, by path.

        Raises UserError for a matrix with static scales and no calibration of its inputs.
        """
        static = (path for path, quantized in matrices.items() if quantized.static)
        if missing := [path for path in static if calibrated.get(path, Calibrated()).amax is None]:
            raise UserError(
                f"model.quantization.static: the calibration has no inputs of {', '.join(missing)}\n"
                "Convert with --quantize and --calibration, and --exclude the matrices that its text does not reach."
            )
        self.where, self._source, self._matrices, self._calibrated = source.where, source, matrices, calibrated
        stored = source.shapes
        leaves = (base + suffix for base in matrices if base in stored for suffix in (ARRAY, *BESIDE))
        self.shapes = {path: declared[path].shape for path in leaves if path in declared}
        self.shapes |= {path: shape for path, shape in stored.items() if path not in matrices}
        self._last: tuple[Any, dict[str, np.ndarray]] = (None, {})

    def read(self, path: str, box: Box) -> np.ndarray:
        suffixes = (suffix for suffix in (ARRAY, *BESIDE) if path.endswith(suffix))
        suffix = next((suffix for suffix in suffixes if path.removesuffix(suffix) in self._matrices), None)
        if suffix is None:
            return self._source.read(path, box)
        base = path.removesuffix(suffix)
        form, shape = self._matrices[base].form, self._source.shapes[base]
        leading = len(shape) - form.inputs - form.outputs
        ranges = [range(side.start, side.stop) for side in box[:leading]]
        parts = [self._leaves(base, index)[suffix][box[leading:]] for index in product(*ranges)]
        return np.stack(parts).reshape([*map(len, ranges), *parts[0].shape])

    def _leaves(self, base: str, index: tuple[int, ...]) -> dict[str, np.ndarray]:
        """Suffix -> array, of one quantized matrix. The last matrix is cached, because a chunk may be a part of it."""
        if self._last[0] != (base, index):
            rest = self._source.shapes[base][len(index) :]
            box = (*(slice(place, place + 1) for place in index), *(slice(0, size) for size in rest))
            w, quantized = self._source.read(base, box).reshape(rest), self._matrices[base]
            calibrated = self._calibrated.get(base, Calibrated())
            factor, amax = (None if array is None else array[index] for array in calibrated)
            if quantized.balanced and factor is None:
                factor = np.ones(rest[: quantized.form.inputs], np.float32)
            leaves = _quantize(quantized, np.asarray(w, np.float32), factor, amax)
            self._last = (base, index), {suffix: np.asarray(leaf) for suffix, leaf in leaves.items()}
        return self._last[1]


class DequantizedWeights:
    """A `WeightSource` of the unquantized model in float32, from one of a model with quantized matrices."""

    def __init__(self, source: WeightSource, plain: Mapping[str, ParamSpec], matrices: Mapping[str, Quantized]):
        """plain: the weights of the unquantized model, by path; matrices: of the quantized one."""
        self.where, self._source, self._matrices = source.where, source, matrices
        self.shapes = {path: shape for path, shape in source.shapes.items() if path in plain}
        self.shapes |= {path: plain[path].shape for path in matrices if path in self.shapes}

    def read(self, path: str, box: Box) -> np.ndarray:
        if path not in self._matrices:
            return self._source.read(path, box)
        quantized, shapes = self._matrices[path], self._source.shapes
        leading = len(self.shapes[path]) - quantized.form.inputs - quantized.form.outputs
        parts, ranges = [], [range(side.start, side.stop) for side in box[:leading]]
        for index in product(*ranges):
            place, leaves = tuple(slice(n, n + 1) for n in index), {}
            for suffix in (ARRAY, *BESIDE):
                if (shape := shapes.get(path + suffix)) is not None:
                    whole = (*place, *(slice(0, size) for size in shape[leading:]))
                    leaves[suffix] = self._source.read(path + suffix, whole).reshape(shape[leading:])
            parts.append(np.asarray(_dequantize(quantized, leaves))[box[leading:]])
        return np.stack(parts).reshape([*map(len, ranges), *parts[0].shape])


class Quantizing(NamedTuple):
    """Turns float weights into those of a model with quantized matrices."""

    note: str
    """Says the format."""
    declared: Mapping[str, ParamSpec]
    """The weights of the model, by path."""
    plain: Mapping[str, ParamSpec]
    """The same, not quantized."""
    matrices: Mapping[str, Quantized]

    @classmethod
    def of(cls, model: Any) -> "Quantizing":
        """For the config of a quantized model."""
        plain = declared_by(replace(model, quantization=None))
        return cls(f"quantized to {model.quantization.weights}", declared_by(model), plain, quantized_matrices(model))

    @classmethod
    def if_any(cls, model: Any) -> "Quantizing | None":
        """For a model config; None if it is not quantized."""
        return None if quantization_of(model) is None else cls.of(model)

    def scales(self) -> set[str]:
        """Paths of scales."""
        return {path + SCALE for path in self.matrices}

    def weights(
        self, source: WeightSource, calibrated: Mapping[str, Calibrated] = MappingProxyType({})
    ) -> QuantizedWeights:
        """The weights of the model. source: of plain ones; calibrated: calibration of matrices, by path."""
        return QuantizedWeights(source, self.declared, self.matrices, calibrated)

    def inverse(self, source: WeightSource) -> DequantizedWeights:
        """The plain weights. source: of the model."""
        return DequantizedWeights(source, self.plain, self.matrices)


_quantize = partial(jax.jit, static_argnums=0)(Quantized.quantized)
_dequantize = partial(jax.jit, static_argnums=0)(Quantized.whole)


def quantized_matrices(model: ModelConfig) -> dict[str, Quantized]:
    """The formats of the quantized matrices of a model config, by path."""
    matrices = matrices_of(nnx.eval_shape(one_device(model)))
    return {path: matrix.quantized for path, matrix in matrices.items() if isinstance(matrix.quantized, Quantized)}
