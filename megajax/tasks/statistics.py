"""Means over scored items, and their standard errors."""

import math
from collections.abc import Sequence

import numpy as np

from megajax.training.scoring import Figure

LARGEST_EXPONENT = 700.0
"""exp overflows above this."""


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
