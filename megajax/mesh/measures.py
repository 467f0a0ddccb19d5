"""What a run reports of its observations: numbers of each layer, and one number for all layers, computed on the host.

An updater says what it measures (see megajax.mesh.observations). Nothing that fetches, logs or draws these numbers
knows which layers they come from.

L layers, K parts of a layer.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np

type Layer = int | str
"""The number of a layer in the only stack; else a name."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Measure:
    """A number of each layer, or a list of numbers, from what the state keeps of an observation."""

    name: str
    """In metrics.jsonl, dashboards and the report."""
    of: Callable[[np.ndarray], np.ndarray]
    """Float64 [L, *shape of the state] after a step -> [L], or [L, K]; nan where unknown."""
    over_layers: Literal["max", "min", "mean", "sum"] = "mean"
    """What the number for all layers is, for numbers."""
    label: str = ""
    """Name in lines at the terminal; "": not shown there."""
    shown: str = "{:.3g}"
    """Format at the terminal."""
    above: float = -np.inf
    """Shown, and warned of, if the number for all layers is above this."""
    warning: str = ""
    """Said once of a run, with {value} in it; "": nothing is said."""
    fault: str = ""
    """What is not finite in layers whose number is above 0, "logits of the router"; "": no layer has a fault by it."""


class Measured(NamedTuple):
    """A measure after a step."""

    measure: Measure
    layers: tuple[Layer, ...]
    """[L]."""
    values: np.ndarray
    """Float64 [L], or [L, K]."""

    @classmethod
    def of_layers(cls, measure: Measure, values: Mapping[Layer, np.ndarray]) -> "Measured":
        """Layers with a number come first, in its order; then named ones, in theirs."""
        layers = sorted(layer for layer in values if isinstance(layer, int)) + [x for x in values if isinstance(x, str)]
        return cls(measure, tuple(layers), np.stack([values[layer] for layer in layers]))

    @property
    def whole(self) -> float:
        """The number for all layers; nan if a layer's is. Of numbers only."""
        return float(getattr(np, self.measure.over_layers)(self.values))

    @property
    def text(self) -> str:
        """The number for all layers as the terminal shows it; "" if it does not."""
        return self.measure.shown.format(self.whole) if self.measure.label and self.told else ""

    @property
    def told(self) -> bool:
        """Whether the number for all layers is one to show."""
        return self.values.ndim == 1 and self.whole > self.measure.above

    def faulty(self) -> list[Layer]:
        """Layers with a fault, in their order."""
        if not self.measure.fault:
            return []
        return [layer for layer, value in zip(self.layers, self.values, strict=True) if value > 0]

    def of(self, layer: Layer) -> Any:
        """The number or the list of a layer as plain values of five digits; None for another layer."""
        return _plain(self.values[self.layers.index(layer)]) if layer in self.layers else None


def _plain(value: np.ndarray | np.float64) -> Any:
    if value.ndim:
        return [_plain(element) for element in value]
    return int(value) if float(value).is_integer() else float(f"{value:.5g}")


def layer_values(measurements: Iterable[Measured]) -> dict[str, list[Any]]:
    """`layers`, and by the name of each measure one value a layer; None where a layer has no such measure."""
    measurements = list(measurements)
    layers = list(dict.fromkeys(layer for measurement in measurements for layer in measurement.layers))
    return {"layers": layers} | {
        measurement.measure.name: [measurement.of(layer) for layer in layers] for measurement in measurements
    }
