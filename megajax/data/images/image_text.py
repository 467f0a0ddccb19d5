"""Rows of text with images: tokens with image placeholders, loss on captions and answers, and the images in slots."""

import base64
import binascii
import json
from collections.abc import Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np

from megajax.batch import Schema
from megajax.config.errors import UserError
from megajax.data.chat.files import BadLine, conversations_of, tokenize_parts
from megajax.data.images.config import CropConfig, ImageTextConfig, ImageTextRowsConfig
from megajax.data.images.decoding import Picture, StoredPicture, check_bytes, is_compressed, read_at, read_bounded
from megajax.data.images.labelled import image_size
from megajax.data.images.transforms import affordable_tiles, crop_image, fit_image, random_crop, tile_image
from megajax.data.progress_line import Progress
from megajax.data.rows.shuffled_items import ItemRows, Items, MakeRows, RowOrder, UnreadableItem, splits_from_paths
from megajax.data.rows.splits import Rows, Splits
from megajax.storage.index_cache import Arrays, index_folder, load_or_build
from megajax.tokenizers.chat_template import ChatTemplate, Part, TemplateMisfit

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


BLOCK = 1 << 24
LONGEST_LINE = 1 << 30
NEWLINE = 10
DATA_URL = "data:"
BASE64_STARTS = ("/9j/", "iVBORw0KGgo", "R0lGOD", "UklGR")
"""First characters of JPEG, PNG, GIF and WebP in base64."""


class Lines(NamedTuple):
    """Locations of the lines of files; arrays [lines], without empty lines."""

    files: np.ndarray
    """int32: number of the file."""
    numbers: np.ndarray
    """int64: number of the line, from 1."""
    offsets: np.ndarray
    """int64: first byte."""
    sizes: np.ndarray
    """int64: bytes, without the end of the line."""


class ImageTextLines:
    """The lines of files."""

    def __init__(self, paths: Sequence[Path], lines: Lines, config: ImageTextConfig):
        self._paths, self.lines, self._config = paths, lines, config
        self._template = ChatTemplate(config.template)
        self.index_files: tuple[Path, ...] = ()

    def __len__(self) -> int:
        return len(self.lines.sizes)

    def name(self, item: int) -> str:
        """File and number of the line."""
        return f"{self._paths[self.lines.files[item]]}, line {self.lines.numbers[item]}"

    def files(self) -> list[Path]:
        """The files of lines, without the images that they name."""
        return list(self._paths)

    def groups(self) -> list[np.ndarray]:
        """All lines as one group."""
        return [np.arange(len(self))]

    def subset(self, items: np.ndarray) -> "ImageTextLines":
        """Only these lines."""
        return ImageTextLines(self._paths, Lines(*(values[items] for values in self.lines)), self._config)

    def sample(self, item: int, generator: np.random.Generator) -> Sample:
        """The images and text of a line. Raises UnreadableItem."""
        del generator
        path, size = self._paths[self.lines.files[item]], int(self.lines.sizes[item])
        if size > LONGEST_LINE:
            raise UnreadableItem("too large", f"a line of {size:,} bytes; at most {LONGEST_LINE:,} are read")
        try:
            line = json.loads(read_at(path, int(self.lines.offsets[item]), size))
        except (ValueError, RecursionError) as error:
            raise UnreadableItem("no JSON", str(error)) from error
        if not isinstance(line, Mapping):
            raise UnreadableItem("no JSON", f"expected an object, found {str(line)[:50]!r}")
        folder = Path(self._config.image_folder).expanduser() if self._config.image_folder else path.parent
        return read_line(line, folder, self._template, self._config)


def read_line(line: Mapping[str, Any], folder: Path, template: ChatTemplate, config: ImageTextConfig) -> Sample:
    """The images and text of a line's object. Raises UnreadableItem."""
    images, caption = line.get("image"), line.get("caption")
    sources = images if isinstance(images, list) else [] if images is None else [images]
    if caption is None:
        pieces = _conversation(line, len(sources), template, config)
    elif not isinstance(caption, str) or not caption:
        raise UnreadableItem("no caption", f"caption is {str(caption)[:50]!r}")
    elif not sources:
        raise UnreadableItem("caption without an image", "a line with a caption needs an image")
    pictures = [read_picture(source, folder, config.maximum_pixels) for source in sources]
    return Sample(pictures, pieces) if caption is None else caption_sample(pictures, config.prompt, caption)


def _conversation(
    line: Mapping[str, Any], images: int, template: ChatTemplate, config: ImageTextConfig
) -> list[Part | None]:
    """The text of a conversation, with IMAGE in place of each marker. Raises UnreadableItem."""
    try:
        conversations = conversations_of(line, demand_answers=True)
        if len(conversations) > 1:
            raise BadLine("not a conversation", f"{len(conversations)} of them; write a line for each")
        (messages,) = conversations
        marked = [message for message in messages if config.marker in message["content"]]
        if images and not marked:
            first = next((message for message in messages if message["role"] == "user"), messages[0])
            first["content"] = f"{config.marker * images}\n{first['content']}"
        parts = template.parts(messages)
    except BadLine as error:
        raise UnreadableItem(error.reason, str(error)) from error
    except TemplateMisfit as error:
        raise UnreadableItem("refused by the template", str(error)) from error
    pieces: list[Part | None] = []
    for part in parts:
        texts = part.text.split(config.marker)
        if part.weight and len(texts) > 1:
            raise UnreadableItem("image marker without image", f"an answer has {config.marker}")
        for place, text in enumerate(texts):
            pieces += [*[IMAGE] * (place > 0), Part(text, part.weight)]
    places = sum(piece is IMAGE for piece in pieces)
    if places != images:
        reason = "image marker without image" if places > images else "image without a marker"
        raise UnreadableItem(reason, f"{places} x {config.marker}, images: {images}")
    return pieces


def read_picture(source: object, folder: Path, maximum_pixels: int) -> Picture:
    """An image from a path or base64. Raises UnreadableItem."""
    if not isinstance(source, str):
        raise UnreadableItem("no image", f"expected a path or base64, found {str(source)[:50]!r}")
    if not source.startswith((DATA_URL, *BASE64_STARTS)):
        try:
            return StoredPicture(read_bounded(folder / source, maximum_pixels), maximum_pixels)
        except UnreadableItem as error:
            raise UnreadableItem(error.reason, f"{folder / source}: {error}") from error
    text = source.partition(",")[2] if source.startswith(DATA_URL) else source
    check_bytes(len(text) * 3 // 4, maximum_pixels)
    try:
        data = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise UnreadableItem("corrupt image", f"not base64: {error}") from error
    return StoredPicture(data, maximum_pixels)


def build_index(paths: Sequence[Path]) -> Arrays:
    """The fields of `Lines`."""
    parts: list[list[np.ndarray]] = [[], [], [], []]
    total, indexed_bytes = sum(path.stat().st_size for path in paths), 0
    progress = Progress("bytes", f"indexing {len(paths)} files of JSON lines")
    for number, path in enumerate(paths):
        newlines = [np.array([-1], np.int64)]
        place = 0
        with path.open("rb") as file:
            while block := file.read(BLOCK):
                newlines.append(np.flatnonzero(np.frombuffer(block, np.uint8) == NEWLINE) + place)
                place += len(block)
                progress(indexed_bytes + place, (indexed_bytes + place) / total)
        indexed_bytes += place
        borders = np.concatenate([*newlines, np.array([place], np.int64)])
        offsets, sizes = borders[:-1] + 1, np.diff(borders) - 1
        filled = np.flatnonzero(sizes > 1)  # neither an empty line nor one with a carriage return
        values = (np.full(len(filled), number, np.int32), filled + 1, offsets[filled], sizes[filled])
        for part, value in zip(parts, values, strict=True):
            part.append(value)
    progress.clear()
    return Lines(*map(np.concatenate, parts))._asdict()


def open_lines(config: ImageTextConfig, names: Sequence[str]) -> ImageTextLines:
    """The lines of files. Their index is cached under the files' names, sizes and dates.

    Raises UserError: no such file, an empty file, or a JSON list instead of lines.
    """
    paths = [Path(name).expanduser() for name in names]
    if absent := [str(path) for path in paths if not path.is_file()]:
        raise UserError(f"data: no such file: {', '.join(absent)} (looked for in {Path.cwd()})")
    for path in paths:
        if is_compressed(path):
            raise UserError(f"{path}: is compressed; unpack it: lines are read by offset")
        with path.open("rb") as file:
            if file.read(1) == b"[":
                raise UserError(
                    f"{path}: is one JSON list. Write a line for each entry: jq -c '.[]' {path} > NEW.jsonl"
                )
    facts = [[path.name, path.stat().st_size, path.stat().st_mtime_ns] for path in paths]
    arrays = load_or_build(
        index_folder(config.cache_dir), {"kind": "lines", "files": facts}, lambda _: build_index(paths)
    )
    lines = Lines(**arrays)
    if not len(lines.sizes):
        raise UserError(f"{', '.join(map(str, paths))}: no lines")
    text_lines = ImageTextLines(paths, lines, config)
    text_lines.index_files = arrays.files
    return text_lines


def build_splits(config: ImageTextConfig, *, tokenizer: Any, schema: Schema, rows: Rows, seed: int) -> Splits:
    """Rows of text with images for the splits that a run requests; see `ImageTextRows`."""
    make = image_text_rows(config, tokenizer=tokenizer, schema=schema, seed=seed)
    return splits_from_paths(config, lambda paths: open_lines(config, paths), rows, make)
