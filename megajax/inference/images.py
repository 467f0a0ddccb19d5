"""Images within prompts: how they are read, where they stand, and their states on the device.

Image files become pixels of a model's size, and take their places within the tokens of a prompt. A model's vision tower
computes their states, and prompts take them in place of tokens. A cache leaf has room for the states of the images of
the row in each slot. Before a step that computes image tokens, a program of its own computes the states of these
images, one image of each replica at a time.
"""

from collections.abc import Iterator, Sequence
from hashlib import blake2b
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array

from megajax.config.errors import UserError
from megajax.data.images.decoding import StoredPicture
from megajax.data.images.transforms import fit_image, patch_image
from megajax.data.rows.shuffled_items import UnreadableItem
from megajax.inference.config import ImageFit
from megajax.inference.request import ImageInput, PromptImage, Step
from megajax.inference.step_arrays import NOWHERE, Bucket, prompt_tiles
from megajax.layers.cache_spec import CacheLeaf
from megajax.layers.context import Context
from megajax.layers.decoding import Cache
from megajax.mesh.layout import Layout
from megajax.models.protocol import ModelConfig

IMAGES = "images"
"""Name of the cache leaf, and of the leaf of a row."""
POOL, STATES = (None, "batch", None, None), ("batch", None, None)
"""Logical axes of the cache leaf, and of states [images, P, D]."""
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
            reasons = {"too long": str(error), "too large": f"has more than {self._pixels:,} pixels"}
            raise UserError(reasons.get(error.reason, "is damaged")) from error

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


def image_input(model: ModelConfig) -> ImageInput | None:
    """The images of a row of a model; None if it reads none within its text."""
    leaf = model.schema().get(IMAGES)
    if leaf is None or leaf.placeholder is None:
        return None
    place = leaf.placeholder
    height, width = (0, 0) if place.patches else leaf.shape[1:3]
    most = (model.schema()["grids"] if place.patches else leaf).shape[0]
    return ImageInput(most, place.count, place.token, height, width, place.patches, place.states)


def image_leaves(model: Any) -> tuple[CacheLeaf, ...]:
    """The cache leaf of the states of a row's images; none for a model that reads no images."""
    images = image_input(model)
    if images is None:
        return ()
    return (CacheLeaf(IMAGES, (images.most * images.positions, images.states * model.hidden), (None, None), per="row"),)


class ImagePool:
    """Which images the slots of rows have."""

    def __init__(self, images: ImageInput):
        self.images = images
        self._owners: dict[tuple[int, int], tuple[tuple[int, int], int]] = {}

    def missing(self, work: Sequence[Step | None]) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
        """The images that a step needs and the pool lacks, one of each replica at a time; they count as present then.

        Yields pixels uint8 [replicas, ...] as `ImageInput.shape`, grids int32 [replicas, 2] and places int32
        [replicas]: slot x `ImageInput.most` + number of the image; past the pool for none.
        """
        needed = [self._take(replica, step) for replica, step in enumerate(work)]
        for number in range(max(map(len, needed))):
            pixels, grids = np.zeros((len(work), *self.images.shape()), np.uint8), np.zeros((len(work), 2), np.int32)
            places = np.full(len(work), NOWHERE, np.int32)
            for replica, images in enumerate(needed):
                if number < len(images):
                    places[replica], image = images[number]
                    pixels[replica, : len(image.pixels)], grids[replica] = image.pixels, image.grid
            yield pixels, grids, places

    def _take(self, replica: int, step: Step | None) -> list[tuple[int, PromptImage]]:
        needed = []
        for row, start, count in step.prompts if step else ():
            for number, image in enumerate(row.images):
                place, owner = row.slot * self.images.most + number, (row.order, row.preempted)
                overlaps = image.first < start + count and start < image.first + image.count
                if overlaps and self._owners.get((replica, place)) != owner:
                    self._owners[replica, place] = owner
                    needed.append((place, image))
        return needed


def state_index(step: Step | None, bucket: Bucket, images: ImageInput) -> np.ndarray:
    """`StepArrays.images` of a replica's step."""
    index = np.full(bucket.tokens, -1, np.int32)
    for place, (prompt, first, count) in enumerate(prompt_tiles(step, bucket.tile) if step else ()):
        row, begin = step.prompts[prompt][0] if step else None, bucket.choices + place * bucket.tile - first
        for number, image in enumerate(row.images if row else ()):
            start, end = max(first, image.first), min(first + count, image.first + image.count)
            if row and start < end:
                state = (row.slot * images.most + number) * images.positions - image.first
                index[begin + start : begin + end] = np.arange(state + start, state + end)
    return index


def rotary_positions(step: Step | None, bucket: Bucket, positions: np.ndarray) -> np.ndarray:
    """`StepArrays.rotary` of a replica's step. positions: int32 [T, 1] of its tokens."""
    rotary = np.repeat(positions[..., None], 3, axis=-1)
    for number, (row, _) in enumerate(step.decode if step else ()):
        rotary[number * bucket.width : (number + 1) * bucket.width] += sum(image.moves() for image in row.images)
    for place, (prompt, first, count) in enumerate(prompt_tiles(step, bucket.tile) if step and step.prompts else ()):
        row, begin = step.prompts[prompt][0] if step else None, bucket.choices + place * bucket.tile - first
        for image in row.images if row else ():
            start, end, after = max(first, image.first), image.first + image.count, first + count
            rotary[begin + max(first, end) : begin + max(after, end)] += image.moves()
            if start < (stop := min(end, after)):
                token, columns = np.arange(start - image.first, stop - image.first), image.grid[1] // image.merge
                inside = np.stack([0 * token, token // columns, token % columns], axis=-1) - token[:, None]
                rotary[begin + start : begin + stop, 0] += inside.astype(np.int32)
    return rotary.astype(np.int32)


def written(layout: Layout, cache: Cache, states: Array, places: Array) -> Cache:
    """The cache with states [replicas, P, D] of images at their places, int32 [replicas]."""

    def local(pool: Array, states: Array, places: Array) -> Array:
        by_image = pool.reshape(-1, *states.shape[1:])
        return by_image.at[places].set(states.astype(pool.dtype), mode="drop").reshape(pool.shape)

    pool = layout.island(local, (POOL, STATES, ("batch",)), POOL)(cache[IMAGES], states, places)
    return {**cache, IMAGES: pool}


def with_images(
    layout: Layout, ctx: Context, cache: Cache, index: Array | None, rotary: Array | None = None
) -> Context:
    """The context of a step whose tokens have these states, int32 [T]; -1: the token itself. None: no images.

    rotary: as in `StepArrays`.
    """
    ctx = ctx._replace(rotary=rotary)
    if index is None:
        return ctx

    def local(pool: Array, index: Array) -> Array:
        return pool.reshape(-1, pool.shape[-1])[jnp.maximum(index, 0)][:, None]

    states = layout.island(local, (POOL, ("batch",)), STATES)(cache[IMAGES], index)
    return ctx._replace(memory=states, splice=jnp.where(index >= 0, 0, -1)[:, None])
