"""The training, validation and test splits of a corpus, and the number of rows of each that a run needs."""

import re
from collections.abc import Callable, Iterable
from math import inf
from typing import Any, NamedTuple

from megajax.config.errors import UserError

type Range = tuple[float, float]

NAMES = ("train", "valid", "test")


class Rows(NamedTuple):
    """Number of rows that a run requests of each split: None is one epoch, 0 is no split.

    Example: `mj.Rows(10_000, 100)`
    """

    train: int | None
    valid: int | None = 0
    test: int | None = 0


class Splits[S](NamedTuple):
    """Row sources (`len`, `[i]` -> dict of numpy arrays [S]); None for splits that are not requested.

    Example: `mj.Splits(train=rows, valid=None, test=None)`
    """

    train: S
    valid: S
    test: S

    @classmethod
    def build(cls, rows: Rows, make: Callable[[int, str, int | None], Any]) -> "Splits":
        """The splits that a run requests. make: (position, name, rows) -> the row source, or None if it has none."""
        requests = enumerate(zip(NAMES, rows, strict=True))
        return cls(*(make(place, *split) if split[1] is None or split[1] > 0 else None for place, split in requests))


class EvaluationSchedule(NamedTuple):
    """The evaluations of a run: every `every` steps, `batches` batches of `size` rows."""

    every: int
    batches: int
    size: int
    start: int = 0
    """No evaluation before this step."""


def requested_rows(
    *, steps: int, global_size: int, evaluation: EvaluationSchedule | None, rows: int | None = None
) -> Rows:
    """Number of rows that a run of `steps` steps reads: `rows` or steps · global_size, plus those of its evaluations.

    Validation is read once every `evaluation.every` steps and once more at the end, the test set once.
    """
    train = steps * global_size if rows is None else rows
    if evaluation is None:
        return Rows(train)
    rows_each = evaluation.batches * evaluation.size
    times = steps // evaluation.every + 1 - evaluation.start // evaluation.every
    return Rows(train, times * rows_each, rows_each)


def _is_number(item: object) -> bool:
    try:
        float(str(item))
    except ValueError:
        return False
    return True


def parse_paths(items: Iterable[object]) -> tuple[tuple[str, ...], tuple[float, ...] | None]:
    """("0.3", "a", "0.7", "b") -> (("a", "b"), (0.3, 0.7)); ("a", "b") -> (("a", "b"), None).

    There are no weights if the number of items is odd, or if any item at an even position (0, 2, …) is not a number.

    Raises:
        UserError: no path, or a weight that is not positive.
    """
    items = tuple(str(item) for item in items)
    if not items:
        raise UserError("no data path given: set data.paths to prefixes (PREFIX for PREFIX.bin and PREFIX.idx).")
    if len(items) % 2 or not all(_is_number(item) for item in items[::2]):
        return items, None
    weights = tuple(float(item) for item in items[::2])
    for weight, prefix in zip(weights, items[1::2], strict=True):
        if not 0 < weight < float("inf"):
            raise UserError(f"data weight of {prefix}: expected a number above 0, found {weight}. Leave the path out.")
    return items[1::2], weights


def parse_split(text: str) -> tuple[Range | None, Range | None, Range | None]:
    """ "969,30,1" -> the ranges (low, high) of train, valid and test in the corpus, from 0 to 1.

    Missing numbers are zero, and the sum is scaled to 1. A share of 0 is None.

    Raises:
        UserError: no number, a malformed, negative or infinite one, more than three, or all zero.
    """
    items = re.split(r"[\s,/;:]+", text.strip(" ,"))
    numbers = [float(item) for item in items if _is_number(item)]
    if len(numbers) != len(items) or len(numbers) > 3 or not 0 < sum(numbers) < inf or min(numbers) < 0:
        raise UserError(
            f"split {text!r}: expected one to three numbers from 0 up, separated by commas and not all zero, such as "
            '"969,30,1".'
        )
    numbers += [0.0] * (3 - len(numbers))
    total = numbers[0] + numbers[1] + numbers[2]
    low, ranges = 0.0, []
    for number in numbers:
        high = low + number / total
        ranges.append((low, high) if high > low else None)
        low = high
    return ranges[0], ranges[1], ranges[2]


def config_paths(config: Any, split: str) -> tuple[str, ...]:
    """The separate files of a split in a data config. Raises UserError if there are none for training."""
    paths = getattr(config, f"{split}_paths")
    if not paths and split == "train":
        raise UserError("data.train_paths is empty: there is nothing to train on.")
    return paths


def split_bounds(share: Range | None, count: int) -> tuple[int, int]:
    """Share of `count` sequences -> [first, last) sequence number; halves round to the even number."""
    if share is None:
        return 0, 0
    return round(share[0] * float(count)), round(share[1] * float(count))
