"""The handwritten digits that scikit-learn ships (Alpaydin and Kaynak 1998), as images with classes."""

import importlib
from typing import Any, NamedTuple

import numpy as np

from megajax.batch import Schema
from megajax.config.errors import UserError
from megajax.data.config import DigitsConfig
from megajax.data.image_decoding import MadePicture, Picture
from megajax.data.item_rows import split_items
from megajax.data.labelled_images import ClassRows, Framing, demand_classes, image_size
from megajax.data.splits import Rows, Splits, parse_split, wanted

NAMES = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
SPLIT = "80,10,10"
BRIGHTEST = 16
"""Values go from 0 to this."""


class Digits(NamedTuple):
    """Images and what they show."""

    images: np.ndarray
    """uint8 [n, 8, 8, 3], white on black."""
    labels: np.ndarray
    """int64 [n], 0 to 9."""

    def of_split(self, position: int) -> "Digits":
        """80 % of each digit for training (0), 10 % for validation (1), 10 % for test (2)."""
        groups = [np.flatnonzero(self.labels == digit) for digit in range(len(NAMES))]
        chosen = split_items(parse_split(SPLIT)[position], groups)
        return Digits(self.images[chosen], self.labels[chosen])


def load_digits() -> Digits:
    """All 1,797 digits. Raises UserError without scikit-learn."""
    try:
        datasets = importlib.import_module("sklearn.datasets")
    except ModuleNotFoundError as error:
        raise UserError(
            "the handwritten digits come with the package scikit-learn, which is not installed: "
            "uv sync, or pip install scikit-learn."
        ) from error
    found = datasets.load_digits()
    grey = np.rint(found.images * (255 / BRIGHTEST)).astype(np.uint8)
    return Digits(np.repeat(grey[..., None], 3, axis=-1), found.target.astype(np.int64))


class DigitImages:
    """Digits as images with classes."""

    classes = NAMES

    def __init__(self, digits: Digits):
        self._digits = digits

    def __len__(self) -> int:
        return len(self._digits.labels)

    def name(self, item: int) -> str:
        """What it is called in messages."""
        return f"digit {item}"

    def picture(self, item: int) -> Picture:
        """The image, 8x8."""
        return MadePicture(self._digits.images[item])

    def label(self, item: int) -> int:
        """The digit."""
        return int(self._digits.labels[item])


def build_digits(config: DigitsConfig, *, tokenizer: Any, schema: Schema, rows: Rows, seed: int) -> Splits:
    """Rows of digits for the splits that a run requests; see `ClassRows`."""
    del tokenizer
    demand_classes(len(NAMES), schema, "the handwritten digits")
    digits, built = load_digits(), [None, None, None]
    for position, _, asked in wanted(rows):
        built[position] = ClassRows(
            DigitImages(digits.of_split(position)),
            framing=Framing(
                size=image_size(schema), augment=config.augment if position == 0 else None, centre=config.centre
            ),
            mixup=None if not config.mixup else config.mixup * (position == 0),
            rows=asked,
            seed=seed if config.seed is None else config.seed,
            split=position,
            on_error=config.on_error,
        )
    return Splits(*built)
