"""Advantages of answers in groups, from their rewards; numpy.

N answers in groups of n consecutive ones to the same prompt, F reward functions.
"""

import warnings
from typing import Literal

import numpy as np

SMALL = 1e-4
"""Added to standard deviations."""


def group_advantages(
    rewards: np.ndarray,
    weights: np.ndarray,
    size: int,
    *,
    scale: Literal["group", "batch", "none"] = "group",
    aggregation: Literal["sum_then_normalize", "normalize_then_sum"] = "sum_then_normalize",
) -> np.ndarray:
    """Advantages relative to the group, float64 [N] (Shao et al. 2024, GRPO).

    rewards: [N, F], NaN where a function has no score; weights: [F]; size: n. An answer without any score is not part
    of the mean and has advantage 0. scale: divide by the standard deviation (with n - 1) of the group or of the batch,
    or not at all (Dr. GRPO). aggregation normalize_then_sum: each function is normalised within the group, and the
    weighted sum over the batch (Liu et al. 2026, GDPO).
    """
    rewards = np.asarray(rewards, np.float64)
    if aggregation == "normalize_then_sum":
        columns = np.stack([_relative(column, size, "group") for column in rewards.T], axis=1)
        total = total_reward(columns, weights)
        return np.nan_to_num((total - np.nanmean(total)) / (_deviation(total) + SMALL), nan=0.0)
    return np.nan_to_num(_relative(total_reward(rewards, weights), size, scale), nan=0.0)


def total_reward(rewards: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """Weighted sums of rewards [N, F] over the functions with a score [N]; NaN for an answer without any."""
    return np.where(np.isnan(rewards).all(1), np.nan, np.nansum(rewards * weights, axis=1))


def _relative(values: np.ndarray, size: int, scale: str) -> np.ndarray:
    """Values minus the mean of their group, NaN left out; divided by a standard deviation."""
    groups = values.reshape(-1, size)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # groups without any value
        centred = groups - np.nanmean(groups, axis=1, keepdims=True)
        deviations = {
            "group": lambda: np.array([_deviation(group) for group in groups])[:, None] + SMALL,
            "batch": lambda: _deviation(values) + SMALL,
            "none": lambda: 1.0,
        }
        return (centred / deviations[scale]()).reshape(-1)


def _deviation(values: np.ndarray) -> float:
    """Standard deviation with ddof 1 of the values that are not NaN; 0 for fewer than two."""
    known = values[~np.isnan(values)]
    return float(known.std(ddof=1)) if len(known) > 1 else 0.0
