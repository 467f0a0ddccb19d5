"""Nearest names and divisors, for hints."""

from collections.abc import Iterable, Sequence
from difflib import SequenceMatcher
from fnmatch import fnmatchcase
from math import isqrt

from megajax.config.errors import UserError

MOST_TO_DIVIDE = 2**40
"""For larger numbers only 1 and the number itself are returned; sizes of models are smaller."""


def divisors_of(n: int) -> list[int]:
    """All divisors of n (>= 1), ascending."""
    if n < 1:
        raise ValueError(f"divisors of {n}: n must be at least 1")
    if n > MOST_TO_DIVIDE:
        return [1, n]
    small = [d for d in range(1, isqrt(n) + 1) if n % d == 0]
    return sorted({*small, *(n // d for d in small)})


def nearest_divisors(n: int, near: int) -> list[int]:
    """The divisors of n (>= 1) on both sides of `near`, ascending: 768 and 7 -> [6, 8]; [near] where it divides n."""
    divisors = divisors_of(n)
    if near in divisors:
        return [near]
    below = [d for d in divisors if d < near]
    above = [d for d in divisors if d > near]
    return below[-1:] + above[:1]


def nearest_names(name: str, choices: Iterable[str], at_most: int = 3) -> list[str]:
    """The choices most like `name`, best first; dotted choices also match by their last part alone.

    Only choices nearly as good as the best one are returned.
    """
    wanted = name.lower().replace("-", "_")
    leaf = wanted.rpartition(".")[2]
    scored = []
    for choice in dict.fromkeys(choices):
        end = choice.lower().rpartition(".")[2]
        whole, last = _likeness(wanted, choice.lower()), _likeness(leaf, end)
        among = 0.75 * (set(end.split("_")) < set(leaf.split("_")))  # grad_clip: there is a clip
        # The right last part under a wrong parent is a good guess, never as good as a match of the whole.
        scored.append((max(whole, 0.9 * last + 0.1 * whole, among), choice))
    scored = sorted((entry for entry in scored if entry[0] >= 0.65), key=lambda entry: -entry[0])
    return [choice for score, choice in scored[:at_most] if score >= scored[0][0] - 0.1]


def did_you_mean(name: str, choices: Iterable[str]) -> str:
    """A hint such as "did you mean parallel.tensor?", or "" where nothing is near."""
    names = nearest_names(name, choices)
    return f"did you mean {either(names)}?" if names else ""


def either(names: Iterable[str]) -> str:
    """a, b or c."""
    *first, last = names
    return f"{', '.join(first)} or {last}" if first else last


def listed(names: Sequence[str], most: int = 8) -> str:
    """The first names, and how many more there are."""
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def matching(setting: str, pattern: str, names: Iterable[str], what: str = "weight") -> list[str]:
    """The names that match a pattern, in which * stands for any text.

    Raises UserError where none does, with the nearest names. setting: where the pattern is; what: the names are of.
    """
    names = list(names)
    if matched := [name for name in names if fnmatchcase(name, pattern)]:
        return matched
    near = nearest_names(pattern.replace("*", ""), names) or names[:3]
    hint = f": did you mean {either(near)}? " if near else ". "
    raise UserError(f"{setting}={pattern} matches no {what} of the model{hint}* stands for any text, dots included")


def _likeness(a: str, b: str) -> float:
    matcher = SequenceMatcher(None, a, b, autojunk=False)
    return matcher.ratio() if matcher.quick_ratio() >= 0.5 else 0.0
