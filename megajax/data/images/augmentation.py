"""Crops, flips and random operations on images, with Pillow; random numbers come from the generator of a row."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from megajax.config.optional_packages import require
from megajax.data.configs import AugmentConfig, CropConfig
from megajax.data.images.decoding import Picture

TRIES = 10
"""Random crops that are tried before the largest centered crop with an allowed ratio is used."""
GREY = (128, 128, 128)
"""Fills the pixels that an operation uncovers."""
ROTATION, SHEAR, SHIFT, ENHANCEMENT = 30.0, 0.3, 0.3, 0.9
"""Degrees, share of the other side, share of the same side, change of a factor; each at magnitude 10."""
STRONGEST = 10.0


class Crop(NamedTuple):
    """A box (left, top, right, bottom) of an image, which is resized to the model's size, and an optional flip."""

    box: tuple[float, float, float, float]
    flip: bool = False


def random_crop(size: tuple[int, int], config: CropConfig, generator: np.random.Generator) -> Crop:
    """A box of random area and ratio of an image of this width and height, as torchvision's RandomResizedCrop."""
    width, height = size
    ratios = math.log(config.ratio[0]), math.log(config.ratio[1])
    for _ in range(TRIES):
        area = width * height * generator.uniform(*config.area)
        ratio = math.exp(generator.uniform(*ratios))
        across, down = round((area * ratio) ** 0.5), round((area / ratio) ** 0.5)
        if 0 < across <= width and 0 < down <= height:
            left, top = int(generator.integers(width - across + 1)), int(generator.integers(height - down + 1))
            box = (float(left), float(top), float(left + across), float(top + down))
            break
    else:
        box = inner_box(size, min(max(width / height, config.ratio[0]), config.ratio[1]))
    return Crop(box, bool(generator.random() < config.flip))


def inner_box(size: tuple[int, int], ratio: float, share: float = 1.0) -> tuple[float, float, float, float]:
    """The largest box of this ratio of width to height in the middle of an image, scaled by `share`."""
    width, height = size
    across, down = min(width, height * ratio) * share, min(height, width / ratio) * share
    return ((width - across) / 2, (height - down) / 2, (width + across) / 2, (height + down) / 2)


def crop_image(picture: Picture, crop: Crop, size: tuple[int, int], filter: str = "BILINEAR") -> Any:
    """The crop of a picture, resized to `size` (width, height). filter: of Pillow; BICUBIC is 1.6 times slower.

    Raises UnreadableItem.
    """
    library = require("PIL.Image", "Reading images")
    left, top, right, bottom = crop.box
    needed = (picture.size[0] * size[0] / (right - left), picture.size[1] * size[1] / (bottom - top))
    image = picture.rgb(needed)
    across, down = image.width / picture.size[0], image.height / picture.size[1]
    box = (left * across, top * down, min(right * across, image.width), min(bottom * down, image.height))
    image = image.resize(size, library.Resampling[filter], box)
    return image.transpose(library.Transpose.FLIP_LEFT_RIGHT) if crop.flip else image


def crop_classes(classes: np.ndarray, crop: Crop, size: tuple[int, int]) -> np.ndarray:
    """The crop of pixel classes [H, W], resized to `size` (width, height) by nearest pixels, int32."""
    left, top, right, bottom = crop.box
    columns = left + (np.arange(size[0]) + 0.5) * (right - left) / size[0]
    rows = top + (np.arange(size[1]) + 0.5) * (bottom - top) / size[1]
    pixels = classes[np.ix_(rows.astype(np.intp), columns.astype(np.intp))]
    return np.ascontiguousarray(pixels[:, ::-1] if crop.flip else pixels)


def augment_image(image: Any, config: AugmentConfig, generator: np.random.Generator) -> Any:
    """Applies `config.operations` random operations, drawn with repetition, at `config.magnitude`."""
    for number in generator.integers(len(OPERATIONS), size=config.operations).tolist():
        sign = 1.0 if generator.random() < 0.5 else -1.0
        image = OPERATIONS[number](image, config.magnitude / STRONGEST, sign)
    return image


def _affine(image: Any, matrix: tuple[float, ...]) -> Any:
    library = require("PIL.Image", "Reading images")
    return image.transform(image.size, library.Transform.AFFINE, matrix, library.Resampling.BILINEAR, fillcolor=GREY)


def _rotate(image: Any, strength: float, sign: float) -> Any:
    bilinear = require("PIL.Image", "Reading images").Resampling.BILINEAR
    return image.rotate(sign * strength * ROTATION, bilinear, fillcolor=GREY)


def _enhance(kind: str) -> Callable[[Any, float, float], Any]:
    def enhance(image: Any, strength: float, sign: float) -> Any:
        enhancer = getattr(require("PIL.ImageEnhance", "Reading images"), kind)
        return enhancer(image).enhance(1 + sign * strength * ENHANCEMENT)

    return enhance


def _without_strength(name: str) -> Callable[[Any, float, float], Any]:
    """An operation that has no strength."""
    return lambda image, strength, sign: getattr(require("PIL.ImageOps", "Reading images"), name)(image)


def _solarize(image: Any, strength: float, sign: float) -> Any:
    return require("PIL.ImageOps", "Reading images").solarize(image, round(256 * (1 - strength)))


def _posterize(image: Any, strength: float, sign: float) -> Any:
    return require("PIL.ImageOps", "Reading images").posterize(image, 8 - round(4 * strength))


OPERATIONS: tuple[Callable[[Any, float, float], Any], ...] = (
    lambda image, strength, sign: image,
    _without_strength("autocontrast"),
    _without_strength("equalize"),
    _rotate,
    _solarize,
    _posterize,
    _enhance("Color"),
    _enhance("Contrast"),
    _enhance("Brightness"),
    _enhance("Sharpness"),
    lambda image, strength, sign: _affine(image, (1, sign * strength * SHEAR, 0, 0, 1, 0)),
    lambda image, strength, sign: _affine(image, (1, 0, 0, sign * strength * SHEAR, 1, 0)),
    lambda image, strength, sign: _affine(image, (1, 0, sign * strength * SHIFT * image.width, 0, 1, 0)),
    lambda image, strength, sign: _affine(image, (1, 0, 0, 0, 1, sign * strength * SHIFT * image.height)),
)
"""The 14 operations of RandAugment: (image, strength 0 to 1, sign) -> image."""
