"""Rows of images with labels: one class for the image or one for each pixel."""

from dataclasses import dataclass
from typing import Protocol

import numpy as np

from megajax.batch import Schema
from megajax.config.errors import UserError
from megajax.data.images.config import AugmentConfig, ClassImagesConfig, MaskFoldersConfig
from megajax.data.images.decoding import Picture
from megajax.data.images.transforms import Crop, change_colours, crop_classes, crop_image, inner_box, random_crop
from megajax.data.rows.shuffled_items import ItemRows, Items, MakeRows, ShuffledOrder, UnreadableItem

IGNORED = 255
"""Class of ignored pixels."""
COUNTS = np.ones((), np.float32)
"""Weight of a row in the loss."""
COUNTS.setflags(write=False)


class ClassImages(Items, Protocol):
    """Images by number, each with a class."""

    def picture(self, item: int) -> Picture:
        """Raises UnreadableItem."""
        ...

    def label(self, item: int) -> int:
        """Class of the image. Raises UnreadableItem."""
        ...


class MaskImages(Items, Protocol):
    """Images by number, each with a class for every pixel."""

    def picture(self, item: int) -> Picture:
        """Raises UnreadableItem."""
        ...

    def classes(self, item: int) -> np.ndarray:
        """Class of each pixel, int32 [H, W]. Raises UnreadableItem."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Framing:
    """Conversion of images to the model's size.

    Attributes:
        size: width and height.
        augment: random crops and colours; None: center crops.
        centre: side of the center crop, as a share of the largest one.
    """

    size: tuple[int, int]
    augment: AugmentConfig | None
    centre: float

    @classmethod
    def of(cls, config: ClassImagesConfig | MaskFoldersConfig, schema: Schema, position: int) -> "Framing":
        """That of a split, by its position; only training images are augmented."""
        return cls(size=image_size(schema), augment=None if position else config.augment, centre=config.centre)

    def crop(self, size: tuple[int, int], generator: np.random.Generator) -> Crop:
        """The crop of an image of this width and height."""
        if self.augment is not None:
            return random_crop(size, self.augment, generator)
        return Crop(inner_box(size, self.size[0] / self.size[1], self.centre))

    def pixels(self, picture: Picture, crop: Crop, generator: np.random.Generator) -> np.ndarray:
        """The crop of an image, uint8 [H, W, 3]. Raises UnreadableItem."""
        image = crop_image(picture, crop, self.size)
        if self.augment is not None and self.augment.colour:
            image = change_colours(image, self.augment.colour, generator)
        return np.asarray(image)


def image_size(schema: Schema) -> tuple[int, int]:
    """Width and height of the images that the model reads, [..., H, W, 3]. Raises UserError for other shapes."""
    leaf = schema.get("images")
    if leaf is None or len(leaf.shape) < 3 or leaf.shape[-1] != 3:
        reads = "none" if leaf is None else f"images of shape {leaf.shape}"
        raise UserError(f"this data makes images [height, width, 3], the model reads {reads}.")
    return leaf.shape[-2], leaf.shape[-3]


def demand_classes(classes: int, schema: Schema, source: str) -> None:
    """Raises UserError for data with more classes than the model has."""
    below = schema["labels"].below
    if below is not None and classes > below:
        raise UserError(f"{source} has {classes} classes, the model has {below}. Set the model's number of classes.")


class ClassRows(ItemRows[ClassImages]):
    """Rows of images with one class each.

    images: uint8 [H, W, 3]; labels: int32 []; loss_mask: float32 [], 1.
    With mixup also other_labels, int32 [], and mix, float32 []: the image is mix · a + (1 - mix) · b, for images a and
    b of the classes labels and other_labels.

    Args:
        framing: size and crops.
        mixup: α; 0: images are not mixed, None: rows lack the two leaves of mixup.
    """

    def __init__(self, items: ClassImages, order: ShuffledOrder, *, framing: Framing, mixup: float | None):
        super().__init__(items, order)
        self._framing, self._mixup = framing, mixup

    def make(self, item: int, generator: np.random.Generator) -> dict[str, np.ndarray]:
        image, label = self._image(item, generator), self.items.label(item)
        row = {"images": image, "labels": np.array(label, np.int32), "loss_mask": COUNTS}
        if self._mixup is None:
            return row
        other_label, share = label, 1.0
        if self._mixup:
            partner = int(generator.integers(len(self.items)))
            share, other_label = float(generator.beta(self._mixup, self._mixup)), self.items.label(partner)
            mixed = share * image.astype(np.float32) + (1 - share) * self._image(partner, generator)
            row["images"] = np.rint(mixed).astype(np.uint8)
        return row | {"other_labels": np.array(other_label, np.int32), "mix": np.array(share, np.float32)}

    def _image(self, item: int, generator: np.random.Generator) -> np.ndarray:
        framing, picture = self._framing, self.items.picture(item)
        return framing.pixels(picture, framing.crop(picture.size, generator), generator)


def class_rows(config: ClassImagesConfig, schema: Schema, seed: int) -> MakeRows:
    """A function (images, position of the split, number of rows) -> rows, according to the config."""

    def make(items: ClassImages, position: int, row_count: int | None) -> ClassRows:
        order, framing = ShuffledOrder.of(config, row_count, seed, position), Framing.of(config, schema, position)
        return ClassRows(items, order, framing=framing, mixup=config.mixup * (position == 0) if config.mixup else None)

    return make


class MaskRows(ItemRows[MaskImages]):
    """Rows of images with a class for each pixel.

    images: uint8 [H, W, 3]; labels: int32 [H, W], 255 is ignored; loss_mask: float32 [], 1.
    """

    def __init__(self, items: MaskImages, order: ShuffledOrder, *, framing: Framing, classes: int | None):
        super().__init__(items, order)
        self._framing, self._classes = framing, classes

    def make(self, item: int, generator: np.random.Generator) -> dict[str, np.ndarray]:
        picture, classes = self.items.picture(item), self.items.classes(item)
        if classes.shape[::-1] != picture.size:
            sizes = "the image has {} x {} pixels, the mask {} x {}".format(*picture.size, *classes.shape[::-1])
            raise UnreadableItem("mask of another size", sizes)
        largest = int(classes[classes != IGNORED].max(initial=0))
        if self._classes is not None and largest >= self._classes:
            detail = f"the mask has class {largest}; data.classes={self._classes} and {IGNORED} as ignored"
            raise UnreadableItem("unknown class", detail)
        crop = self._framing.crop(picture.size, generator)
        image = self._framing.pixels(picture, crop, generator)
        labels = crop_classes(classes, crop, self._framing.size)
        return {"images": image, "labels": labels, "loss_mask": COUNTS}
