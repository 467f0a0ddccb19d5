"""The smallest task with answers that can be checked: sums of two digits."""

from collections.abc import Mapping
from typing import Any

LARGEST = 4
"""So that sums have one digit."""


def lines() -> list[dict[str, Any]]:
    """The 25 prompts, such as "1+3=" with the sum "4"."""
    digits = range(LARGEST + 1)
    return [{"prompt": f"{a}+{b}=", "sum": str(a + b)} for a in digits for b in digits]


def reward(prompt: str, answer: str, row: Mapping[str, Any]) -> float:
    """1 for the sum, 0.1 for another digit, else 0."""
    del prompt
    return 1.0 if answer == row["sum"] else 0.1 if len(answer) == 1 and answer.isdigit() else 0.0
