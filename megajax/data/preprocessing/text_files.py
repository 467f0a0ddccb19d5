"""Input files of preprocessing: finding them, reading their text, and dividing it into chunks for several processes.

Offsets are in bytes of the decompressed text.
"""

import glob
import gzip
import io
import os
import re
import zlib
from collections.abc import Buffer, Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Protocol

from megajax.config.class_references import resolve
from megajax.config.errors import UserError
from megajax.config.optional_packages import require
from megajax.config.paths_and_store_urls import store_url
from megajax.config.read_limits import without_mark


class DocumentRule(Protocol):
    """How plain text is divided into documents."""

    def starts(self, previous: bytes, line: bytes) -> bool:
        """Whether a document starts at `line`, which follows `previous`; both include their line ends."""
        ...

    def trim(self, document: bytes) -> bytes | None:
        """The document to tokenize; None if it is not a document."""
        ...


@dataclass(frozen=True, slots=True)
class EachLine:
    """Every line that is not blank is a document, without its line end."""

    def starts(self, previous: bytes, line: bytes) -> bool:
        return True

    def trim(self, document: bytes) -> bytes | None:
        return document.removesuffix(b"\n").removesuffix(b"\r") if document.strip() else None


@dataclass(frozen=True, slots=True)
class EachParagraph:
    """Documents are separated by blank lines, which are dropped; the last line end of a document is removed."""

    def starts(self, previous: bytes, line: bytes) -> bool:
        return not previous.strip() and bool(line.strip())

    def trim(self, document: bytes) -> bytes | None:
        lines = document.split(b"\n")
        while lines and not lines[-1].strip():
            lines.pop()
        while lines and not lines[0].strip():
            lines.pop(0)
        return b"\n".join(lines).removesuffix(b"\r") if lines else None


@dataclass(frozen=True, slots=True)
class MarkedLines:
    """A document starts at each line that contains `pattern` (without the line end); all bytes are kept.

    Text before the first such line is a document too, unless it is blank.
    """

    pattern: re.Pattern[str]

    def starts(self, previous: bytes, line: bytes) -> bool:
        text = line.removesuffix(b"\n").removesuffix(b"\r").decode("utf-8", errors="surrogateescape")
        return self.pattern.search(text) is not None

    def trim(self, document: bytes) -> bytes | None:
        return document if document.strip() else None


@dataclass(frozen=True, slots=True)
class WholeFile:
    """Every file is one document."""

    def starts(self, previous: bytes, line: bytes) -> bool:
        return False

    def trim(self, document: bytes) -> bytes | None:
        return document


SUFFIXES = {"jsonl": (".jsonl", ".ndjson", ".json"), "text": (".txt", ".text"), "parquet": (".parquet",)}
"""Format -> suffixes of its files."""
COMPRESSED_SUFFIXES = (".gz", ".zst")


@dataclass(frozen=True, slots=True)
class TextFile:
    """An input file, or a part of one.

    Attributes:
        format: jsonl, text, parquet, or pairs.
        size: bytes on disk; for a pair, of both files; for a part, its share.
        second: for pairs, the file whose lines correspond to those of `path`.
        start, stop: range of the part: bytes of the text, or row groups of Parquet; stop None: to the end.
        generation, second_generation: of objects in a store, which are read by ranges; b"" for files.
    """

    path: str
    format: str
    size: int
    second: str | None = None
    start: int = 0
    stop: int | None = None
    generation: bytes = b""
    second_generation: bytes = b""

    @property
    def compressed(self) -> bool:
        return self.path.endswith(COMPRESSED_SUFFIXES)


@dataclass(frozen=True, slots=True)
class Chunk:
    """Text of a file that starts at a document, or continues one.

    Attributes:
        start: byte in the file; for Parquet, the row group, which is read only when the chunk is tokenized.
        stored: corresponding bytes on disk, for the progress.
        second: for pairs, the lines that correspond to those of `data`.
        piece: whether the chunk is a part of a document that is a whole file.
        is_last: whether it is the last piece of that document; true for other chunks.
    """

    file: TextFile
    start: int
    data: bytes
    stored: int
    second: bytes = b""
    piece: bool = False
    is_last: bool = True

    def text(self, place: int, data: bytes, path: str | None = None) -> bytes:
        """Bytes of `path`, which begin at byte `place` of the chunk, without a byte order mark at the file's beginning.

        Raises UserError for a file in UTF-16, also if it begins with blank lines.
        """
        if self.start:
            return data
        without_mark((self.data if path is None else self.second)[:4], path or self.file.path)
        return data if place else without_mark(data, path or self.file.path)

    def line_number(self, offset: int) -> int:
        """Line number in the file, from 1, of byte `offset` of the chunk; reads the file up to there."""
        with open_text(self.file.path, self.file.generation) as (stream, _):
            return line_number(stream, self.start + offset)


def line_number(stream: io.BufferedIOBase, offset: int) -> int:
    """Line number, from 1, of byte `offset` of a text; reads the text up to there."""
    lines = 1
    while offset > 0 and (block := stream.read(min(offset, 1 << 20))):
        lines += block.count(b"\n")
        offset -= len(block)
    return lines


def find_files(inputs: Sequence[str], format: str | None = None, option: str = "--input") -> list[TextFile]:
    """Files for paths, patterns (`*`, `?`, `[…]`, `**`) and folders (searched recursively), in the given order.

    All may also be in an object store, s3:// or gs://, without `?`.

    Args:
        format: of all files, one of SUFFIXES; None: by their names.
        option: the command-line option of the inputs, for messages.

    Raises:
        UserError: no file, an unknown suffix, or a duplicate file.
        StoreError: a store does not answer.
    """
    paths: dict[str, str] = {}
    for pattern in inputs:
        matches = _expand(pattern)
        if not matches:
            raise UserError(f"{option} {pattern}: no such file, folder or match. Check the path.")
        for path in matches:
            if paths.setdefault(os.path.realpath(path), path) is not path:
                raise UserError(f"{option}: {path} is given twice, which would repeat its documents. Name it once.")
    formats = {path: _format(path) if format is None else format for path in paths.values()}
    facts = stores("in_parallel")(_facts, formats) if any(map(store_url, formats)) else map(_facts, formats)
    return [
        TextFile(path, kind, size, generation=generation)
        for (path, kind), (size, generation) in zip(formats.items(), facts, strict=True)
    ]


def _facts(path: str) -> tuple[int, bytes]:
    """Bytes on disk; of an object in a store also its generation."""
    if store_url(path) is None:
        return os.stat(path).st_size, b""
    store, name = stores("open_object")(path)
    return store.size(name), store.stamp(name)


def stores(name: str) -> Any:
    """A function of megajax.storage.stores, which imports numpy."""
    return resolve(f"megajax.storage.stores:{name}")


def open_cached_object(path: str, generation: bytes) -> io.BufferedIOBase:
    """An object in a store, open for reading. Raises StoreError; on a read, ChangedFile for another generation."""
    return resolve("megajax.storage.ranged_files:open_cached_object")(path, generation)


def find_pairs(inputs: Sequence[str], targets: Sequence[str], format: str | None = None) -> list[TextFile]:
    """Files of plain text, each with the target file whose lines correspond.

    Raises:
        UserError: those of `find_files`, files of another format, or different numbers of inputs and targets.
    """
    sides = find_files(inputs, format), find_files(targets, format, option="--target")
    for file in (file for side in sides for file in side if file.format != "text"):
        message = f"is {file.format}, but --target pairs the lines of plain text"
        raise UserError(f"{file.path}: {message}. Name keys of one file with --json-keys and --pairs instead.")
    if len(sides[0]) != len(sides[1]):
        message = f"{len(sides[0])} file(s) of --input and {len(sides[1])} of --target: each file needs its target"
        raise UserError(f"{message}. Give both in the same order.")
    pairs = zip(*sides, strict=True)
    return [
        replace(
            source,
            format="pairs",
            size=source.size + target.size,
            second=target.path,
            second_generation=target.generation,
        )
        for source, target in pairs
    ]


def _expand(pattern: str) -> list[str]:
    suffixes = sum(SUFFIXES.values(), ())
    if (url := store_url(pattern)) is not None:
        (store, below), matching = map(stores("open_pattern"), (url, f"{url}/**")), stores("matching")
        objects = [f"{store}/{name}" for name in matching(store, url)]
        names = [] if objects else matching(below, f"{url}/**")
        return objects or [f"{below}/{name}" for name in names if _without_compression(name).endswith(suffixes)]
    if os.path.isdir(pattern):
        every = (os.path.join(folder, name) for folder, _, names in os.walk(pattern) for name in names)
        return sorted(path for path in every if _without_compression(path).endswith(suffixes))
    if os.path.exists(pattern):
        return [pattern]
    return sorted(path for path in glob.glob(pattern, recursive=True) if os.path.isfile(path))


def _without_compression(path: str) -> str:
    for suffix in COMPRESSED_SUFFIXES:
        path = path.removesuffix(suffix)
    return path


def _format(path: str) -> str:
    name = _without_compression(path)
    kind = next((kind for kind, suffixes in SUFFIXES.items() if name.endswith(suffixes)), None)
    if kind is None or (kind == "parquet" and name != path):
        names = f"{', '.join(sum(SUFFIXES.values(), ()))}, text with {' or '.join(COMPRESSED_SUFFIXES)} if compressed"
        message = f"its name does not tell its format (known: {names})"
        raise UserError(f"{path}: {message}. Say --format=jsonl, text or parquet.")
    return kind


ZSTANDARD_BYTES = 1 << 12
"""Bytes of a Zstandard file that are decompressed at a time, to up to 2**15 times as many."""


class _Damaged(Exception):
    """A compressed file that can't be decompressed."""


class _ZstandardText(io.RawIOBase):
    """Text of a Zstandard file of one or more frames; unlike the package's reader, detects a missing end."""

    def __init__(self, file: io.BufferedIOBase, path: str):
        zstandard = require("zstandard", f"{path}, a .zst file,")
        self._file, self._error, self._unpacker = file, zstandard.ZstdError, zstandard.ZstdDecompressor()
        self._frame = None
        self._compressed, self._text = b"", memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Buffer) -> int:
        while not self._text:
            self._compressed = self._compressed or self._file.read(ZSTANDARD_BYTES)
            if not self._compressed:
                if self._frame is not None:
                    raise _Damaged("its end is missing")
                return 0
            self._frame = self._frame or self._unpacker.decompressobj()
            try:
                self._text = memoryview(self._frame.decompress(self._compressed))
            except self._error as error:
                raise _Damaged(str(error)) from error
            self._compressed = self._frame.unused_data
            self._frame = None if self._frame.eof else self._frame
        target = memoryview(buffer)
        size = min(len(target), len(self._text))
        target[:size], self._text = self._text[:size], self._text[size:]
        return size


@contextmanager
def open_text(path: str, generation: bytes = b"") -> Generator[tuple[io.BufferedIOBase, Callable[[], int]]]:
    """The file's text, decompressed by its suffix, and a function that returns the bytes on disk read so far.

    generation: of an object in a store; b"" for a file.

    Raises:
        UserError: the file can't be opened, is damaged, or needs a package that is not installed.
    """
    try:
        file = open_cached_object(path, generation) if generation else open(path, "rb")  # noqa: SIM115
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror or error}.") from error
    with file, unpacked(file, path) as stream:
        yield stream, file.tell


@contextmanager
def unpacked(file: io.BufferedIOBase, path: str) -> Generator[io.BufferedIOBase]:
    """The text of an open file, decompressed by the suffix of its path. Raises UserError as `open_text`."""
    stream: io.BufferedIOBase = file
    if path.endswith(".gz"):
        stream = gzip.GzipFile(fileobj=file)
    elif path.endswith(".zst"):
        stream = io.BufferedReader(_ZstandardText(file, path), 1 << 17)
    try:
        yield stream
    except (EOFError, zlib.error, gzip.BadGzipFile, _Damaged) as error:
        raise UserError(f"{path}: damaged after {file.tell()} bytes: {error}. Copy or pack it again.") from error
