"""Measures of a run's observations: a number for each layer, and one for all layers, computed on the host.

An updater declares its measures (see megajax.mesh.layer_observations). The code that fetches, logs or plots them does
not depend on the kinds of layers.

L layers, K parts of a layer.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np

type Layer = int | str
"""The number of a layer in the only stack, otherwise a name."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Measure:
    """A number or a list of numbers for each layer, from the state of an observation."""

    name: str
    """Name in metrics.jsonl, dashboards and the report."""
    of: Callable[[np.ndarray], np.ndarray]
    """Float64 [L, *shape of the state] after a step -> [L], or [L, K]; NaN if unknown."""
    over_layers: Literal["max", "min", "mean", "sum"] = "mean"
    """Reduction over layers to the overall number; not used for lists."""
    label: str = ""
    """Name at the terminal; "": not shown there."""
    format: str = "{:.3g}"
    """Format at the terminal."""
    above: float = -np.inf
    """The overall number is shown, and causes the warning, if it is above this."""
    warning: str = ""
    """Warning, logged once per run, with {value} in it; "": no warning."""
    fault: str = ""
    """Nonfinite values in layers with a number above 0, such as "logits of the router"; "": not a fault."""


class Measured(NamedTuple):
    """The values of a measure after a step."""

    measure: Measure
    layers: tuple[Layer, ...]
    """[L]."""
    values: np.ndarray
    """Float64 [L], or [L, K]."""

    @classmethod
    def of_layers(cls, measure: Measure, values: Mapping[Layer, np.ndarray]) -> "Measured":
        """From values by layer: numbered layers first, in ascending order, then named layers in the given order."""
        layers = sorted(layer for layer in values if isinstance(layer, int)) + [x for x in values if isinstance(x, str)]
        return cls(measure, tuple(layers), np.stack([values[layer] for layer in layers]))

    @property
    def overall(self) -> float:
        """The overall number; NaN if the number of a layer is. Not for lists."""
        return float(getattr(np, self.measure.over_layers)(self.values))

    @property
    def text(self) -> str:
        """The overall number as shown at the terminal; "" if it is not shown."""
        return self.measure.format.format(self.overall) if self.measure.label and self.is_shown else ""

    @property
    def is_shown(self) -> bool:
        """Whether the overall number is shown."""
        return self.values.ndim == 1 and self.overall > self.measure.above

    def faulty(self) -> list[Layer]:
        """Layers with a fault, in the order of `layers`."""
        if not self.measure.fault:
            return []
        return [layer for layer, value in zip(self.layers, self.values, strict=True) if value > 0]

    def of(self, layer: Layer) -> Any:
        """The number or the list of a layer as plain values with five digits; None for an unknown layer."""
        return _plain(self.values[self.layers.index(layer)]) if layer in self.layers else None


def _plain(value: np.ndarray | np.float64) -> Any:
    if value.ndim:
        return [_plain(element) for element in value]
    return int(value) if float(value).is_integer() else float(f"{value:.5g}")


def layer_values(measurements: Iterable[Measured]) -> dict[str, list[Any]]:
    """`layers`, and for each measure one value per layer by its name; None if a layer lacks the measure."""
    measurements = list(measurements)
    layers = list(dict.fromkeys(layer for measurement in measurements for layer in measurement.layers))
    return {"layers": layers} | {
        measurement.measure.name: [measurement.of(layer) for layer in layers] for measurement in measurements
    }
