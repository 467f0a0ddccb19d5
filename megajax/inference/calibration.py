"""What a text tells about the inputs of matrices: factors that make rounding cheaper, and scales of activations.

Factors are searched as in AWQ (Lin et al. 2023, "AWQ: Activation-aware Weight Quantization", section 3.2): an input
channel is divided by s = mean(|x|)^a and its weights are multiplied by s before they are rounded. Of a few a in [0, 1],
that with the least error of the layer's output is taken; a = 0 changes nothing.
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
from megajax.inference.layerwise import Layer, LayerByLayer, Seen
from megajax.layers.quantized import AMAX, FACTOR, Quantized

POWERS = tuple(step / 10 for step in range(11))
SAMPLED = 256
"""Tokens of a part of the text that errors are measured on."""
SMALLEST = 1e-4
"""Of the mean magnitudes of channels, relative to the largest: idle channels get no extreme factor."""
LETTERS = "abcdefgh"


class Inputs(NamedTuple):
    """Of a matrix in one layer."""

    sample: Array
    """[tokens, *inputs]."""
    mean: Array
    """[*inputs]: mean magnitude."""
    largest: Array
    """[*inputs]: largest magnitude."""


class Calibration(NamedTuple):
    """Of all matrices that the text reached."""

    matrices: Mapping[str, Calibrated]
    """By path."""
    errors: Mapping[str, tuple[float, float]]
    """Path -> error of the output over its size, both root mean squares over layers: without factors, and with them."""


def calibrate(
    model: Any, weights: WeightSource, quantized: Mapping[str, Quantized], tokens: np.ndarray, *, rows: int
) -> Calibration:
    """What to quantize with, of the float model and a text.

    quantized: by path, how matrices will be stored; tokens: int32 [B, S]; rows: computed at once.
    """
    parts = defaultdict[str, list[Inputs]](list)
    searched = defaultdict[str, list[tuple[np.ndarray, np.ndarray, float, float]]](list)
    counted = -(-len(tokens) // rows)

    def watch(layer: Layer, values: Params, seen: Seen) -> None:
        for name, x in seen.items():
            path = f"stack.blocks.{layer.block}.{name}"
            how = quantized.get(path)
            if how is None or not (how.balanced or how.static):
                continue
            own = parts[path]
            own.append(_inputs(how.form.inputs, x))
            if len(own) == counted:
                searched[path].append(_search(how, values[name], _joined(own)))
                own.clear()

    LayerByLayer(model, weights).states(tokens, rows=rows, watch=watch)
    matrices, errors = {}, {}
    for path, layers in searched.items():
        factors, amaxes, before, after = zip(*layers, strict=True)
        how = quantized[path]
        matrices[path] = Calibrated(
            np.stack(factors) if how.balanced else None, np.stack(amaxes) if how.static else None
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


def _search(how: Quantized, w: Array, inputs: Inputs) -> tuple[np.ndarray, np.ndarray, float, float]:
    """(factor [*inputs], amax [], relative square error without the factor, and with it)."""
    mean = jnp.maximum(inputs.mean, inputs.mean.max() * SMALLEST)
    # All alike where the text never reached the matrix.
    mean = jnp.where(mean.max() > 0, mean, 1.0)
    best: tuple[float, Array] | None = None
    first = 0.0
    for power in POWERS if how.balanced else POWERS[:1]:
        s = mean**power
        factor = jnp.sqrt(s.max() * s.min()) / s
        error = float(_error(how, w, inputs, factor))
        first = error if power == 0 else first
        if best is None or error < best[0]:
            best = error, factor
    assert best is not None
    error, factor = best
    return np.asarray(factor), np.asarray(_amax(inputs, factor)), first, error


@partial(jax.jit, static_argnums=0)
def _error(how: Quantized, w: Array, inputs: Inputs, factor: Array) -> Array:
    """Of the outputs for the sample, over their sum of squares."""
    given = {FACTOR: factor if how.balanced else None, AMAX: _amax(inputs, factor) if how.static else None}
    made, outputs = w.ndim - how.form.inputs, inputs.sample.ndim - 1
    second = LETTERS[:outputs] + LETTERS[outputs : outputs + made].upper()
    equation = f"t{LETTERS[:outputs]},{second}->t{second[outputs:]}"
    right = jnp.einsum(equation, inputs.sample, w)
    wrong = how.product(equation, inputs.sample, how.quantized(w, given[FACTOR], given[AMAX]))
    return jnp.sum((wrong - right) ** 2) / jnp.maximum(jnp.sum(right**2), 1e-30)


def _amax(inputs: Inputs, factor: Array) -> Array:
    """1 where the text never reached the matrix."""
    amax = jnp.max(inputs.largest * factor)
    return jnp.where(amax > 0, amax, 1.0)
