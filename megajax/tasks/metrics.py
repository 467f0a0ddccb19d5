"""Metrics of predictions: numpy arrays [N] of what was predicted and of what is right."""

import numpy as np


def f1(predicted: np.ndarray, right: np.ndarray, positive: int = 1) -> float:
    """Harmonic mean of precision and recall of the class `positive`; 0 where nothing is predicted rightly as it."""
    both = np.sum((predicted == positive) & (right == positive))
    either = np.sum(predicted == positive) + np.sum(right == positive)
    return float(2 * both / either) if either else 0.0


def matthews(predicted: np.ndarray, right: np.ndarray) -> float:
    """Correlation of two classes 0 and 1 (Matthews 1975); 0 where only one class is predicted or right."""
    x, y = predicted.astype(np.float64), right.astype(np.float64)
    spread = x.std() * y.std()
    return float(np.mean((x - x.mean()) * (y - y.mean())) / spread) if spread else 0.0


def pearson(predicted: np.ndarray, right: np.ndarray) -> float:
    """Linear correlation; nan where one of both is constant."""
    x, y = (each.astype(np.float64) - each.astype(np.float64).mean() for each in (predicted, right))
    spread = np.sqrt(np.sum(x * x) * np.sum(y * y))
    return float(np.sum(x * y) / spread) if spread else float("nan")


def spearman(predicted: np.ndarray, right: np.ndarray) -> float:
    """Linear correlation of ranks; equal values share the mean of their ranks."""
    return pearson(_ranks(predicted), _ranks(right))


def _ranks(values: np.ndarray) -> np.ndarray:
    _, place, counts = np.unique(values, return_inverse=True, return_counts=True)
    last = np.cumsum(counts)
    return (last - (counts - 1) / 2)[place]
