"""Text corpora: finding files, dividing them into documents, and chunks for several processes.

A chunk consists of complete documents, or is a piece of one if a whole file is one document, so no file is ever in
memory as a whole. Offsets are in bytes of the decompressed text.
"""

import glob
import gzip
import io
import json
import os
import re
import zlib
from collections.abc import Buffer, Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import BinaryIO, Protocol

from megajax.config.errors import UserError
from megajax.config.missing import require

JSON_SUFFIXES = (".jsonl", ".ndjson", ".json")
TEXT_SUFFIXES = (".txt", ".text")
COMPRESSED_SUFFIXES = (".gz", ".zst")


class DocumentRule(Protocol):
    """How plain text is divided into documents."""

    def starts(self, previous: bytes, line: bytes) -> bool:
        """Whether a document starts at `line`, which follows `previous`; both include their line ends."""
        ...

    def trim(self, document: bytes) -> bytes | None:
        """The document to tokenise; None if it is not a document."""
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


@dataclass(frozen=True, slots=True)
class TextFile:
    """An input file. json: JSON lines instead of plain text; size: bytes on disk."""

    path: str
    json: bool
    size: int

    @property
    def compressed(self) -> bool:
        return self.path.endswith(COMPRESSED_SUFFIXES)


@dataclass(frozen=True, slots=True)
class Chunk:
    """Bytes of a file's text, from byte `start` on, which start at a document, or continue one.

    Attributes:
        stored: corresponding bytes on disk, for the progress.
        piece: part of a document that is a whole file; `ends`: its last piece.
    """

    file: TextFile
    start: int
    data: bytes
    stored: int
    piece: bool = False
    ends: bool = True

    def line_number(self, offset: int) -> int:
        """Line number in the file, from 1, of byte `offset` of the chunk; reads the file up to there."""
        lines, left = 1, self.start + offset
        with open_text(self.file.path) as (stream, _):
            while left > 0 and (block := stream.read(min(left, 1 << 20))):
                lines += block.count(b"\n")
                left -= len(block)
        return lines


def find_files(inputs: Sequence[str], json_lines: bool | None = None) -> list[TextFile]:
    """Files for paths, patterns (`*`, `?`, `[…]`, `**`) and folders (searched recursively), in the given order.

    Args:
        json_lines: JSON lines or plain text for all of them; None: by their names.

    Raises:
        UserError: no file, an unknown suffix, or a duplicate file.
    """
    paths: dict[str, str] = {}
    for given in inputs:
        matches = _expand(given)
        if not matches:
            raise UserError(f"--input {given}: no such file, folder or match. Check the path.")
        for path in matches:
            if paths.setdefault(os.path.realpath(path), path) is not path:
                raise UserError(f"--input: {path} is given twice, which would repeat its documents. Name it once.")
    kinds = {path: _is_json(path) if json_lines is None else json_lines for path in paths.values()}
    return [TextFile(path, is_json, os.stat(path).st_size) for path, is_json in kinds.items()]


def _expand(given: str) -> list[str]:
    if os.path.isdir(given):
        every = (os.path.join(folder, name) for folder, _, names in os.walk(given) for name in names)
        return sorted(path for path in every if _without_compression(path).endswith(JSON_SUFFIXES + TEXT_SUFFIXES))
    if os.path.exists(given):
        return [given]
    return sorted(path for path in glob.glob(given, recursive=True) if os.path.isfile(path))


def _without_compression(path: str) -> str:
    for suffix in COMPRESSED_SUFFIXES:
        path = path.removesuffix(suffix)
    return path


def _is_json(path: str) -> bool:
    name = _without_compression(path)
    if not name.endswith(JSON_SUFFIXES + TEXT_SUFFIXES):
        known = f"{', '.join(JSON_SUFFIXES + TEXT_SUFFIXES)}, with {' or '.join(COMPRESSED_SUFFIXES)} if compressed"
        what = f"its name does not tell JSON lines from plain text (known: {known})"
        raise UserError(f"{path}: {what}. Say --format=jsonl or --format=text.")
    return name.endswith(JSON_SUFFIXES)


class _Damaged(Exception):
    """A compressed file that can't be decompressed."""


class _ZstandardText(io.RawIOBase):
    """Text of a Zstandard file of one or more frames; unlike the package's own reader, detects a missing end."""

    def __init__(self, file: BinaryIO, path: str):
        zstandard = require("zstandard", f"{path}, a .zst file,")
        self._file, self._error, self._unpacker = file, zstandard.ZstdError, zstandard.ZstdDecompressor()
        self._frame = None
        self._compressed, self._text = b"", memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Buffer) -> int:
        while not self._text:
            self._compressed = self._compressed or self._file.read(1 << 15)
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
def open_text(path: str) -> Generator[tuple[io.BufferedIOBase, Callable[[], int]]]:
    """The file's text, decompressed by its suffix, and a function that returns the bytes on disk read so far.

    Raises:
        UserError: the file can't be opened, is damaged, or needs a package that is not installed.
    """
    try:
        file = open(path, "rb")  # noqa: SIM115
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror or error}.") from error
    with file:
        stream: io.BufferedIOBase = file
        if path.endswith(".gz"):
            stream = gzip.GzipFile(fileobj=file)
        elif path.endswith(".zst"):
            stream = io.BufferedReader(_ZstandardText(file, path), 1 << 17)
        try:
            yield stream, file.tell
        except (EOFError, zlib.error, gzip.BadGzipFile, _Damaged) as error:
            raise UserError(f"{path}: damaged after {file.tell()} bytes: {error}. Copy or pack it again.") from error


def cut(file: TextFile, rule: DocumentRule, *, size: int, split_point: Callable[[bytes], int]) -> Iterator[Chunk]:
    """Chunks of a file, in order, each of about `size` bytes of text (one document may be larger).

    Args:
        rule: how plain text is divided into documents.
        split_point: where a document may be divided if a whole file is one: `Tokenizer.split_point`.
    """
    rule = EachLine() if file.json else rule
    whole, start, before, data, block = isinstance(rule, WholeFile), 0, 0, b"", b"-"
    with open_text(file.path) as (stream, position):
        while block:
            block = stream.read(size)
            data += block
            if whole:
                place = split_point(data) if block else len(data)
                data, rest = data[:place], data[place:]
            else:
                more, rest = _to_next_start(stream, rule)
                data += more
            if data or (whole and not block):
                stored = position()
                yield Chunk(file, start, data, stored - before, piece=whole, ends=not (whole and block))
                start, before = start + len(data), stored
            data = rest


def _to_next_start(stream: io.BufferedIOBase, rule: DocumentRule) -> tuple[bytes, bytes]:
    """Reads up to the next document start -> (the text before it, its first line; empty at the end of the file)."""
    skipped = [stream.readline(), stream.readline()]
    while line := stream.readline():
        if rule.starts(skipped[-1], line):
            return b"".join(skipped), line
        skipped.append(line)
    return b"".join(skipped), b""


def text_documents(data: bytes, rule: DocumentRule) -> Iterator[tuple[int, bytes]]:
    """Documents of a chunk of plain text, each with its offset in bytes."""
    starts, position, previous = [0], 0, b""
    for line in io.BytesIO(data):
        if position and rule.starts(previous, line):
            starts.append(position)
        position += len(line)
        previous = line
    for start, stop in pairwise([*starts, position]):
        if stop > start and (document := rule.trim(data[start:stop])) is not None:
            yield start, document


def json_lines(data: bytes, *, is_start: bool) -> Iterator[tuple[int, bytes]]:
    """The lines of JSON lines that are not blank, each with its offset in bytes. is_start: of a file."""
    offset = 0
    for line in io.BytesIO(data):
        if line.strip():
            yield offset, line.removeprefix(b"\xef\xbb\xbf") if is_start and offset == 0 else line
        offset += len(line)


def json_texts(line: bytes, keys: Sequence[str]) -> tuple[bytes, ...]:
    """UTF-8 values of the keys. Raises UserError for a line that is no JSON object with a string under each key."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        shown = line[:60].decode("utf-8", errors="replace").rstrip()
        raise UserError(f"not valid JSON ({error}): {shown!r}. Each line must be one JSON object.") from error
    if not isinstance(record, dict):
        raise UserError(f"a JSON {_kind(record)}, but each line must be an object with the keys {', '.join(keys)}.")
    for key in keys:
        if key not in record:
            has = ", ".join(repr(name) for name in record) or "none"
            raise UserError(f"no key {key!r}; the line has {has}. Choose keys with --json-keys.")
        if not isinstance(record[key], str):
            raise UserError(f"key {key!r} holds a {_kind(record[key])}, not a string.")
    # JSON can contain half a surrogate pair, which has no UTF-8 encoding: it is encoded to three bytes.
    return tuple(record[key].encode("utf-8", errors="surrogatepass") for key in keys)


def _kind(value: object) -> str:
    kinds = {dict: "object", list: "list", bool: "boolean", type(None): "null", str: "string"}
    return kinds.get(type(value), "number")
