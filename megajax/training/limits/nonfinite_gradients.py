"""Finds the weights whose gradients are not finite, for a step that failed twice."""

from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from megajax.batch import Batch, Params
from megajax.layers.param import ParamSpec
from megajax.mesh.layer_metrics import Measured
from megajax.precision.loss_scale import in_range
from megajax.processes.xla_options import Value
from megajax.training.gradients.grads import GradFn
from megajax.training.observations import reported_arrays, updated_arrays
from megajax.training.step import unit_weight

type NonfiniteGradients = Callable[[Params, Batch, np.float32, np.float32], tuple[Mapping[str, Array], Params]]
"""(weights, batch [M, B, ...], loss scale, factor on the gradients, both float32 []) -> ({path: bool [layers] or []},
updated arrays of the observations that have measures)."""

LISTED = 6


def make_nonfinite_gradients(
    grad_fn: GradFn,
    replicated: jax.sharding.Sharding,
    options: Mapping[str, Value] | None = None,
    weight: Callable[[Batch], int] = unit_weight,
    observed: Mapping[str, ParamSpec] = MappingProxyType({}),
) -> NonfiniteGradients:
    """Jitted: whether gradients have elements that are not finite, by path and, for stacked weights, by row.

    replicated: the sharding of a replicated array; options, weight and observed: as in the train step.
    """

    def nonfinite_gradients(params: Params, batch: Batch, scale: Array, factor: Array) -> tuple[dict, Params]:
        out = grad_fn(params, batch, scale * in_range(weight(batch)))
        grads = {path: g * factor for path, g in out.grads.items()}
        nonfinite = {path: jnp.any(~jnp.isfinite(g), axis=tuple(range(1, g.ndim))) for path, g in grads.items()}
        return nonfinite, reported_arrays(observed, updated_arrays(observed, params, out.observed, scale))

    return jax.jit(
        nonfinite_gradients, out_shardings=replicated, compiler_options=None if options is None else dict(options)
    )


def nonfinite_message(
    nonfinite: Mapping[str, np.ndarray], declared: Mapping[str, ParamSpec], measurements: Iterable[Measured] = ()
) -> str:
    """The weights with gradients that are not finite, and faults of layers.

    nonfinite: path -> bool [first dimension]; measurements: of the same step.
    """
    faults = [(measurement.measure.fault, measurement.faulty()) for measurement in measurements if measurement.faulty()]
    faulty = [f"{fault} not finite, first in layer {layers[0]} (of {len(layers)})" for fault, layers in faults]
    return "; ".join([*faulty, _gradients(nonfinite, declared)])


def _gradients(nonfinite: Mapping[str, np.ndarray], declared: Mapping[str, ParamSpec]) -> str:
    faulty = {path: rows for path, rows in nonfinite.items() if rows.any()}
    if len(faulty) == len(nonfinite):
        return "the gradients of all weights are not finite"
    if not faulty:
        return "the gradients are finite when computed without an update"
    texts = [path + _layers(rows, declared[path].layers) for path, rows in faulty.items()]
    more = f" and {len(texts) - LISTED} more" if len(texts) > LISTED else ""
    return f"gradients not finite: {', '.join(texts[:LISTED])}{more}, of {len(nonfinite)} weights"


def _layers(rows: np.ndarray, layers: tuple[int, ...]) -> str:
    """ " of layers 3, 7" for a stacked weight, numbered in the model from 0; "" if all its layers are faulty."""
    faulty = [layer for layer, row in zip(layers, rows, strict=False) if row and layer >= 0]
    if not layers or len(faulty) == sum(layer >= 0 for layer in layers):
        return ""
    numbers = ", ".join(map(str, faulty[:LISTED])) + ", ..." * (len(faulty) > LISTED)
    return f" of layer{'s' * (len(faulty) > 1)} {numbers}"
