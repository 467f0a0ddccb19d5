"""Means over scored items with their standard errors, and metrics of predictions: numpy arrays [N] and their labels."""

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

LARGEST_EXPONENT = 700.0
"""exp overflows above this."""


class Figure(NamedTuple):
    """A result of a task."""

    value: float
    error: float | None = None
    """Standard error; None if it has none."""
    count: int | None = None
    """Number of items in the mean."""


type Figures = Mapping[str, Figure]
"""Results by name. `loss` is a mean in nats per token."""


def ratio(sums: Sequence[float], counts: Sequence[float]) -> Figure:
    """sum(sums) / sum(counts), such as a loss over windows of tokens.

    The standard error is that of a ratio estimator with items as clusters (Cochran 1977, chapter 6); None for one item.
    The count is sum(counts).
    """
    x, n = np.asarray(sums, np.float64), np.asarray(counts, np.float64)
    total = n.sum()
    if not total:
        return Figure(math.nan, None, 0)
    value = float(x.sum() / total)
    if len(x) < 2:
        return Figure(value, None, int(total))
    error = math.sqrt(float(np.square(x - value * n).sum()) * len(x) / (len(x) - 1)) / total
    return Figure(value, float(error), int(total))


def mean(values: Sequence[float]) -> Figure:
    """The mean, and its standard error from the sample's variance; None for one value."""
    return ratio(values, [1.0] * len(values))


def exponential(figure: Figure, factor: float = 1.0) -> Figure:
    """exp(factor * value), such as a perplexity; its error to first order."""
    power = figure.value * factor
    value = math.exp(power) if power < LARGEST_EXPONENT else math.inf
    error = None if figure.error is None else value * figure.error * factor
    return Figure(value, error, figure.count)


def scaled(figure: Figure, factor: float, count: int | None = None) -> Figure:
    """The figure in another unit. count: the number of those units, by default unchanged."""
    error = None if figure.error is None else figure.error * factor
    return Figure(figure.value * factor, error, figure.count if count is None else count)


def f1(predicted: np.ndarray, labels: np.ndarray, positive: int = 1) -> float:
    """Harmonic mean of precision and recall of the class `positive`; 0 without true positives."""
    true_positives = np.sum((predicted == positive) & (labels == positive))
    positives = np.sum(predicted == positive) + np.sum(labels == positive)
    return float(2 * true_positives / positives) if positives else 0.0


def matthews(predicted: np.ndarray, labels: np.ndarray) -> float:
    """Correlation of two classes 0 and 1 (Matthews 1975); 0 if all predictions or all labels are equal."""
    x, y = predicted.astype(np.float64), labels.astype(np.float64)
    deviations = x.std() * y.std()
    return float(np.mean((x - x.mean()) * (y - y.mean())) / deviations) if deviations else 0.0


def pearson(predicted: np.ndarray, labels: np.ndarray) -> float:
    """Linear correlation; nan if an argument is constant."""
    x, y = (values.astype(np.float64) - values.astype(np.float64).mean() for values in (predicted, labels))
    norms = np.sqrt(np.sum(x * x) * np.sum(y * y))
    return float(np.sum(x * y) / norms) if norms else float("nan")


def spearman(predicted: np.ndarray, labels: np.ndarray) -> float:
    """Linear correlation of ranks; equal values share the mean of their ranks."""
    return pearson(_ranks(predicted), _ranks(labels))


def _ranks(values: np.ndarray) -> np.ndarray:
    _, place, counts = np.unique(values, return_inverse=True, return_counts=True)
    last = np.cumsum(counts)
    return (last - (counts - 1) / 2)[place]
