"""Pictures of a run from its files alone: the loss curve, and heat maps of per-layer metrics.

N steps, L layers, K entries of a layer's list, for example experts.
"""

import math
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from megajax.display.charts import LineChart, Series, save_png
from megajax.display.heat_map import HeatMap
from megajax.metrics.record import METRICS, read_lines, read_metrics


def plot_loss(metrics: Path, picture: Path, *, title: str, vocabulary: int | None = None) -> str:
    """Draw `metrics` (a metrics.jsonl) into `picture` (a PNG, 1600 x 900) -> a line for the terminal.

    The loss, or of reinforcement learning, whose losses say little, the reward. With `vocabulary`, the number V of
    tokens, also draws ln V: the loss of a uniform guess, where an untrained model starts. Without matplotlib or two
    steps, the line tells why nothing was drawn.
    """
    steps, evaluations = read_metrics(metrics)
    if len(steps) < 2:  # a point is no curve, and matplotlib takes 0.3 s
        return f"{picture.name} not drawn: {metrics} has {'one step' if steps else 'no steps'}, a curve takes two"
    rewards = [line for line in steps if line.get("reward") is not None]
    if rewards:
        steps, evaluations, vocabulary = [line | {"loss": line["reward"]} for line in rewards], [], None
    what, unit = ("reward", "reward") if rewards else ("loss", "loss, nats per token")
    x, loss = _points(steps)
    window = max(1, len(loss) // 50)
    series = [Series(f"train {what}", x, loss, style="line" if window == 1 else "faint")]
    if window > 1:
        series.append(Series(f"mean of {window} steps", x, running_mean(loss, window)))
    scored = [line for line in evaluations if line.get("loss_hex") is not None]  # Some tasks have no loss.
    for index, split in enumerate(dict.fromkeys(line["split"] for line in scored)):
        points = _points([line for line in scored if line["split"] == split])
        series.append(Series(f"{split} loss", *points, color=1 + index % 4, style="dots"))
    level = None
    if vocabulary is not None:
        level = math.log(vocabulary), f"uniform guess, ln {vocabulary:,} = {math.log(vocabulary):.2f}"
    chart = LineChart(title=title, unit=unit, x_label="step", series=series, level=level)
    try:
        save_png(chart.plot, picture, inches=(10, 5.625), dpi=160)
    except ModuleNotFoundError as error:
        return f"{picture.name} not drawn: {error}"
    return f"{what} curve: {picture}"


def _points(lines: list[dict[str, Any]]) -> tuple[np.ndarray, np.ndarray]:
    """Steps and losses, float64 [N] each; a non-finite loss is nan and leaves a gap in the curve."""
    values = [(line["step"], math.nan if line["loss"] is None else line["loss"]) for line in lines]
    x, y = np.asarray(values, np.float64).T
    return x, y


def running_mean(values: np.ndarray, window: int) -> np.ndarray:
    """Mean of the finite values among the last `window` values, [N] -> [N]; nan where none is finite."""
    finite = np.isfinite(values)
    total = np.cumsum(np.where(finite, values, 0.0))
    number = np.cumsum(finite)
    total[window:] -= total[:-window].copy()
    number[window:] -= number[:-window].copy()
    return np.divide(total, number, out=np.full(len(values), np.nan), where=number > 0)


COLUMNS = 400
"""Maximum number of columns of a heat map over steps."""


@dataclass(frozen=True, slots=True)
class LayerHistory:
    """Per-layer metrics of a run."""

    layers: tuple[str, ...] = ()
    """[L]."""
    steps: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))
    """int64 [N]."""
    values: Mapping[str, np.ndarray] = field(default_factory=dict)
    """Name -> float32 [N, L]; nan where unknown."""
    lists: Mapping[str, tuple[tuple[str, ...], np.ndarray]] = field(default_factory=dict)
    """Name -> the layers that report the list, and its values float64 [L, K] in the last line of layers.jsonl."""
    lists_step: int = 0
    """The step of that line."""

    def heat_maps(self) -> Iterator[HeatMap]:
        """Metrics over steps, except constant ones; then the last lists, each divided by its layer's mean."""
        for name, values in self.values.items():
            finite = values[np.isfinite(values)]
            if finite.size and finite.min() < finite.max():
                yield self._over_steps(name, values)
        for name, (layers, values) in self.lists.items():
            means = values.mean(-1, keepdims=True)
            shares = np.divide(values, means, out=np.full_like(values, np.nan), where=means != 0)
            title, part = f"{_title(name)} over their mean, step {self.lists_step:,}", name.split("_")[0]
            yield HeatMap(title=title, rows=layers, values=shares.tolist(), x_label=part, y_label="layer", middle=1.0)

    def _over_steps(self, name: str, values: np.ndarray) -> HeatMap:
        """A column has the maximum of each layer over one or several consecutive steps."""
        count = min(len(values), COLUMNS)
        starts = np.arange(count) * len(values) // count
        maxima = np.fmax.reduceat(values, starts, axis=0).T
        return HeatMap(
            title=_title(name),
            rows=self.layers,
            values=maxima.astype(float).tolist(),
            x_label="step",
            y_label="layer",
            first=float(self.steps[0]) - 0.5,
            last=float(self.steps[-1]) + 0.5,
        )


@dataclass
class LayerColumns:
    """Collects the numbers per layer from lines of metrics.jsonl."""

    layers: list[Any] = field(default_factory=list)
    steps: array = field(default_factory=lambda: array("q"))
    columns: dict[str, array] = field(default_factory=dict)
    """Flat [N, L]."""

    def add(self, line: Mapping[str, Any]) -> None:
        """Add a line. Lines without per-layer numbers are ignored; a line with other layers discards those before."""
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
        """The history, with the last line of layers.jsonl if that file exists."""
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
    for line in read_lines(path, METRICS, faults=[]):
        last = line
    if last is None:
        return 0, {}
    return last["step"], dict(_lists(last, last.get("layers", [])))


def _lists(line: Mapping[str, Any], layers: Sequence[Any]) -> Iterator[tuple[str, tuple[tuple[str, ...], np.ndarray]]]:
    """Lists of all layers as arrays. Lists of another length than the first are dropped: rows have one length."""
    for name, rows in line.items():
        if name in ("step", "layers"):
            continue
        pairs = [(str(layer), row) for layer, row in zip(layers, rows, strict=True) if row is not None]
        pairs = [(layer, row) for layer, row in pairs if len(row) == len(pairs[0][1])]
        if pairs:
            yield name, (tuple(layer for layer, _ in pairs), np.asarray([row for _, row in pairs], np.float64))


def plot_layers(metrics: Path, layers_file: Path, picture: Path) -> str:
    """Draw the first per-layer metric over steps, and the last lists, into a PNG -> a line for the terminal.

    "" if nothing varies, or without matplotlib.
    """
    columns = LayerColumns()
    for line in read_metrics(metrics)[0]:
        columns.add(line)
    maps = [*columns.history(layers_file).heat_maps()]
    drawn_maps = [heat_map for heat_map in maps if heat_map.last is not None][:1] + [
        heat_map for heat_map in maps if heat_map.last is None
    ]
    if not drawn_maps:
        return ""

    def draw(axes: Any) -> None:
        for heat_map, panel in zip(drawn_maps, axes if len(drawn_maps) > 1 else [axes], strict=True):
            heat_map.plot(panel)

    try:
        save_png(draw, picture, inches=(12, 5 * len(drawn_maps)), dpi=120, panels=len(drawn_maps))
    except ModuleNotFoundError:
        return ""
    return f"layers: {picture}"


def _title(name: str) -> str:
    return name.replace("_", " ")
