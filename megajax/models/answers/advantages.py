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
        return _standardised(total_reward(columns, weights))
    return np.nan_to_num(_relative(total_reward(rewards, weights), size, scale), nan=0.0)


def total_reward(rewards: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """Weighted sums of rewards [N, F] over the functions with a score [N]; NaN for an answer without any."""
    return np.where(np.isnan(rewards).all(1), np.nan, np.nansum(rewards * weights, axis=1))


def leave_one_out(
    rewards: np.ndarray,
    size: int,
    *,
    clip: tuple[float, float] | None = None,
    penalty: np.ndarray | float = 0.0,
    normalised: bool = False,
) -> np.ndarray:
    """Advantages over the mean of the other answers of the group, float64 [N] (Ahmadian et al. 2024, RLOO).

    rewards: [N]; an answer with NaN is not part of the means and has advantage 0. clip: limits of rewards; penalty:
    subtracted after that, such as beta times an estimate of the KL divergence [N]; normalised: over the batch, to mean
    0 and standard deviation 1.
    """
    rewards = np.asarray(rewards, np.float64)
    rewards = (rewards if clip is None else np.clip(rewards, *clip)) - penalty
    groups = rewards.reshape(-1, size)
    counts = (~np.isnan(groups)).sum(1, keepdims=True)
    others = (np.nansum(groups, axis=1, keepdims=True) - groups) / np.maximum(counts - 1, 1)
    advantages = np.where(counts > 1, groups - others, groups * 0).reshape(-1)
    return _standardised(advantages) if normalised else np.nan_to_num(advantages, nan=0.0)


def _standardised(values: np.ndarray) -> np.ndarray:
    """Values with mean 0 and standard deviation 1; 0 for NaN, which is not part of either."""
    return np.nan_to_num((values - np.nanmean(values)) / (_deviation(values) + SMALL), nan=0.0)


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
