"""Synthetic images that a model can learn, for tests and to measure speed, without files or decoding."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from megajax.batch import Schema
from megajax.config.errors import UserError
from megajax.data.images.class_and_mask_rows import COUNTS, IGNORED, image_size
from megajax.data.images.config import MockCaptionsConfig, MockImagesConfig, MockMasksConfig
from megajax.data.images.decoding import ArrayPicture
from megajax.data.images.image_text import Sample, caption_sample, image_text_rows
from megajax.data.rows.row_source import check_row, data_seed
from megajax.data.rows.shuffled_items import splits_from_items
from megajax.data.rows.splits import Rows, Splits

CLASSES = 10
"""Number of classes if the model does not specify one."""
ONE_PASS = 10_000
"""Rows of one pass."""
NOISE = 32
"""Half the range of the noise, out of 255."""


class MockRows:
    """Rows by number: row i is a pure function of (seed, split, i).

    Args:
        size: width and height.
        classes: number of classes.
    """

    def __init__(self, *, size: tuple[int, int], classes: int, rows: int | None, seed: int, split: int):
        self.size, self.classes = size, classes
        self._rows, self._seed, self._split = ONE_PASS if rows is None else rows, seed, split

    def __len__(self) -> int:
        return self._rows

    def make(self, generator: np.random.Generator) -> dict[str, np.ndarray]:
        """A row."""
        raise NotImplementedError

    def __getitem__(self, row: int) -> dict[str, np.ndarray]:
        check_row(self, row)
        return self.make(np.random.default_rng((self._seed, self._split, row)))


class Stripes(MockRows):
    """Images uint8 [H, W, 3] of grey stripes, whose direction is the class, with noise; labels int32 [].

    mixup: α of mixup; 0: images are not mixed; None: rows lack the two leaves of mixup.
    """

    def __init__(self, *, mixup: float | None, **options: Any):
        super().__init__(**options)
        self._mixup = mixup
        width, height = self.size
        across, down = np.meshgrid(np.linspace(-1, 1, width), np.linspace(-1, 1, height))
        angles = np.arange(self.classes) * (np.pi / self.classes)
        waves = [2 * (np.cos(angle) * across + np.sin(angle) * down) for angle in angles]
        self._phases = np.stack([np.floor(wave * 256).astype(np.int64).astype(np.uint8) for wave in waves])
        self._brightness = np.rint(96 + 80 * np.sin(np.arange(256) * (2 * np.pi / 256))).astype(np.uint8)

    def make(self, generator: np.random.Generator) -> dict[str, np.ndarray]:
        label, partner = generator.integers(self.classes, size=2, dtype=np.int32)
        row = {"images": self._image(label, generator), "labels": np.array(label), "loss_mask": COUNTS}
        if self._mixup is None:
            return row
        if not self._mixup:
            return row | {"other_labels": np.array(label), "mix": np.ones((), np.float32)}
        share = np.float32(generator.beta(self._mixup, self._mixup))
        mixed = share * row["images"] + (1 - share) * self._image(partner, generator)
        row["images"] = np.rint(mixed).astype(np.uint8)
        return row | {"other_labels": np.array(partner), "mix": np.array(share)}

    def _image(self, label: np.integer, generator: np.random.Generator) -> np.ndarray:
        """Computed in 8-bit integers: an image of 224 x 224 takes a fraction of a millisecond."""
        start = generator.integers(256, dtype=np.uint8)
        stripes = self._brightness[self._phases[label] + start]
        return stripes[..., None] + generator.integers(0, 2 * NOISE, (*stripes.shape, 3), dtype=np.uint8)


class Rectangles(MockRows):
    """Images uint8 [H, W, 3] of a coloured rectangle on grey noise; labels int32 [H, W], 0 for the ground.

    The class of the rectangle is its brightness in red against blue; its border, a pixel wide, is 255.
    """

    def make(self, generator: np.random.Generator) -> dict[str, np.ndarray]:
        width, height = self.size
        image = 128 + NOISE / 4 * generator.standard_normal((height, width, 3), np.float32)
        labels = np.zeros((height, width), np.int32)
        label = int(generator.integers(1, self.classes))
        top, left = (int(generator.integers(0, side // 2)) for side in (height, width))
        down, across = (int(generator.integers(side // 4, side // 2 + 1)) for side in (height, width))
        hue = (label - 1) / max(self.classes - 2, 1)
        inside = (slice(top, top + down), slice(left, left + across))
        image[inside] += np.array([100 * hue, -60, 100 * (1 - hue)], np.float32)
        labels[inside] = IGNORED
        labels[top + 1 : top + down - 1, left + 1 : left + across - 1] = label
        return {"images": np.clip(np.rint(image), 0, 255).astype(np.uint8), "labels": labels, "loss_mask": COUNTS}


COLOURS = {"red": (220, 30, 30), "green": (30, 220, 30), "blue": (30, 30, 220), "white": (230, 230, 230)}
SHAPES = ("disc", "square")


class DrawnShapes:
    """Images of a coloured shape on dark noise, with captions such as "a red disc".

    least, most: width and height of the smallest and the largest images.
    """

    def __init__(self, config: MockCaptionsConfig, least: tuple[int, int], most: tuple[int, int]):
        self._images, self._prompt, self._least, self._most = config.images, config.prompt, least, most

    def __len__(self) -> int:
        return ONE_PASS

    def name(self, item: int) -> str:
        """Name of the image in messages."""
        return f"synthetic image {item}"

    def sample(self, item: int, generator: np.random.Generator) -> Sample:
        """Images and their caption."""
        more = int(generator.integers(self._images)) if self._images > 1 else 0
        kinds = [item, *generator.integers(ONE_PASS, size=more).tolist()]
        names, pictures = zip(*(self._picture(kind, generator) for kind in kinds), strict=True)
        return caption_sample(pictures, self._prompt, " and ".join(names))

    def _picture(self, kind: int, generator: np.random.Generator) -> tuple[str, ArrayPicture]:
        width, height = self._least
        if self._most != self._least:
            width, height = generator.integers(self._least, self._most, endpoint=True).tolist()
        shape, colour = SHAPES[kind % len(SHAPES)], list(COLOURS)[kind // len(SHAPES) % len(COLOURS)]
        radius = max(2.0, min(width, height) * generator.uniform(0.2, 0.35))
        across = np.abs(np.arange(width) - generator.uniform(radius, width - radius))
        down = np.abs(np.arange(height) - generator.uniform(radius, height - radius))[:, None]
        inside = across**2 + down**2 < radius**2 if shape == "disc" else (across < radius) & (down < radius)
        noise = generator.integers(0, NOISE, (height, width, 3), dtype=np.uint8)
        pixels = np.where(inside[..., None], np.array(COLOURS[colour], np.uint8), noise)
        return f"a {colour} {shape}", ArrayPicture(pixels)


def build_captions(config: MockCaptionsConfig, *, tokenizer: Any, schema: Schema, rows: Rows, seed: int) -> Splits:
    """Rows of shapes with captions for the splits that a run requests.

    Raises UserError: more images than the model's rows have slots for.
    """
    make = image_text_rows(config, tokenizer=tokenizer, schema=schema, seed=seed)
    leaf, slots = schema["images"], (schema.get("grids") or schema["images"]).shape[0]
    if config.images > slots:
        raise UserError(f"data.images={config.images}, and the model's rows have {slots} slots for images.")
    patches = None if leaf.placeholder is None else leaf.placeholder.patches
    if patches is None:
        least = most = image_size(schema)
    else:  # about the fewest patches, in many shapes
        side = math.isqrt(patches.least) * patches.side
        least, most = (side, side), (3 * side // 2, 3 * side // 2)
    return splits_from_items(lambda _: DrawnShapes(config, least, most), rows, make)


def _splits(config: Any, make: Callable[..., MockRows], schema: Schema, rows: Rows, seed: int) -> Splits:
    """make: (position of the split, arguments of MockRows except `classes`) -> rows."""
    fixed = {"size": image_size(schema), "seed": data_seed(config.seed, seed)}
    return Splits.build(rows, lambda position, _, row_count: make(position, rows=row_count, split=position, **fixed))


def build_classes(config: MockImagesConfig, *, tokenizer: object, schema: Schema, rows: Rows, seed: int) -> Splits:
    """Rows of stripes for the splits that a run requests."""
    del tokenizer

    def make(position: int, **options: Any) -> Stripes:
        mixup = None if not config.mixup else config.mixup * (position == 0)
        return Stripes(mixup=mixup, classes=schema["labels"].below or CLASSES, **options)

    return _splits(config, make, schema, rows, seed)


def build_masks(config: MockMasksConfig, *, tokenizer: object, schema: Schema, rows: Rows, seed: int) -> Splits:
    """Rows of rectangles for the splits that a run requests."""
    del tokenizer
    return _splits(config, lambda _, **options: Rectangles(classes=config.classes, **options), schema, rows, seed)
