"""The arrays of observations in the training state, see megajax.mesh.layer_observations."""

from collections.abc import Iterable, Mapping
from dataclasses import replace

import jax.numpy as jnp
import numpy as np
from jax import Array

from megajax.batch import Params
from megajax.layers.param import ParamSpec
from megajax.mesh.layer_metrics import Layer, Measure, Measured
from megajax.mesh.layer_observations import Following


def following(declared: Mapping[str, ParamSpec], trained: Iterable[str]) -> dict[str, ParamSpec]:
    """The observations, of which those that change what layers compute do not move where their weight is not trained.

    trained: paths of the trained weights.
    """
    paths = frozenset(trained)

    def of(path: str, spec: ParamSpec) -> ParamSpec:
        updater, layer = spec.observed(), path.rsplit(".", 2)[0]
        moves = not isinstance(updater, Following) or f"{layer}.{updater.follows}" in paths
        return spec if moves else replace(spec, updater=updater.at_rest())

    return {path: of(path, spec) for path, spec in declared.items()}


def initial_arrays(declared: Mapping[str, ParamSpec]) -> dict[str, Array]:
    """Zeros, float32 by path."""
    return {path: jnp.zeros(spec.observed().shape(spec.shape), jnp.float32) for path, spec in declared.items()}


def reported_arrays(declared: Mapping[str, ParamSpec], state: Params) -> dict[str, Array]:
    """The arrays of observations that have measures, by path."""
    return {path: state[path] for path, spec in declared.items() if spec.observed().measures()}


def measurements(declared: Mapping[str, ParamSpec], state: Mapping[str, np.ndarray]) -> dict[str, Measured]:
    """Measurements by the name of the measure; layers in their order in the model.

    state: arrays of observations on the host, by path; padding rows are ignored.
    """
    by_name: dict[str, tuple[Measure, dict[Layer, np.ndarray]]] = {}
    for path, array in state.items():
        spec = declared[path]
        rows, numbers = (
            (np.asarray(array, np.float64), spec.layers) if spec.layers else (array[None].astype(float), (0,))
        )
        layer_rows = sorted((number, row) for row, number in enumerate(numbers) if number >= 0)
        for measure in spec.observed().measures():
            values = measure.of(rows[[row for _, row in layer_rows]])
            layers = by_name.setdefault(measure.name, (measure, {}))[1]
            layers |= {_layer(path, spec, number): value for (number, _), value in zip(layer_rows, values, strict=True)}
    return {name: Measured.of_layers(measure, layers) for name, (measure, layers) in by_name.items()}


def _layer(path: str, spec: ParamSpec, number: int) -> Layer:
    """The name of a layer: its number in the only stack, else the beginning of its path up to a number."""
    before, stack, _ = path.partition("stack.")
    if spec.layers and stack:
        return f"{before}{number}" if before else number
    parts = path.split(".")
    return ".".join(parts[: next((place for place, part in enumerate(parts, 1) if part.isdigit()), len(parts) - 1)])


def updated_arrays(
    declared: Mapping[str, ParamSpec], state: Params, observed: Params, scale: Array
) -> dict[str, Array]:
    """The arrays after a step with these observations. scale: factor on its loss, float32 []."""
    return {path: spec.observed().updated(state[path], observed[path], scale) for path, spec in declared.items()}
