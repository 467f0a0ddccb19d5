"""Metrics of predictions: numpy arrays [N] of predictions and labels."""

import numpy as np


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
