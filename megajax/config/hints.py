"""Nearest names and divisors, and other hints."""

import re
from collections.abc import Iterable, Sequence
from difflib import SequenceMatcher
from fnmatch import fnmatchcase
from math import isqrt
from pathlib import Path

from megajax.config.errors import UserError

MOST_TO_DIVIDE = 2**40
"""Larger numbers, which no model has, get only 1 and themselves as divisors."""

LOCAL_FOLDERS = ("runs", "configs", "data", "models", "checkpoints", "out", "outputs")
"""Usual names of local folders, which no owner of models on the Hugging Face Hub has."""


def divisors_of(n: int) -> list[int]:
    """All divisors of n (>= 1), ascending."""
    if n < 1:
        raise ValueError(f"divisors of {n}: n must be at least 1")
    if n > MOST_TO_DIVIDE:
        return [1, n]
    small = [d for d in range(1, isqrt(n) + 1) if n % d == 0]
    return sorted({*small, *(n // d for d in small)})


def nearest_divisors(n: int, target: int) -> list[int]:
    """The nearest divisors of n (>= 1) below and above the target: 768 and 7 -> [6, 8]; [target] if it divides n."""
    divisors = divisors_of(n)
    if target in divisors:
        return [target]
    below = [d for d in divisors if d < target]
    above = [d for d in divisors if d > target]
    return below[-1:] + above[:1]


def nearest_names(name: str, choices: Iterable[str], at_most: int = 3) -> list[str]:
    """The choices most similar to `name`, best first; only those nearly as good as the best one."""
    scored = [(likeness(name, choice), choice) for choice in dict.fromkeys(choices)]
    scored = sorted((entry for entry in scored if entry[0] >= 0.65), key=lambda entry: -entry[0])
    return [choice for score, choice in scored[:at_most] if score >= scored[0][0] - 0.1]


def likeness(name: str, choice: str) -> float:
    """From 0 to 1 for equal names; dotted names also match by their last part."""
    name, choice = name.lower().replace("-", "_"), choice.lower()
    leaf, end = name.rpartition(".")[2], choice.rpartition(".")[2]
    full_score, leaf_score = _ratio(name, choice), _ratio(leaf, end)
    part_score = 0.75 * (set(end.split("_")) < set(leaf.split("_")))  # grad_clip: there is a clip
    # A match of the last part under a wrong parent is a good guess, but never as good as a full match.
    return max(full_score, 0.9 * leaf_score + 0.1 * full_score, part_score)


def did_you_mean(name: str, choices: Iterable[str]) -> str:
    """A hint such as "did you mean parallel.tensor?", or "" if no choice is similar."""
    names = nearest_names(name, choices)
    return f"did you mean {either(names)}?" if names else ""


def either(names: Iterable[str]) -> str:
    """Join names as "a, b or c"."""
    *first, last = names
    return f"{', '.join(first)} or {last}" if first else last


def listed(names: Sequence[str], most: int = 8) -> str:
    """The first names, and the number of others."""
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def below(title: str, lines: Iterable[object], most: int = 40) -> str:
    """A title and the first lines below it, indented, and the number of others."""
    texts = [line for entry in lines for line in str(entry).splitlines()]
    return "\n  ".join([title, *texts[:most], *[f"and {len(texts) - most} more"] * (len(texts) > most)])


def matching(setting: str, pattern: str, names: Iterable[str], kind: str = "weight") -> list[str]:
    """The names that match a pattern, in which * matches any text.

    setting: the one with the pattern; kind: of the names. Raises UserError with the nearest names if none matches.
    """
    names = list(names)
    if matched := [name for name in names if fnmatchcase(name, pattern)]:
        return matched
    similar = nearest_names(pattern.replace("*", ""), names) or names[:3]
    hint = f": did you mean {either(similar)}? " if similar else ". "
    raise UserError(f"{setting}={pattern} matches no {kind} of the model{hint}* stands for any text, including dots")


def download_folder(name: str) -> str:
    """A folder for the model org/model of the Hugging Face Hub; "" if the name can't be one, or is a folder here."""
    model = re.fullmatch(r"[A-Za-z0-9][\w-]*/([A-Za-z0-9][\w.-]*)", name)
    is_local = model is None or Path(name).parent.exists() or name.split("/")[0] in LOCAL_FOLDERS
    return "" if is_local else f"models/{model[1]}"


def download_hint(name: str, use: str = "give {} instead") -> str:
    """How to download the model org/model; "" if the name is a folder, or no name of the Hugging Face Hub.

    use: what to do with the folder, in place of {}.
    """
    folder = download_folder(name)
    text = f"nothing is downloaded here: run hf download {name} --local-dir {folder}, then {use.format(folder)}"
    return text if folder else ""


def _ratio(a: str, b: str) -> float:
    matcher = SequenceMatcher(None, a, b, autojunk=False)
    return matcher.ratio() if matcher.quick_ratio() >= 0.5 else 0.0
