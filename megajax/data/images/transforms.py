"""Crops, flips and colours of images, with Pillow; random numbers come from the generator of a row."""

import math
from typing import Any, Literal, NamedTuple

import numpy as np

from megajax.batch import Patches
from megajax.config.optional_packages import require
from megajax.data.images.config import AugmentConfig
from megajax.data.images.decoding import Picture
from megajax.data.rows.shuffled_items import UnreadableItem

TRIES = 10
"""Random crops that are tried before the largest centered crop with an allowed ratio is used."""
LONGEST = 200
"""Largest ratio of the sides of an image that becomes patches."""


class Crop(NamedTuple):
    """A box (left, top, right, bottom) of an image, which is resized to the model's size, and an optional flip."""

    box: tuple[float, float, float, float]
    flip: bool = False


def random_crop(size: tuple[int, int], config: AugmentConfig, generator: np.random.Generator) -> Crop:
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


def change_colours(image: Any, most: float, generator: np.random.Generator) -> Any:
    """The image with random brightness, contrast and saturation: factors from 1 - most to 1 + most."""
    library = require("PIL.ImageEnhance", "Reading images")
    for kind in ("Brightness", "Contrast", "Color"):
        image = getattr(library, kind)(image).enhance(generator.uniform(1 - most, 1 + most))
    return image


FILTER = "BICUBIC"
"""Resampling filter of the image processors of CLIP and similar models."""
MEAN_COLOUR = (122, 116, 104)
"""Color of padding: the mean color of CLIP's training images."""


def whole_box(size: tuple[int, int]) -> tuple[float, float, float, float]:
    """The box of the whole image."""
    return (0.0, 0.0, float(size[0]), float(size[1]))


def fit_image(picture: Picture, size: tuple[int, int], fit: Literal["pad", "crop", "stretch"]) -> np.ndarray:
    """The picture at `size` (width, height): uint8 [H, W, 3]. Raises UnreadableItem."""
    if fit == "crop":
        return np.asarray(crop_image(picture, Crop(inner_box(picture.size, size[0] / size[1])), size, FILTER))
    if fit == "stretch":
        return np.asarray(crop_image(picture, Crop(whole_box(picture.size)), size, FILTER))
    scale = min(size[0] / picture.size[0], size[1] / picture.size[1])
    inside = (max(1, round(picture.size[0] * scale)), max(1, round(picture.size[1] * scale)))
    image = require("PIL.Image", "Reading images").new("RGB", size, MEAN_COLOUR)
    corner = ((size[0] - inside[0]) // 2, (size[1] - inside[1]) // 2)
    image.paste(crop_image(picture, Crop(whole_box(picture.size)), inside, FILTER), corner)
    return np.asarray(image)


def patch_grid(size: tuple[float, float], patches: Patches) -> tuple[int, int]:
    """Rows and columns of patches of a picture of this width and height: the rule of Qwen2-VL (Wang et al. 2024).

    Its sides become multiples of merge * side, for a number of patches between `least` and `most`. Raises
    UnreadableItem.
    """
    side, merge = patches.side, patches.merge
    unit, pixels = side * merge, size[0] * size[1]
    if max(size) > LONGEST * min(size):
        detail = f"has {size[0]} x {size[1]} pixels, one side more than {LONGEST} times the other"
        raise UnreadableItem("too long", detail)
    sides = [round(length / unit) for length in size]
    count = sides[0] * sides[1] * merge**2
    least, most = (number * side**2 for number in (patches.least, patches.most))
    if count > patches.most:
        sides = [max(1, math.floor(length / math.sqrt(pixels / most) / unit)) for length in size]
    elif count < patches.least:
        sides = [max(1, math.ceil(length * math.sqrt(least / pixels) / unit)) for length in size]
    # A long image that was enlarged, or whose shorter side is a unit, may have too many.
    sides = [max(1, length) for length in sides]
    longer = sides.index(max(sides))
    sides[longer] = min(sides[longer], patches.most // merge**2 // min(sides))
    return sides[1] * merge, sides[0] * merge


def patch_image(picture: Picture, patches: Patches) -> tuple[np.ndarray, tuple[int, int]]:
    """A picture of any size as patches, uint8 [n, side * side * 3], and their rows and columns, see `patch_grid`.

    Squares of merge * merge patches follow one another. Raises UnreadableItem.
    """
    side, merge = patches.side, patches.merge
    rows, columns = patch_grid(picture.size, patches)
    image = np.asarray(crop_image(picture, Crop(whole_box(picture.size)), (columns * side, rows * side), FILTER))
    image = image.reshape(rows // merge, merge, side, columns // merge, merge, side, -1)
    return image.transpose(0, 3, 1, 4, 2, 5, 6).reshape(rows * columns, -1), (rows, columns)


def grid(image: tuple[int, int], size: tuple[int, int], tiles: int) -> tuple[int, int]:
    """Columns and rows of the grid of at most `tiles` tiles of `size` whose aspect ratio is nearest to the image's.

    Among grids with the same ratio, a larger one is used if the image has more than half of its pixels: the rule of
    InternVL 1.5 (Chen et al. 2024).
    """
    ratio, pixels = image[0] / image[1] * size[1] / size[0], image[0] * image[1]
    choices = [(across, down) for across in range(1, tiles + 1) for down in range(1, tiles // across + 1)]
    best, nearest = (1, 1), float("inf")
    for across, down in sorted(choices, key=lambda choice: (choice[0] * choice[1], choice)):
        distance = abs(ratio - across / down)
        enough = pixels > 0.5 * size[0] * size[1] * across * down
        if distance < nearest or (distance == nearest and enough):
            best, nearest = (across, down), distance
    return best


def tile_image(picture: Picture, size: tuple[int, int], tiles: int) -> list[np.ndarray]:
    """Tiles of the picture, row by row, and if there are several a small copy of the whole; each uint8 [H, W, 3].

    Raises UnreadableItem.
    """
    across, down = grid(picture.size, size, tiles)
    box = Crop(whole_box(picture.size))
    large = np.asarray(crop_image(picture, box, (across * size[0], down * size[1]), FILTER))
    pieces = large.reshape(down, size[1], across, size[0], 3).swapaxes(1, 2).reshape(-1, size[1], size[0], 3)
    return [*pieces] if len(pieces) == 1 else [*pieces, np.asarray(crop_image(picture, box, size, FILTER))]


def affordable_tiles(images: int, slots: int, tiles: int) -> int:
    """Maximum number of tiles, up to `tiles`, with which `images` images and their small copies fit into the slots."""
    slots_each = slots // max(images, 1) - 1
    return min(tiles, slots_each) if slots_each > 1 else 1
