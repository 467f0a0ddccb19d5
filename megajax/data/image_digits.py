"""The handwritten digits that scikit-learn ships (Alpaydin and Kaynak 1998), as images with classes."""

import importlib
from typing import Any, NamedTuple

import numpy as np

from megajax.batch import Schema
from megajax.config.errors import UserError
from megajax.data.config import DigitsConfig
from megajax.data.image_decoding import MadePicture, Picture
from megajax.data.item_rows import groups_of, split_rows
from megajax.data.labelled_images import class_rows, demand_classes
from megajax.data.splits import Rows, Splits

NAMES = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
SPLIT = "80,10,10"
"""Shares of each digit for training, validation and test."""
BRIGHTEST = 16
"""Values go from 0 to this."""


class Digits(NamedTuple):
    """Images and what they show."""

    images: np.ndarray
    """uint8 [n, 8, 8, 3], white on black."""
    labels: np.ndarray
    """int64 [n], 0 to 9."""


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
        self.digits = digits

    def __len__(self) -> int:
        return len(self.digits.labels)

    def name(self, item: int) -> str:
        """What it is called in messages."""
        return f"digit {item}"

    def picture(self, item: int) -> Picture:
        """The image, 8x8."""
        return MadePicture(self.digits.images[item])

    def label(self, item: int) -> int:
        """The digit."""
        return int(self.digits.labels[item])

    def groups(self) -> list[np.ndarray]:
        """The images of each digit."""
        return groups_of(self.digits.labels)

    def subset(self, chosen: np.ndarray) -> "DigitImages":
        """Only these images."""
        return DigitImages(Digits(self.digits.images[chosen], self.digits.labels[chosen]))


def build_digits(config: DigitsConfig, *, tokenizer: Any, schema: Schema, rows: Rows, seed: int) -> Splits:
    """Rows of digits for the splits that a run requests; see `ClassRows`."""
    del tokenizer
    demand_classes(len(NAMES), schema, "the handwritten digits")
    return split_rows(DigitImages(load_digits()), SPLIT, rows, class_rows(config, schema, seed), "the digits")
