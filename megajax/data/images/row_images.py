"""The images of a row as arrays: in slots of one size, or as patches of images of any size, one after the other."""

from collections.abc import Sequence
from typing import Literal, NamedTuple, Protocol

import numpy as np

from megajax.batch import Patches, Schema
from megajax.config.errors import UserError
from megajax.data.images.config import ImageTextRowsConfig
from megajax.data.images.decoding import Picture
from megajax.data.images.labelled import image_size
from megajax.data.images.transforms import affordable_tiles, fit_image, patch_image, tile_image
from megajax.data.rows.shuffled_items import UnreadableItem


class RowImages(Protocol):
    """How the images of a row become arrays."""

    def arrays(self, pictures: Sequence[Picture]) -> tuple[list[int], dict[str, np.ndarray]]:
        """The image tokens of each picture, and the arrays of the row. Raises UnreadableItem."""
        ...


class ImageSlots(NamedTuple):
    """images: uint8 [slots, H, W, 3]; unused slots are 0. A picture fills a slot, or several with its tiles."""

    slots: int
    size: tuple[int, int]
    """Width and height."""
    tokens: int
    """Of a slot."""
    tiles: int
    fit: Literal["pad", "crop", "stretch"]

    def arrays(self, pictures: Sequence[Picture]) -> tuple[list[int], dict[str, np.ndarray]]:
        """As in `RowImages`."""
        _demand_slots(len(pictures), self.slots)
        filled = [self._slots(picture, len(pictures)) for picture in pictures]
        images = np.zeros((self.slots, *self.size[::-1], 3), np.uint8)
        for slot, image in enumerate(image for tiles in filled for image in tiles):
            images[slot] = image
        return [len(tiles) * self.tokens for tiles in filled], {"images": images}

    def _slots(self, picture: Picture, count: int) -> list[np.ndarray]:
        """The images that a picture, one of `count`, puts into slots."""
        if self.tiles > 1:
            return tile_image(picture, self.size, affordable_tiles(count, self.slots, self.tiles))
        return [fit_image(picture, self.size, self.fit)]


class PatchRow(NamedTuple):
    """images: uint8 [patches of a row, pixels], those of each image after those before; grids: int32 [slots, 2], rows
    and columns of patches of each image. The rest is 0."""

    slots: int
    budget: int
    """Patches of a row."""
    patches: Patches

    def arrays(self, pictures: Sequence[Picture]) -> tuple[list[int], dict[str, np.ndarray]]:
        """As in `RowImages`."""
        _demand_slots(len(pictures), self.slots)
        images = np.zeros((self.budget, self.patches.side**2 * 3), np.uint8)
        grids, filled, counts = np.zeros((self.slots, 2), np.int32), 0, list[int]()
        for number, picture in enumerate(pictures):
            patches, grids[number] = patch_image(picture, self.patches)
            if filled + len(patches) > self.budget:
                detail = f"its images have more patches than the {self.budget} that the model's rows have room for"
                raise UnreadableItem("too many images", detail)
            images[filled : filled + len(patches)] = patches
            filled += len(patches)
            counts.append(len(patches) // self.patches.merge**2)
        return counts, {"images": images, "grids": grids}


def _demand_slots(images: int, slots: int) -> None:
    if images > slots:
        raise UnreadableItem("too many images", f"{images} images, the model's rows have {slots} slots")


def row_images(config: ImageTextRowsConfig, schema: Schema) -> RowImages:
    """How the images of a model with this schema become arrays.

    Raises:
        UserError: an image, or its tiles, do not fit into a row.
    """
    leaf = schema["images"]
    if leaf.placeholder is None:
        raise UserError(
            f"text with images makes images that stand between tokens, the model reads {leaf.shape}: use LlavaConfig "
            "or another model of text and images"
        )
    tokens, length = leaf.placeholder.count, schema["tokens"].positions()
    if tokens >= length:
        raise UserError(f"an image takes {tokens} positions, and the model's rows have {length}: lengthen the rows")
    if leaf.placeholder.patches is not None:
        if config.tiles > 1:
            raise UserError(f"data.tiles={config.tiles}: the model reads images of any size without tiles. Use tiles=1")
        return PatchRow(schema["grids"].shape[0], leaf.shape[0], leaf.placeholder.patches)
    slots = leaf.shape[0]
    if config.tiles > 1 and config.tiles >= slots:
        raise UserError(
            f"data.tiles={config.tiles}: an image in tiles and the small copy take up to {config.tiles + 1} slots, and "
            f"the model's rows have {slots}. Use fewer tiles or more slots."
        )
    return ImageSlots(slots, image_size(schema), tokens, config.tiles, config.fit)
