"""The handwritten digits that scikit-learn ships (Alpaydin and Kaynak 1998), as images with classes."""

import importlib
from typing import Any, NamedTuple

import numpy as np

from megajax.batch import Schema
from megajax.config.errors import UserError
from megajax.data.images.config import DigitCaptionsConfig, DigitsConfig
from megajax.data.images.decoding import ArrayPicture, Picture
from megajax.data.images.image_text import Sample, caption_sample, image_text_rows
from megajax.data.images.labelled import class_rows, demand_classes
from megajax.data.rows.shuffled_items import items_by_label, splits_from_shares
from megajax.data.rows.splits import Rows, Splits

NAMES = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
SPLIT = "80,10,10"
"""Shares of each digit for training, validation and test."""
BRIGHTEST = 16
"""Maximum value of a pixel."""


class Digits(NamedTuple):
    """Images with labels."""

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
    loaded = datasets.load_digits()
    grey = np.rint(loaded.images * (255 / BRIGHTEST)).astype(np.uint8)
    return Digits(np.repeat(grey[..., None], 3, axis=-1), loaded.target.astype(np.int64))


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
        return ArrayPicture(self.digits.images[item])

    def label(self, item: int) -> int:
        """The digit."""
        return int(self.digits.labels[item])

    def groups(self) -> list[np.ndarray]:
        """The images of each digit."""
        return items_by_label(self.digits.labels)

    def subset(self, items: np.ndarray) -> "DigitImages":
        """Only these images."""
        return DigitImages(Digits(self.digits.images[items], self.digits.labels[items]))


DIGIT_TEXTS = ("the digit {}", "a handwritten {}", "this is a {}", "the number {}")
NUMBER_TEXTS = ("the digits {}", "from left to right {}", "the numbers {}")
"""Phrasings of captions; {} are the digits in words."""


class DigitCaptions:
    """Captions for one or more digits, each an image. Row i has digit i, and possibly random others after it."""

    def __init__(self, images: DigitImages, config: DigitCaptionsConfig):
        self._images, self._config = images, config

    def __len__(self) -> int:
        return len(self._images)

    def name(self, item: int) -> str:
        """What it is called in messages."""
        return self._images.name(item)

    def groups(self) -> list[np.ndarray]:
        """The captions that begin with the same digit."""
        return self._images.groups()

    def subset(self, items: np.ndarray) -> "DigitCaptions":
        """Only these captions."""
        return DigitCaptions(self._images.subset(items), self._config)

    def samples(self, item: int, generator: np.random.Generator) -> list[Sample]:
        """The images and their caption."""
        count = int(generator.integers(1, self._config.digits + 1))
        digits = [item, *generator.integers(len(self), size=count - 1).tolist()]
        names = [NAMES[self._images.label(digit)] for digit in digits]
        phrasings = (DIGIT_TEXTS if count == 1 else NUMBER_TEXTS)[: self._config.phrasings]
        listed = " and ".join([", ".join(names[:-1]), names[-1]] if count > 1 else names)
        caption = phrasings[int(generator.integers(len(phrasings)))].format(listed)
        pictures = [self._images.picture(digit) for digit in digits]
        return [caption_sample(pictures, self._config.prompt, caption)]


def build_captions(config: DigitCaptionsConfig, *, tokenizer: Any, schema: Schema, rows: Rows, seed: int) -> Splits:
    """Rows of digits with captions for the splits that a run requests; see `ImageTextRows`.

    Raises UserError: more digits than the model's rows have slots for.
    """
    make = image_text_rows(config, tokenizer=tokenizer, schema=schema, seed=seed, augment=config.augment)
    slots = (schema.get("grids") or schema["images"]).shape[0]
    if config.digits > slots:
        raise UserError(f"data.digits={config.digits}, and the model's rows have {slots} slots for images.")
    captions = DigitCaptions(DigitImages(load_digits()), config)
    return splits_from_shares(captions, SPLIT, rows, make, "the digits")


def build_digits(config: DigitsConfig, *, tokenizer: Any, schema: Schema, rows: Rows, seed: int) -> Splits:
    """Rows of digits for the splits that a run requests; see `ClassRows`."""
    del tokenizer
    demand_classes(len(NAMES), schema, "the handwritten digits")
    return splits_from_shares(DigitImages(load_digits()), SPLIT, rows, class_rows(config, schema, seed), "the digits")
