"""The smallest task with answers that can be checked: sums of two digits."""

from collections.abc import Mapping
from typing import Any

LARGEST = 4
"""So that sums have one digit."""


def lines() -> list[dict[str, Any]]:
    """The 25 prompts, such as "1+3=" with the sum "4"."""
    digits = range(LARGEST + 1)
    return [{"prompt": f"{a}+{b}=", "sum": str(a + b)} for a in digits for b in digits]


def close(prompt: str, answer: str, row: Mapping[str, Any]) -> float:
    """1 for the sum, 0.3 less for each 1 that another digit differs by, but at least 0.05; 0 for no digit."""
    del prompt
    is_digit = len(answer) == 1 and answer in "0123456789"
    return max(0.05, 1.0 - 0.3 * abs(int(answer) - int(row["sum"]))) if is_digit else 0.0


def right(prompt: str, answer: str, row: Mapping[str, Any]) -> float:
    """1 for the sum, else 0."""
    del prompt
    return float(answer == row["sum"])
