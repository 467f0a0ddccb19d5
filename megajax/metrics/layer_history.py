"""What layers reported in the course of a run, read from metrics.jsonl and layers.jsonl, and pictures of it.

N steps, L layers, K parts of a layer.
"""

from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from megajax.charts import save_png
from megajax.heat_map import HeatMap
from megajax.metrics.record import parse, read_metrics

COLUMNS = 400
"""Most columns of a heat map over steps."""


@dataclass(frozen=True, slots=True)
class LayerHistory:
    """What layers reported."""

    layers: tuple[str, ...] = ()
    """[L]."""
    steps: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))
    """int64 [N]."""
    values: Mapping[str, np.ndarray] = field(default_factory=dict)
    """Name -> float32 [N, L]; nan where unknown."""
    lists: Mapping[str, tuple[tuple[str, ...], np.ndarray]] = field(default_factory=dict)
    """Name -> the layers that have one, and float64 [L, K] of the last line of layers.jsonl."""
    lists_step: int = 0
    """The step of that line."""

    def heat_maps(self) -> Iterator[HeatMap]:
        """Over steps, of all that is not always the same; then lists of the last line, each over its layer's mean."""
        for name, values in self.values.items():
            known = values[np.isfinite(values)]
            if known.size and known.min() < known.max():
                yield self._over_steps(name, values)
        for name, (layers, values) in self.lists.items():
            means = values.mean(-1, keepdims=True)
            shares = np.divide(values, means, out=np.full_like(values, np.nan), where=means != 0)
            title, part = f"{_words(name)} over their mean, step {self.lists_step:,}", name.split("_")[0]
            yield HeatMap(title=title, rows=layers, values=shares.tolist(), x_label=part, y_label="layer", middle=1.0)

    def _over_steps(self, name: str, values: np.ndarray) -> HeatMap:
        """A column has the largest value of each layer in some steps."""
        count = min(len(values), COLUMNS)
        starts = np.arange(count) * len(values) // count
        shown = np.fmax.reduceat(values, starts, axis=0).T
        return HeatMap(
            title=_words(name),
            rows=self.layers,
            values=shown.astype(float).tolist(),
            x_label="step",
            y_label="layer",
            first=float(self.steps[0]) - 0.5,
            last=float(self.steps[-1]) + 0.5,
        )


@dataclass
class LayerColumns:
    """Collects the numbers of layers from lines of metrics.jsonl."""

    layers: list[Any] = field(default_factory=list)
    steps: array = field(default_factory=lambda: array("q"))
    columns: dict[str, array] = field(default_factory=dict)
    """Flat [N, L]."""

    def add(self, line: Mapping[str, Any]) -> None:
        """A line; one without such numbers is left out, one of other layers begins anew."""
        values = line.get("by_layer")
        if not isinstance(values, Mapping) or not isinstance(values.get("layers"), list):
            return
        if values["layers"] != self.layers:
            self.layers, self.steps, self.columns = values["layers"], array("q"), {}
        nothing = [None] * len(self.layers)
        for name in dict.fromkeys([*self.columns, *values]):
            if name != "layers":
                column = self.columns.setdefault(name, array("f", [np.nan]) * (len(self.steps) * len(self.layers)))
                column.extend(np.nan if value is None else value for value in values.get(name, nothing))
        self.steps.append(line["step"])

    def history(self, layers_file: Path) -> LayerHistory:
        """With the last line of layers.jsonl, if there is that file."""
        shape = len(self.steps), len(self.layers)
        step, lists = _last_lists(layers_file)
        return LayerHistory(
            tuple(map(str, self.layers)),
            np.asarray(self.steps, np.int64),
            {name: np.asarray(column, np.float32).reshape(shape) for name, column in self.columns.items()},
            lists,
            step,
        )


def _last_lists(path: Path) -> tuple[int, dict[str, tuple[tuple[str, ...], np.ndarray]]]:
    last: dict[str, Any] | None = None
    try:
        with path.open(encoding="utf-8", errors="replace") as file:
            for text in file:
                last = parse(text) or last
    except OSError:
        return 0, {}
    if last is None:
        return 0, {}
    return last["step"], dict(_lists(last, last.get("layers", [])))


def _lists(line: Mapping[str, Any], layers: Sequence[Any]) -> Iterator[tuple[str, tuple[tuple[str, ...], np.ndarray]]]:
    """Lists of the layers of the first length; others cannot be rows of the same picture."""
    for name, rows in line.items():
        if name in ("step", "layers"):
            continue
        given = [(str(layer), row) for layer, row in zip(layers, rows, strict=True) if row is not None]
        given = [(layer, row) for layer, row in given if len(row) == len(given[0][1])]
        if given:
            yield name, (tuple(layer for layer, _ in given), np.asarray([row for _, row in given], np.float64))


def plot_layers(metrics: Path, layers_file: Path, picture: Path) -> str:
    """Draw the first numbers of layers over steps, and the last lists, into a PNG -> a line for the terminal.

    "" where layers report nothing that differs, or without matplotlib.
    """
    columns = LayerColumns()
    for line in read_metrics(metrics)[0]:
        columns.add(line)
    maps = [*columns.history(layers_file).heat_maps()]
    shown = [one for one in maps if one.last is not None][:1] + [one for one in maps if one.last is None]
    if not shown:
        return ""

    def draw(axes: Any) -> None:
        for one, each in zip(shown, axes if len(shown) > 1 else [axes], strict=True):
            one.plot(each)

    try:
        save_png(draw, picture, inches=(12, 5 * len(shown)), dpi=120, panels=len(shown))
    except ModuleNotFoundError:
        return ""
    return f"layers: {picture}"


def _words(name: str) -> str:
    return name.replace("_", " ")
