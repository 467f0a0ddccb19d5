"""JSON lines of images with captions or conversations."""

import base64
import binascii
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from megajax.batch import Schema
from megajax.config.errors import UserError
from megajax.data.cache import Arrays, load_or_build, user_cache
from megajax.data.config import ImageTextConfig
from megajax.data.image_decoding import Picture, StoredPicture, check_bytes, read_at, read_bounded
from megajax.data.image_text import IMAGE, Sample, Text, captioned, image_text_rows
from megajax.data.item_rows import UnreadableItem, rows_of_splits, split_rows
from megajax.data.progress import Progress
from megajax.data.splits import Rows, Splits

BLOCK = 1 << 24
LONGEST_LINE = 1 << 30
NEWLINE = 10
DATA_URL = "data:"
BASE64_STARTS = ("/9j/", "iVBORw0KGgo", "R0lGOD", "UklGR")
"""How JPEG, PNG, GIF and WebP begin in base64."""
QUESTIONS, ANSWERS, OTHERS = ("human", "user"), ("gpt", "assistant"), ("system",)
"""Roles of the turns of a conversation."""


class Lines(NamedTuple):
    """Where the lines of files lie; arrays [lines], without empty lines."""

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

    def __len__(self) -> int:
        return len(self.lines.sizes)

    def name(self, item: int) -> str:
        """File and number of the line."""
        return f"{self._paths[self.lines.files[item]]}:{self.lines.numbers[item]}"

    def groups(self) -> list[np.ndarray]:
        """All lines as one group."""
        return [np.arange(len(self))]

    def subset(self, chosen: np.ndarray) -> "ImageTextLines":
        """Only these lines."""
        return ImageTextLines(self._paths, Lines(*(values[chosen] for values in self.lines)), self._config)

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
        return read_line(line, folder, self._config)


def read_line(line: Mapping[str, Any], folder: Path, config: ImageTextConfig) -> Sample:
    """The images and text of a line's object. Raises UnreadableItem."""
    sources = line.get("image")
    sources = sources if isinstance(sources, list) else [] if sources is None else [sources]
    turns = line.get("conversations", line.get("messages"))
    caption = line.get("caption")
    if turns is None and not isinstance(caption, str):
        raise UnreadableItem("no text", f"expected caption, conversations or messages; it has {', '.join(line)}")
    if turns is None and not sources:
        raise UnreadableItem("caption without an image", f"image is {line.get('image')!r}")
    pieces = [] if turns is None else conversation(turns, config)
    places = sum(piece is IMAGE for piece in pieces)
    if places > len(sources):
        raise UnreadableItem("image marker without image", f"{places} x {config.marker}, {len(sources)} images")
    if 0 < places < len(sources):
        raise UnreadableItem("image without a marker", f"{places} x {config.marker}, {len(sources)} images")
    pictures = [read_picture(source, folder, config.maximum_pixels) for source in sources]
    if turns is None:
        return captioned(pictures, config.prompt, str(caption))
    return Sample(pictures, pieces if places else [*[IMAGE] * len(pictures), *pieces])


def conversation(turns: Any, config: ImageTextConfig) -> list[Text | None]:
    """The turns of a conversation as text, with IMAGE for each marker. Raises UnreadableItem."""
    pieces: list[Text | None] = []
    for turn in turns if isinstance(turns, list) else [turns]:
        fields = turn if isinstance(turn, Mapping) else {}
        role, text = fields.get("from", fields.get("role")), fields.get("value", fields.get("content"))
        if not isinstance(text, str):
            raise UnreadableItem("no text", f"expected a turn with from and value, found {str(turn)[:80]!r}")
        if role in ANSWERS:
            if config.marker in text:
                raise UnreadableItem("image marker without image", f"an answer has {config.marker}")
            before, _, after = config.answer.partition("{}")
            pieces += [Text(before), Text(text.strip() + after, counts=True)]
        elif role in (*QUESTIONS, *OTHERS):
            form = config.question if role in QUESTIONS else "{} "
            parts = form.replace("{}", text.strip()).split(config.marker)
            pieces += [Text(parts[0])]
            for part in parts[1:]:
                pieces += [IMAGE, Text(part)]
        else:
            known = ", ".join((*QUESTIONS, *ANSWERS, *OTHERS))
            raise UnreadableItem("unknown role", f"a turn of {role!r}; the roles are {known}")
    if not any(piece is not IMAGE and piece.counts for piece in pieces):
        raise UnreadableItem("no answer", f"{len(pieces)} turns, and none of {' or '.join(ANSWERS)}")
    return [piece for piece in pieces if piece is IMAGE or piece.text or piece.counts]


def read_picture(source: object, folder: Path, maximum_pixels: int) -> Picture:
    """An image by its path or from base64. Raises UnreadableItem."""
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
    total, done = sum(path.stat().st_size for path in paths), 0
    progress = Progress("bytes", f"indexing {len(paths)} files of JSON lines")
    for number, path in enumerate(paths):
        ends = [np.array([-1], np.int64)]
        place = 0
        with path.open("rb") as file:
            while block := file.read(BLOCK):
                ends.append(np.flatnonzero(np.frombuffer(block, np.uint8) == NEWLINE) + place)
                place += len(block)
                progress(done + place, (done + place) / total)
        done += place
        borders = np.concatenate([*ends, np.array([place], np.int64)])
        offsets, sizes = borders[:-1] + 1, np.diff(borders) - 1
        kept = np.flatnonzero(sizes > 1)  # neither an empty line nor one with a carriage return
        values = (np.full(len(kept), number, np.int32), kept + 1, offsets[kept], sizes[kept])
        for part, value in zip(parts, values, strict=True):
            part.append(value)
    progress.clear()
    return Lines(*map(np.concatenate, parts))._asdict()


def open_lines(config: ImageTextConfig, names: Sequence[str]) -> ImageTextLines:
    """The lines of files. Their index is cached under the files' names, sizes and dates.

    Raises UserError: no such file, one without lines, or with one JSON list in place of lines.
    """
    paths = [Path(name).expanduser() for name in names]
    if absent := [str(path) for path in paths if not path.is_file()]:
        raise UserError(f"data: no such file: {', '.join(absent)} (looked for in {Path.cwd()})")
    for path in paths:
        with path.open("rb") as file:
            if file.read(1) == b"[":
                raise UserError(
                    f"{path}: is one JSON list. Write a line for each entry: jq -c '.[]' {path} > NEW.jsonl"
                )
    facts = [[path.name, path.stat().st_size, path.stat().st_mtime_ns] for path in paths]
    folder = Path(config.cache_dir) if config.cache_dir else user_cache() / "indices"
    arrays = load_or_build(folder, {"kind": "lines", "files": facts}, lambda: build_index(paths))
    lines = Lines(**arrays)
    if not len(lines.sizes):
        raise UserError(f"{', '.join(map(str, paths))}: no lines")
    return ImageTextLines(paths, lines, config)


def build_splits(config: ImageTextConfig, *, tokenizer: Any, schema: Schema, rows: Rows, seed: int) -> Splits:
    """Rows of text with images for the splits that a run requests; see `ImageTextRows`."""
    make = image_text_rows(config, tokenizer=tokenizer, schema=schema, seed=seed)
    if config.paths:
        return split_rows(open_lines(config, config.paths), config.split, rows, make, config.paths[0])

    def own(name: str) -> ImageTextLines | None:
        names = getattr(config, f"{name}_paths")
        return open_lines(config, names) if names else None

    return rows_of_splits(own, rows, make)
