"""Finds the weights whose gradients are not finite, for a step that failed twice."""

from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from megajax.batch import Batch, Params
from megajax.layers.param import ParamSpec
from megajax.mesh.measures import Measured
from megajax.mesh.xla import Value
from megajax.precision.loss_scale import in_range
from megajax.training.grads import GradFn
from megajax.training.observations import reported_arrays, updated_arrays
from megajax.training.step import unit_weight

type NonfiniteGradients = Callable[[Params, Batch, Array, Array], tuple[Mapping[str, Array], Params]]
"""(weights, batch [M, B, ...], loss scale, factor on the gradients, both float32 []) -> ({path: bool [layers] or []},
what the state would keep of observations that have measures)."""

LISTED = 6


def make_nonfinite_gradients(
    grad_fn: GradFn,
    everywhere: jax.sharding.Sharding,
    options: Mapping[str, Value] | None = None,
    weight: Callable[[Batch], int] = unit_weight,
    observed: Mapping[str, ParamSpec] = MappingProxyType({}),
) -> NonfiniteGradients:
    """Jitted: whether a gradient has elements that are not finite, by path and, of stacked weights, by row.

    everywhere: the sharding of a replicated array; options, weight and observed: as in the train step.
    """

    def nonfinite_gradients(params: Params, batch: Batch, scale: Array, factor: Array) -> tuple[dict, Params]:
        out = grad_fn(params, batch, scale * in_range(weight(batch)))
        grads = {path: g * factor for path, g in out.grads.items()}
        bad = {path: jnp.any(~jnp.isfinite(g), axis=tuple(range(1, g.ndim))) for path, g in grads.items()}
        return bad, reported_arrays(observed, updated_arrays(observed, params, out.observed, scale))

    return jax.jit(
        nonfinite_gradients, out_shardings=everywhere, compiler_options=None if options is None else dict(options)
    )


def sentence(
    nonfinite: Mapping[str, np.ndarray], declared: Mapping[str, ParamSpec], measured: Iterable[Measured] = ()
) -> str:
    """Whose gradients are not finite, in words. nonfinite: path -> bool [first dimension]; measured: of the step."""
    faults = [(each.measure.fault, each.faulty()) for each in measured if each.faulty()]
    faulty = [f"{what} not finite, first in layer {layers[0]} (of {len(layers)})" for what, layers in faults]
    return "; ".join([*faulty, _gradients(nonfinite, declared)])


def _gradients(nonfinite: Mapping[str, np.ndarray], declared: Mapping[str, ParamSpec]) -> str:
    bad = {path: where for path, where in nonfinite.items() if where.any()}
    if len(bad) == len(nonfinite):
        return "the gradients of all weights are not finite"
    if not bad:
        return "computed alone, the gradients are finite"
    named = [path + _layers(where, declared[path].layers) for path, where in bad.items()]
    more = f" and {len(named) - LISTED} more" if len(named) > LISTED else ""
    return f"gradients not finite: {', '.join(named[:LISTED])}{more}, of {len(nonfinite)} weights"


def _layers(where: np.ndarray, layers: tuple[int, ...]) -> str:
    """ " of layers 3, 7" for a stacked weight, numbered in the model from 0; nothing where all its layers are meant."""
    bad = [layer for layer, wrong in zip(layers, where, strict=False) if wrong and layer >= 0]
    if not layers or len(bad) == sum(layer >= 0 for layer in layers):
        return ""
    some = ", ".join(map(str, bad[:LISTED])) + ", ..." * (len(bad) > LISTED)
    return f" of layer{'s' * (len(bad) > 1)} {some}"
