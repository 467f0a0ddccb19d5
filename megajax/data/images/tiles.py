"""Conversion of images of any shape to the model's size, as a single image or a grid of tiles."""

from typing import Any, Literal

import numpy as np

from megajax.config.optional_packages import require
from megajax.data.images.augmentation import Crop, crop_image, inner_box
from megajax.data.images.decoding import Picture

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
    image: Any = require("PIL.Image", "Reading images").new("RGB", size, MEAN_COLOUR)
    corner = ((size[0] - inside[0]) // 2, (size[1] - inside[1]) // 2)
    image.paste(crop_image(picture, Crop(whole_box(picture.size)), inside, FILTER), corner)
    return np.asarray(image)


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
