"""Image files become pixels of a model's size, and take their places within the tokens of a prompt."""

from collections.abc import Sequence
from hashlib import blake2b
from typing import NamedTuple

import numpy as np

from megajax.config.errors import UserError
from megajax.data.images.decoding import StoredPicture
from megajax.data.images.transforms import fit_image, patch_image
from megajax.data.rows.shuffled_items import UnreadableItem
from megajax.inference.config import ImageFit
from megajax.inference.request import ImageInput, PromptImage

DIGEST = 16
"""Bytes of the hash of an image."""
STARTS = (b"\x89PNG\r\n\x1a\n", b"\xff\xd8\xff")
"""First bytes of PNG and JPEG files."""


class ReadImage(NamedTuple):
    """An image as a model reads it."""

    pixels: np.ndarray
    """As `PromptImage.pixels`."""
    grid: tuple[int, int]
    """As `PromptImage.grid`."""


class ImageReader:
    """Reads images as rows of training have them: whole, in the model's size.

    Args:
        images: of the model.
        fit: how an image of another shape is converted, as in `ImageTextRowsConfig`.
        pixels: maximum number of pixels of a file.
    """

    def __init__(self, images: ImageInput, fit: ImageFit, pixels: int):
        self.images, self._fit, self._pixels = images, fit, pixels

    def read(self, data: bytes) -> ReadImage:
        """The content of a PNG or JPEG file as the model reads it. Raises UserError."""
        if not data.startswith(STARTS):
            raise UserError("is neither a PNG nor a JPEG file")
        try:
            picture = StoredPicture(data, self._pixels)
            if self.images.patches is not None:
                return ReadImage(*patch_image(picture, self.images.patches))
            return ReadImage(fit_image(picture, (self.images.width, self.images.height), self._fit), (0, 0))
        except UnreadableItem as error:
            reason = (
                str(error)
                if error.reason == "too long"
                else f"has more than {self._pixels:,} pixels"
                if error.reason == "too large"
                else "is damaged"
            )
            raise UserError(reason) from error

    def place(self, tokens: Sequence[int], pictures: Sequence[ReadImage]) -> tuple[list[int], tuple[PromptImage, ...]]:
        """A prompt with one image token for each picture, in order -> its tokens and images.

        Raises UserError for another number of image tokens.
        """
        token, patches = self.images.token, self.images.patches
        if (places := sum(other == token for other in tokens)) != len(pictures):
            raise UserError(f"the prompt has {places} places of images for {len(pictures)} images")
        prompt, images, waiting = list[int](), list[PromptImage](), iter(pictures)
        for other in tokens:
            if other != token:
                prompt.append(other)
                continue
            pixels, grid = next(waiting)
            merge = 1 if patches is None else patches.merge
            count = self.images.positions if patches is None else grid[0] * grid[1] // merge**2
            digest = blake2b(pixels.tobytes() + repr(grid).encode(), digest_size=DIGEST).digest()
            images.append(PromptImage(len(prompt), count, pixels, digest, grid, merge))
            prompt += [token] * count
        return prompt, tuple(images)
