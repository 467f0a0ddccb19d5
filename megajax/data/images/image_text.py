"""Rows of text with images: tokens with image placeholders, loss on captions and answers, and the images in slots."""

from collections.abc import Sequence
from itertools import groupby
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np

from megajax.batch import Schema
from megajax.config.errors import UserError
from megajax.data.chat.files import tokenize_parts
from megajax.data.configs import CropConfig, ImageTextRowsConfig
from megajax.data.images.augmentation import crop_image, random_crop
from megajax.data.images.decoding import Picture
from megajax.data.images.labelled import image_size
from megajax.data.images.tiles import affordable_tiles, fit_image, tile_image
from megajax.data.rows.items import ItemRows, Items, MakeRows, RowOrder, UnreadableItem
from megajax.tokenizers.chat_template import Part

IMAGE = None
"""Placeholder of the next image."""


class Sample(NamedTuple):
    """Text with images. The loss is on answers and on the end-of-document token, which follows the text."""

    pictures: Sequence[Picture]
    pieces: Sequence[Part | None]
    """The text; IMAGE stands for the images, in their order."""


class Samples(Items, Protocol):
    """Text with images, by number."""

    def sample(self, item: int, generator: np.random.Generator) -> Sample:
        """Raises UnreadableItem."""
        ...


class Layout(NamedTuple):
    """The shapes of rows and how images enter them."""

    length: int
    """S, tokens of a row."""
    slots: int
    """Images and tiles of a row."""
    size: tuple[int, int]
    """Width and height."""
    image_tokens: int
    image_token: int
    tiles: int
    fit: Literal["pad", "crop", "stretch"]
    augment: CropConfig | None
    """Random crops of the images; None: whole images."""


class ImageTextRows(ItemRows[Samples]):
    """Rows of text with images.

    tokens: int32 [S]; each image or tile is `image_tokens` image tokens, in the order of the slots. Padding is 0.
    labels: int32 [S], the token after each input. Padding is 0.
    loss_mask: float32 [S], 1 where the label belongs to a caption or an answer, or ends it.
    positions: int32 [S], from 0.
    images: uint8 [slots, H, W, 3]; unused slots are 0.
    """

    def __init__(self, items: Samples, order: RowOrder, *, layout: Layout, tokenizer: Any):
        super().__init__(items, order)
        self.layout, self._tokenizer = layout, tokenizer
        self._positions = np.arange(layout.length, dtype=np.int32)
        self._positions.setflags(write=False)

    def make(self, item: int, generator: np.random.Generator) -> dict[str, np.ndarray]:
        layout, sample = self.layout, self.items.sample(item, generator)
        if len(sample.pictures) > layout.slots:
            detail = f"{len(sample.pictures)} images, the model's rows have {layout.slots} slots"
            raise UnreadableItem("too many images", detail)
        slot_images = [self._slots(picture, len(sample.pictures), generator) for picture in sample.pictures]
        text, counts = self._text(sample.pieces, [len(tiles) for tiles in slot_images])
        row = {"positions": self._positions}
        for name, dtype in (("tokens", np.int32), ("labels", np.int32), ("loss_mask", np.float32)):
            row[name] = np.zeros(layout.length, dtype)
        tokens, labels = text[: layout.length], text[1 : layout.length + 1]
        row["tokens"][: len(tokens)], row["labels"][: len(labels)] = tokens, labels
        row["loss_mask"][: len(labels)] = counts[1 : layout.length + 1]
        if not row["loss_mask"].any():
            detail = f"{len(text)} tokens, and no caption or answer in the {layout.length} that a row has"
            raise UnreadableItem("too long", detail)
        row["images"] = np.zeros((layout.slots, *layout.size[::-1], 3), np.uint8)
        for slot, image in enumerate(image for tiles in slot_images for image in tiles):
            row["images"][slot] = image
        return row

    def _slots(self, picture: Picture, count: int, generator: np.random.Generator) -> list[np.ndarray]:
        """The images that a picture, one of `count`, puts into slots."""
        layout = self.layout
        if layout.tiles > 1:
            return tile_image(picture, layout.size, affordable_tiles(count, layout.slots, layout.tiles))
        if layout.augment is not None:
            return [np.asarray(crop_image(picture, random_crop(picture.size, layout.augment, generator), layout.size))]
        return [fit_image(picture, layout.size, layout.fit)]

    def _text(self, pieces: Sequence[Part | None], slots: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
        """Tokens of the whole text and their weights in the loss. slots: number of slots of each image.

        Raises UnreadableItem for images beyond the end of the row, and for text that contains the image token.
        """
        slot_counts, parts, counts = iter(slots), [], []
        for is_image, run in groupby(pieces, key=lambda piece: piece is IMAGE):
            if is_image:
                tokens = np.full(
                    sum(next(slot_counts) for _ in run) * self.layout.image_tokens, self.layout.image_token
                )
                weights = np.zeros(len(tokens), np.float32)
            else:
                tokens, weights = tokenize_parts(self._tokenizer, [piece for piece in run if piece is not IMAGE])
                if (tokens == self.layout.image_token).any():
                    raise UnreadableItem("image marker without image", "its text has the image token")
            parts.append(tokens)
            counts.append(weights)
        if not len(parts[-1]) or parts[-1][-1] != self._tokenizer.eod:
            parts.append(np.array([self._tokenizer.eod]))
            counts.append(np.ones(1, np.float32))
        text = np.concatenate(parts).astype(np.int32)
        beyond = np.flatnonzero(text[self.layout.length :] == self.layout.image_token)
        if beyond.size:
            end = self.layout.length + int(beyond[-1]) + 1
            detail = f"its image tokens end at position {end}, the model's rows have {self.layout.length}"
            raise UnreadableItem("too long", detail)
        return text, np.concatenate(counts)


def image_text_rows(
    config: ImageTextRowsConfig, *, tokenizer: Any, schema: Schema, seed: int, augment: CropConfig | None = None
) -> MakeRows:
    """A function (samples, position of the split, number of rows) -> rows, according to the config.

    augment: random crops of training images.

    Raises:
        UserError: the image tokens of tokenizer and model differ, or an image or its tiles do not fit into a row.
    """
    leaf, images = schema["tokens"], schema["images"]
    if images.placeholder is None or len(images.shape) != 4:
        raise UserError(
            f"text with images makes images [slots, height, width, 3] that stand between tokens, the model reads "
            f"{images.shape}: use LlavaConfig or another model of text and images"
        )
    if config.tiles > 1 and config.tiles >= images.shape[0]:
        raise UserError(
            f"data.tiles={config.tiles}: an image in tiles and the small copy take up to {config.tiles + 1} slots, and "
            f"the model's rows have {images.shape[0]}. Use fewer tiles or more slots."
        )
    token, count = images.placeholder.token, images.placeholder.count
    tokenizer_id = tokenizer.specials.get("image", token)
    if tokenizer_id != token:
        raise UserError(
            f"the image token of the tokenizer is {tokenizer_id}, model.image_token is {token}: "
            f"set model.image_token={tokenizer_id}"
        )
    if "image" not in tokenizer.specials and token < tokenizer.vocabulary_size:
        raise UserError(
            f"model.image_token={token} is a token of the text: the tokenizer has the ids 0 to "
            f"{tokenizer.vocabulary_size - 1}. Use the next one, or "
            "tokenizer.type=MultimodalTokenizerConfig, which adds an image token to any tokenizer"
        )
    if count >= leaf.positions():
        raise UserError(
            f"an image takes {count} positions, and the model's rows have {leaf.positions()}: lengthen the rows"
        )

    def make(items: Samples, position: int, row_count: int | None) -> ImageTextRows:
        layout = Layout(
            length=leaf.positions(),
            slots=images.shape[0],
            size=image_size(schema),
            image_tokens=count,
            image_token=token,
            tiles=config.tiles,
            fit=config.fit,
            augment=augment if position == 0 else None,
        )
        return ImageTextRows(items, RowOrder.of(config, row_count, seed, position), layout=layout, tokenizer=tokenizer)

    return make


def caption_sample(pictures: Sequence[Picture], prompt: str, caption: str) -> Sample:
    """Images, the prompt, and the caption, which alone has a loss."""
    return Sample(pictures, [*[IMAGE] * len(pictures), Part(prompt, 0), Part(caption, 1)])
