"""The loss curve of a run as a picture, drawn from its metrics.jsonl alone."""

import math
from pathlib import Path
from typing import Any

import numpy as np

from megajax.display.charts import LineChart, Series, save_png
from megajax.metrics.record import read_metrics


def plot_loss(metrics: Path, picture: Path, *, title: str, vocabulary: int | None = None) -> str:
    """Draw `metrics` (a metrics.jsonl) into `picture` (a PNG, 1600 x 900) -> a line for the terminal.

    With `vocabulary`, the number V of tokens, also draws ln V: the loss of a uniform guess, where an untrained model
    starts. Without matplotlib or any step, the line tells why nothing was drawn.
    """
    steps, evaluations = read_metrics(metrics)
    if not steps:
        return f"{picture.name} not drawn: {metrics} has no steps"
    x, loss = _points(steps)
    window = max(1, len(loss) // 50)
    series = [Series("train loss", x, loss, style="line" if window == 1 else "faint")]
    if window > 1:
        series.append(Series(f"mean of {window} steps", x, running_mean(loss, window)))
    scored = [line for line in evaluations if line.get("loss_hex") is not None]  # Some tasks have no loss.
    for index, split in enumerate(dict.fromkeys(line["split"] for line in scored)):
        points = _points([line for line in scored if line["split"] == split])
        series.append(Series(f"{split} loss", *points, color=1 + index % 4, style="dots"))
    level = None
    if vocabulary is not None:
        level = math.log(vocabulary), f"uniform guess, ln {vocabulary:,} = {math.log(vocabulary):.2f}"
    chart = LineChart(title=title, unit="loss, nats per token", x_label="step", series=series, level=level)
    try:
        save_png(chart.plot, picture, inches=(10, 5.625), dpi=160)
    except ModuleNotFoundError as error:
        return f"{picture.name} not drawn: {error}"
    return f"loss curve: {picture}"


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
