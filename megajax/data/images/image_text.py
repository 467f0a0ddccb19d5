"""Rows of text with images: tokens with image placeholders, loss on captions and answers, and the images in slots."""

import json
from collections.abc import Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np

from megajax.batch import Patches, Schema
from megajax.config.errors import UserError
from megajax.config.read_limits import json_fault
from megajax.data.chat.choose_template import template_of
from megajax.data.chat.tokenized_conversations import BadLine, conversations_of
from megajax.data.images.class_and_mask_rows import image_size
from megajax.data.images.config import ImageTextConfig, ImageTextRowsConfig
from megajax.data.images.decoding import Picture, StoredPicture, is_compressed, read_at, read_bounded
from megajax.data.images.transforms import affordable_tiles, fit_image, patch_image, tile_image
from megajax.data.progress_line import FileProgress
from megajax.data.rows.shuffled_items import ItemRows, Items, MakeRows, ShuffledOrder, UnreadableItem, splits_from_paths
from megajax.data.rows.splits import Rows, Splits
from megajax.storage.index_cache import Arrays, index_folder, load_or_build
from megajax.tokenizers.base import Tokenizer
from megajax.tokenizers.chat_template import TemplateMisfit, TextPiece
from megajax.tokenizers.conversation import IMAGE as PLACE
from megajax.tokenizers.conversation import Conversation, MarkedText

IMAGE = None
"""Placeholder of the next image."""


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


class Sample(NamedTuple):
    """Text with images. The loss is on answers and on the end-of-document token, which follows the text."""

    pictures: Sequence[Picture]
    pieces: Sequence[TextPiece | None]
    """The text; IMAGE stands for the images, in their order."""


class ImageTextSamples(Items, Protocol):
    """Text with images, by number."""

    def sample(self, item: int, generator: np.random.Generator) -> Sample:
        """The text of a row. Raises UnreadableItem."""
        ...


class TextWriter(NamedTuple):
    """Makes tokens of text with images."""

    texts: MarkedText
    image_token: int
    before: str
    after: str
    """Text around each image."""

    def tokens(self, sample: Sample, counts: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
        """Tokens of the whole text and their weights in the loss. counts: image tokens of each image.

        Raises UnreadableItem for text that contains the image token.
        """
        waiting, parts = iter(counts), list[tuple[np.ndarray, np.ndarray]]()
        for is_image, run in groupby(sample.pieces, key=lambda piece: piece is IMAGE):
            if not is_image:
                texts = [piece for piece in run if piece is not IMAGE]
                parts.append(self.texts.tokenize(texts, next_marker=True, follows=bool(parts)))
                if (parts[-1][0] == self.image_token).any():
                    raise UnreadableItem("image marker without image", "its text has the image token")
                continue
            for _ in run:
                image = np.full(next(waiting), self.image_token, np.int32)
                before = self.texts.encode(self.before, follows=bool(parts))
                tokens = np.array([*before, *image, *self.texts.encode(self.after, follows=True)], np.int32)
                parts.append((tokens, np.zeros(len(tokens), np.float32)))
        eod = self.texts.tokenizer.eod
        if not len(parts[-1][0]) or parts[-1][0][-1] != eod:
            parts.append((np.array([eod]), np.ones(1, np.float32)))
        tokens, weights = zip(*parts, strict=True)
        return np.concatenate(tokens).astype(np.int32), np.concatenate(weights)

    def fitted(self, sample: Sample, counts: Sequence[int], room: int) -> tuple[np.ndarray, np.ndarray]:
        """`tokens` in a row with this room, which has one token more for the last label. Raises UnreadableItem for
        images beyond it, and if no caption or answer is in it."""
        tokens, weights = self.tokens(sample, counts)
        beyond = np.flatnonzero(tokens[room:] == self.image_token)
        if beyond.size:
            detail = f"its image tokens end at position {room + int(beyond[-1]) + 1}, the model's rows have {room}"
            raise UnreadableItem("too long", detail)
        if not weights[1 : room + 1].any():
            detail = f"{len(tokens)} tokens, and no caption or answer in the {room} that a row has"
            raise UnreadableItem("too long", detail)
        return tokens[: room + 1], weights[: room + 1]


class ImageTextRows(ItemRows[ImageTextSamples]):
    """Rows of text with images.

    tokens: int32 [S]; an image or tile is as many image tokens as it has positions, in their order. Padding is 0.
    labels: int32 [S], the token after each input. Padding is 0.
    loss_mask: float32 [S], 1 where the label belongs to a caption or an answer, or ends it.
    positions: int32 [S], from 0.
    padding: bool [S], whether the position has no text.
    images, and more: see `RowImages`.
    """

    def __init__(
        self, items: ImageTextSamples, order: ShuffledOrder, *, length: int, images: RowImages, writer: TextWriter
    ):
        super().__init__(items, order)
        self.length, self.images, self.writer = length, images, writer

    def make(self, item: int, generator: np.random.Generator) -> dict[str, np.ndarray]:
        sample, length = self.items.sample(item, generator), self.length
        counts, row = self.images.arrays(sample.pictures)
        tokens, weights = self.writer.fitted(sample, counts, length)
        parts = {"tokens": tokens[:length], "labels": tokens[1:], "loss_mask": weights[1:]}
        row |= {name: np.pad(part, (0, length - len(part))) for name, part in parts.items()}
        index = np.arange(length, dtype=np.int32)
        return row | {"positions": index, "padding": index >= len(tokens)}


def image_text_rows(config: ImageTextRowsConfig, *, tokenizer: Tokenizer, schema: Schema, seed: int) -> MakeRows:
    """A function (samples, position of the split, number of rows) -> rows, according to the config.

    Raises:
        UserError: the image tokens of tokenizer and model differ, or an image or its tiles do not fit into a row.
    """
    length, images = schema["tokens"].positions(), row_images(config, schema)
    place = schema["images"].placeholder
    assert place is not None
    token = place.token
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
    writer = TextWriter(MarkedText(tokenizer, names_are_text=False), token, config.before, config.after)

    def make(items: ImageTextSamples, position: int, row_count: int | None) -> ImageTextRows:
        order = ShuffledOrder.of(config, row_count, seed, position)
        return ImageTextRows(items, order, length=length, images=images, writer=writer)

    return make


def caption_sample(pictures: Sequence[Picture], prompt: str, caption: str) -> Sample:
    """Images, the prompt, and the caption, which alone has a loss."""
    return Sample(pictures, [*[IMAGE] * len(pictures), TextPiece(prompt, 0), TextPiece(caption, 1)])


NO_VIDEO = "a line with a video: models read images alone"
BLOCK = 1 << 24
LONGEST_LINE = 1 << 30
NEWLINE = 10
LONGEST_PATH = 4096


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

    def __init__(self, paths: Sequence[Path], lines: Lines, config: ImageTextConfig, conversation: Conversation):
        self._paths, self.lines, self._config, self._conversation = paths, lines, config, conversation
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
        lines = Lines(*(values[items] for values in self.lines))
        return ImageTextLines(self._paths, lines, self._config, self._conversation)

    def sample(self, item: int, generator: np.random.Generator) -> Sample:
        """The images and text of a line. Raises UnreadableItem."""
        del generator
        path, size = self._paths[self.lines.files[item]], int(self.lines.sizes[item])
        if size > LONGEST_LINE:
            raise UnreadableItem("too large", f"a line of {size:,} bytes; at most {LONGEST_LINE:,} are read")
        try:
            line = json.loads(read_at(path, int(self.lines.offsets[item]), size))
        except (ValueError, RecursionError) as error:
            raise UnreadableItem("no JSON", json_fault(error)) from error
        if not isinstance(line, Mapping):
            raise UnreadableItem("no JSON", f"expected an object, found {str(line)[:50]!r}")
        folder = Path(self._config.image_folder).expanduser() if self._config.image_folder else path.parent
        return read_line(line, folder, self._conversation, self._config)


def read_line(line: Mapping[str, Any], folder: Path, conversation: Conversation, config: ImageTextConfig) -> Sample:
    """The images and text of a line's object. Raises UnreadableItem."""
    if line.get("video"):
        raise UnreadableItem("video", NO_VIDEO)
    line = _with_markers(line, config.marker)
    images, caption = line.get("image"), line.get("caption")
    sources = images if isinstance(images, list) else [] if images is None else [images]
    if caption is None:
        pieces = _conversation(line, len(sources), conversation, config.marker)
    elif not isinstance(caption, str) or not caption:
        raise UnreadableItem("no caption", f"caption is {str(caption)[:50]!r}")
    elif not sources:
        raise UnreadableItem("caption without an image", "a line with a caption needs an image")
    pictures = [read_picture(source, folder, config.maximum_pixels) for source in sources]
    return Sample(pictures, pieces) if caption is None else caption_sample(pictures, config.prompt, caption)


def _with_markers(line: Mapping[str, Any], marker: str) -> Mapping[str, Any]:
    """A line whose messages may be lists of texts and images, as a line with markers. Raises UnreadableItem."""
    listed, sources, messages = line.get("messages"), list[Any](), list[Any]()
    for message in listed if isinstance(listed, list) else ():
        parts = message.get("content") if isinstance(message, dict) else None
        if not isinstance(parts, list):
            messages.append(message)
            continue
        content = ""
        for part in parts:
            kind = part.get("type") if isinstance(part, dict) else None
            if kind == "text" and isinstance(part.get("text"), str):
                content += part["text"]
            elif kind in ("image", "image_url"):
                source = next((part[key] for key in ("image", "path", "url", "image_url") if key in part), None)
                sources.append(source.get("url") if isinstance(source, dict) else source)
                content += marker
            elif kind == "video":
                raise UnreadableItem("video", NO_VIDEO)
            else:
                raise UnreadableItem("not a conversation", f"a part of a message is {str(part)[:50]!r}")
        messages.append({**message, "content": content})
    return {"image": sources, **line, "messages": messages} if sources or messages != (listed or []) else line


def _conversation(
    line: Mapping[str, Any], images: int, conversation: Conversation, marker: str
) -> list[TextPiece | None]:
    """The text of a conversation, with IMAGE in place of each marker. Raises UnreadableItem."""
    try:
        (messages,) = conversations_of(line, demand_answers=True)
        marked = [message for message in messages if marker in message["content"]]
        if images and not marked:
            first = next((message for message in messages if message["role"] == "user"), messages[0])
            first["content"] = f"{marker * images}\n{first['content']}"
        parts = conversation.parts(messages, image=marker)
    except BadLine as error:
        raise UnreadableItem(error.reason, str(error)) from error
    except TemplateMisfit as error:
        raise UnreadableItem("refused by the template", str(error)) from error
    pieces: list[TextPiece | None] = []
    for part in parts:
        texts = part.text.split(PLACE)
        if part.weight and len(texts) > 1:
            raise UnreadableItem("image marker without image", f"an answer has {marker}")
        for place, text in enumerate(texts):
            pieces += [*[IMAGE] * (place > 0), TextPiece(text, part.weight)]
    places = sum(piece is IMAGE for piece in pieces)
    if places != images:
        reason = "image marker without image" if places > images else "image without a marker"
        raise UnreadableItem(reason, f"{places} x {marker}, images: {images}")
    return pieces


def read_picture(source: object, folder: Path, maximum_pixels: int) -> Picture:
    """An image from a path. Raises UnreadableItem."""
    if not isinstance(source, str) or len(source) > LONGEST_PATH:
        raise UnreadableItem("no image", f"expected a path, found {str(source)[:50]!r}")
    try:
        return StoredPicture(read_bounded(folder / source, maximum_pixels), maximum_pixels)
    except UnreadableItem as error:
        raise UnreadableItem(error.reason, f"{folder / source}: {error}") from error


def build_index(paths: Sequence[Path]) -> Arrays:
    """The fields of `Lines`."""
    parts: list[list[np.ndarray]] = [[], [], [], []]
    total, indexed_bytes = sum(path.stat().st_size for path in paths), 0
    progress = FileProgress("bytes", f"indexing {len(paths)} files of JSON lines")
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


def open_lines(config: ImageTextConfig, tokenizer: Tokenizer, names: Sequence[str]) -> ImageTextLines:
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
    # Data with images writes tokens of its own into messages, such as MultimodalTokenizerConfig.added.
    conversation = Conversation(template_of(config), tokenizer, names_are_text=False)
    text_lines = ImageTextLines(paths, lines, config, conversation)
    text_lines.index_files = arrays.files
    return text_lines


def build_splits(config: ImageTextConfig, *, tokenizer: Tokenizer, schema: Schema, rows: Rows, seed: int) -> Splits:
    """Rows of text with images for the splits that a run requests; see `ImageTextRows`."""
    make = image_text_rows(config, tokenizer=tokenizer, schema=schema, seed=seed)
    return splits_from_paths(config, lambda paths: open_lines(config, tokenizer, paths), rows, make)
