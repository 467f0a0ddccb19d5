"""Calibration on a text: factors of input channels that reduce rounding errors, and scales of activations.

Factors are searched as in AWQ (Lin et al. 2023, "AWQ: Activation-aware Weight Quantization", section 3.2): an input
channel is divided by s = mean(|x|)^a and its weights are multiplied by s before they are rounded. The search tries
several a in [0, 1] and takes the one with the least error of the matrix's output; a = 0 changes nothing.
"""

from collections import defaultdict
from collections.abc import Mapping
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from megajax.batch import Params
from megajax.checkpoint.weights.foreign import WeightSource
from megajax.checkpoint.weights.quantized import Calibrated
from megajax.inference.layerwise import Layer, LayerByLayer, MatrixInputs
from megajax.layers.quantization.weights import AMAX, FACTOR, Quantized

POWERS = tuple(step / 10 for step in range(11))
SAMPLED = 256
"""Maximum number of tokens of a batch on which errors are measured."""
SMALLEST = 1e-4
"""Lower limit of a channel's mean magnitude relative to the largest, so that idle channels get no extreme factor."""
LETTERS = "abcdefgh"


class Inputs(NamedTuple):
    """Inputs of a matrix in one layer."""

    sample: Array
    """[tokens, *inputs]."""
    mean: Array
    """[*inputs]: mean magnitude."""
    largest: Array
    """[*inputs]: largest magnitude."""


class Calibration(NamedTuple):
    """Calibration of all matrices that the text reached."""

    matrices: Mapping[str, Calibrated]
    """Calibration of each matrix, by path."""
    errors: Mapping[str, tuple[float, float]]
    """Path -> relative error of the output, root mean square over layers: (without factors, with factors)."""


def calibrate(
    model: Any, weights: WeightSource, quantized: Mapping[str, Quantized], tokens: np.ndarray, *, rows: int
) -> Calibration:
    """Factors and activation scales from the float model and a text.

    quantized: path -> how the matrix will be stored; tokens: int32 [B, S]; rows: batch size.
    """
    parts = defaultdict[str, list[Inputs]](list)
    searched = defaultdict[str, list[tuple[np.ndarray, np.ndarray, float, float]]](list)
    batches = -(-len(tokens) // rows)

    def watch(layer: Layer, values: Params, inputs: MatrixInputs) -> None:
        for name, x in inputs.items():
            path = f"stack.blocks.{layer.block}.{name}"
            scheme = quantized.get(path)
            if scheme is None or not (scheme.balanced or scheme.static):
                continue
            matrix_inputs = parts[path]
            matrix_inputs.append(_inputs(scheme.form.inputs, x))
            if len(matrix_inputs) == batches:
                searched[path].append(_search(scheme, values[name], _joined(matrix_inputs)))
                matrix_inputs.clear()

    LayerByLayer(model, weights).states(tokens, rows=rows, watch=watch)
    matrices, errors = {}, {}
    for path, layers in searched.items():
        factors, amaxes, before, after = zip(*layers, strict=True)
        scheme = quantized[path]
        matrices[path] = Calibrated(
            np.stack(factors) if scheme.balanced else None, np.stack(amaxes) if scheme.static else None
        )
        errors[path] = (float(np.mean(before)) ** 0.5, float(np.mean(after)) ** 0.5)
    return Calibration(matrices, errors)


@partial(jax.jit, static_argnums=0)
def _inputs(dimensions: int, x: Array) -> Inputs:
    flat = x.astype(jnp.float32).reshape(-1, *x.shape[x.ndim - dimensions :])
    every = max(1, flat.shape[0] // SAMPLED)
    return Inputs(flat[::every], jnp.abs(flat).mean(0), jnp.abs(flat).max(0))


def _joined(parts: list[Inputs]) -> Inputs:
    samples, means, largest = zip(*parts, strict=True)
    return Inputs(jnp.concatenate(samples), jnp.stack(means).mean(0), jnp.stack(largest).max(0))


def _search(scheme: Quantized, w: Array, inputs: Inputs) -> tuple[np.ndarray, np.ndarray, float, float]:
    """(factor [*inputs], amax [], relative square error without the factor, and with it)."""
    mean = jnp.maximum(inputs.mean, inputs.mean.max() * SMALLEST)
    # Constant if the text never reached the matrix.
    mean = jnp.where(mean.max() > 0, mean, 1.0)
    best: tuple[float, Array] | None = None
    first = 0.0
    for power in POWERS if scheme.balanced else POWERS[:1]:
        s = mean**power
        factor = jnp.sqrt(s.max() * s.min()) / s
        error = float(_error(scheme, w, inputs, factor))
        first = error if power == 0 else first
        if best is None or error < best[0]:
            best = error, factor
    assert best is not None
    error, factor = best
    return np.asarray(factor), np.asarray(_amax(inputs, factor)), first, error


@partial(jax.jit, static_argnums=0)
def _error(scheme: Quantized, w: Array, inputs: Inputs, factor: Array) -> Array:
    """Squared error of the outputs for the sample, relative to their sum of squares."""
    leaves = {FACTOR: factor if scheme.balanced else None, AMAX: _amax(inputs, factor) if scheme.static else None}
    output_dims, outputs = w.ndim - scheme.form.inputs, inputs.sample.ndim - 1
    second = LETTERS[:outputs] + LETTERS[outputs : outputs + output_dims].upper()
    equation = f"t{LETTERS[:outputs]},{second}->t{second[outputs:]}"
    exact_output = jnp.einsum(equation, inputs.sample, w)
    rounded_output = scheme.product(equation, inputs.sample, scheme.quantized(w, leaves[FACTOR], leaves[AMAX]))
    return jnp.sum((rounded_output - exact_output) ** 2) / jnp.maximum(jnp.sum(exact_output**2), 1e-30)


def _amax(inputs: Inputs, factor: Array) -> Array:
    """Largest input magnitude after scaling; 1 if the text never reached the matrix."""
    amax = jnp.max(inputs.largest * factor)
    return jnp.where(amax > 0, amax, 1.0)
