"""Weights that are quantized while they are read, a matrix of one layer at a time."""

from collections.abc import Mapping
from functools import partial
from itertools import product
from typing import Any, NamedTuple

import jax
import numpy as np
from flax import nnx

from megajax.checkpoint.boxes import Box
from megajax.checkpoint.weights.foreign import WeightSource, one_device
from megajax.config.errors import UserError
from megajax.layers.param import ParamSpec, matrices_of
from megajax.layers.quantized import AMAX, ARRAY, FACTOR, SCALE, Quantized


class Calibrated(NamedTuple):
    """What a text told about the inputs of a matrix, of all its layers."""

    factor: np.ndarray | None = None
    """[layers, *inputs]: on inputs; None: 1."""
    amax: np.ndarray | None = None
    """[layers]: largest magnitude of what is rounded."""


class QuantizedWeights:
    """A `WeightSource` of a model with quantized matrices, from one of the model before."""

    def __init__(
        self,
        source: WeightSource,
        declared: Mapping[str, ParamSpec],
        matrices: Mapping[str, Quantized],
        calibrated: Mapping[str, Calibrated],
    ):
        """declared, matrices: of the quantized model, by path; calibrated: of matrices, by path.

        Raises UserError for a matrix whose inputs need a scale from a calibration that did not see them.
        """
        unseen = (path for path, how in matrices.items() if how.static)
        if missing := [path for path in unseen if calibrated.get(path, Calibrated()).amax is None]:
            raise UserError(
                f"model.quantization.static: no calibration has seen inputs of {', '.join(missing)}\n"
                "Convert with --quantize and --calibration, and leave out with --exclude what its text does not reach."
            )
        self.where, self._source, self._matrices, self._calibrated = source.where, source, matrices, calibrated
        before = source.shapes()
        self._shapes = {path: spec.shape for path, spec in declared.items() if spec.role == "quantized"}
        self._shapes |= {path: shape for path, shape in before.items() if path not in matrices}
        self._last: tuple[Any, dict[str, np.ndarray]] = (None, {})

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return self._shapes

    def read(self, path: str, box: Box) -> np.ndarray:
        ends = (end for end in (ARRAY, SCALE, FACTOR, AMAX) if path.endswith(end))
        end = next((end for end in ends if path.removesuffix(end) in self._matrices), None)
        if end is None:
            return self._source.read(path, box)
        base = path.removesuffix(end)
        form, shape = self._matrices[base].form, self._source.shapes()[base]
        leading = len(shape) - form.inputs - form.outputs
        counted = [range(side.start, side.stop) for side in box[:leading]]
        parts = [self._leaves(base, index)[end][box[leading:]] for index in product(*counted)]
        return np.stack(parts).reshape([*map(len, counted), *parts[0].shape])

    def _leaves(self, base: str, index: tuple[int, ...]) -> dict[str, np.ndarray]:
        """Of one matrix. The last is kept: a chunk may be a part of it."""
        if self._last[0] != (base, index):
            rest = self._source.shapes()[base][len(index) :]
            box = (*(slice(place, place + 1) for place in index), *(slice(0, size) for size in rest))
            w, quantized = self._source.read(base, box).reshape(rest), self._matrices[base]
            factor, amax = (None if each is None else each[index] for each in self._calibrated.get(base, Calibrated()))
            if quantized.balanced and factor is None:
                factor = np.ones(rest[: quantized.form.inputs], np.float32)
            made = _quantize(quantized, np.asarray(w, np.float32), factor, amax)
            self._last = (base, index), {end: np.asarray(leaf) for end, leaf in made.items()}
        return self._last[1]


_quantize = partial(jax.jit, static_argnums=0)(Quantized.quantized)


def quantized_matrices(model: Any) -> dict[str, Quantized]:
    """How the quantized matrices of a model config are stored, by path."""
    matrices = matrices_of(nnx.eval_shape(one_device(model)))
    return {path: each.quantized for path, each in matrices.items() if isinstance(each.quantized, Quantized)}
