"""The loss curve of a run as a picture, drawn from its metrics.jsonl alone."""

import importlib
import math
from pathlib import Path
from typing import Any

import numpy as np

from megajax.config.missing import install
from megajax.metrics.record import read_metrics


def plot_loss(metrics: Path, picture: Path, *, title: str, vocabulary: int | None = None) -> str:
    """Draw `metrics` (a metrics.jsonl) into `picture` (a PNG, 1600 x 900) and say so in a line for the terminal.

    With `vocabulary`, the number of tokens V a model chooses from, the loss ln V of a uniform guess is drawn too: where
    an untrained model starts. Without matplotlib, or without a step to draw, the line says why there is no picture.
    """
    steps, evaluations = read_metrics(metrics)
    if not steps:
        return f"{picture.name} not drawn: {metrics} has no steps"
    try:
        figures = importlib.import_module("matplotlib.figure")
    except ModuleNotFoundError as error:
        if error.name != "matplotlib":
            raise
        return f"{picture.name} not drawn: matplotlib is not installed ({install('plot')})"
    # A bare Figure: pyplot would keep it, and look for a display.
    figure = figures.Figure(figsize=(10, 5.625), dpi=160, layout="constrained")
    axes = figure.add_subplot()
    _draw(axes, steps, evaluations, vocabulary)
    axes.set_title(title)
    temporary = picture.with_name(f".{picture.name}.tmp")
    figure.savefig(temporary, format="png")
    temporary.replace(picture)
    return f"loss curve: {picture}"


def _draw(axes: Any, steps: list[dict[str, Any]], evaluations: list[dict[str, Any]], vocabulary: int | None) -> None:
    x, loss = _points(steps)
    window = max(1, len(loss) // 50)
    dots = "." if len(loss) < 30 else None
    alpha = 0.45 if window > 1 else 1.0
    axes.plot(x, loss, color="tab:blue", linewidth=0.7, alpha=alpha, marker=dots, label="train loss")
    if window > 1:
        axes.plot(x, running_mean(loss, window), color="tab:blue", linewidth=1.8, label=f"mean of {window} steps")
    for index, split in enumerate(dict.fromkeys(line["split"] for line in evaluations)):
        at, value = _points([line for line in evaluations if line["split"] == split])
        color = ("tab:orange", "tab:green", "tab:purple", "tab:red")[index % 4]
        axes.plot(at, value, color=color, marker="o", markersize=4, linewidth=1.2, label=f"{split} loss")
    if vocabulary is not None:
        start = math.log(vocabulary)
        axes.axhline(
            start, color="gray", linestyle=":", linewidth=1.2, label=f"uniform guess, ln {vocabulary:,} = {start:.2f}"
        )
    axes.set_xlabel("step")
    axes.set_ylabel("loss, nats per token")
    axes.margins(x=0.01)
    axes.grid(alpha=0.25)
    axes.legend(frameon=False)


def _points(lines: list[dict[str, Any]]) -> tuple[np.ndarray, np.ndarray]:
    """Steps and losses, float64 [N] each; a loss that was not finite is nan and leaves a gap."""
    values = [(line["step"], math.nan if line["loss"] is None else line["loss"]) for line in lines]
    x, y = np.asarray(values, np.float64).T
    return x, y


def running_mean(values: np.ndarray, window: int) -> np.ndarray:
    """Mean over the last `window` finite values up to each one, [N] -> [N]; nan where none of them is finite."""
    finite = np.isfinite(values)
    total = np.cumsum(np.where(finite, values, 0.0))
    number = np.cumsum(finite)
    total[window:] -= total[:-window].copy()
    number[window:] -= number[:-window].copy()
    return np.divide(total, number, out=np.full(len(values), np.nan), where=number > 0)
