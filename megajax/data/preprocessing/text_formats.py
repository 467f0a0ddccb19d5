"""Input formats of preprocessing: dividing a file into chunks, and a chunk into documents.

A chunk consists of complete documents, or is a piece of one if a file is a single document, so no file is ever
completely in memory.
"""

import io
import json
import re
from collections.abc import Buffer, Callable, Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, Protocol

from megajax.config.errors import UserError
from megajax.config.optional_packages import require
from megajax.config.read_limits import Budget, Limits, json_fault, too_many_values
from megajax.data.preprocessing.text_files import (
    Chunk,
    DocumentRule,
    EachLine,
    TextFile,
    WholeFile,
    open_cached_object,
    open_text,
)

LIMITS = Limits(bytes=2**31)
"""Of the text up to the next document of a file, which is in memory at once."""
PIECE_BYTES = 2**24
BATCH_ROWS = 1024


class TextFormat(Protocol):
    """Reads the files of one format."""

    def parts(self, file: TextFile, cuts: Sequence[int]) -> list[TextFile]:
        """The file in parts, which begin at the first documents at or after the bytes `cuts` on disk if possible."""
        return [file]

    def chunks(self, file: TextFile, size: int, split_point: Callable[[bytes], int]) -> Iterator[Chunk]:
        """Chunks of a file, in order, each of about `size` bytes of text (one document may be larger).

        split_point: where to divide a document that is a whole file: `Tokenizer.split_point`.
        """
        ...

    def rows(self, chunk: Chunk) -> Iterator[tuple[int, Any]]:
        """(place in the chunk, row) for each row; a row becomes a document per key."""
        ...

    def texts(self, row: Any) -> tuple[bytes, ...]:
        """UTF-8 texts of a row, one for each key. Raises UserError for a row without one of them."""
        ...

    def location(self, chunk: Chunk, place: int) -> str:
        """Location in the file of a place in a chunk, for messages."""
        return f"line {chunk.line_number(place)}"


@dataclass(frozen=True)
class PlainText(TextFormat):
    """Plain text. rule: divides it into documents."""

    rule: DocumentRule

    def parts(self, file: TextFile, cuts: Sequence[int]) -> list[TextFile]:
        if file.compressed or isinstance(self.rule, WholeFile):
            return [file]
        borders = sorted({0, *(_next_start(file, self.rule, offset) for offset in cuts), file.size})
        return [replace(file, start=first, stop=last, size=last - first) for first, last in pairwise(borders)] or [file]

    def chunks(self, file: TextFile, size: int, split_point: Callable[[bytes], int]) -> Iterator[Chunk]:
        is_whole, data, block = isinstance(self.rule, WholeFile), b"", b"-"
        start = before = file.start
        with _open_part(file) as (stream, position):
            while block:
                block = stream.read(size)
                data += block
                if is_whole:
                    place = split_point(data) if block else len(data)
                    data, rest = data[:place], data[place:]
                else:
                    more, rest = _to_next_start(file.path, stream, self.rule)
                    data += more
                if data or (is_whole and not block):
                    stored = position()
                    yield Chunk(file, start, data, stored - before, piece=is_whole, is_last=not (is_whole and block))
                    start, before = start + len(data), stored
                data = rest

    def rows(self, chunk: Chunk) -> Iterator[tuple[int, Any]]:
        starts, position, previous = [0], 0, b""
        for line in io.BytesIO(chunk.data):
            if position and self.rule.starts(previous, line):
                starts.append(position)
            position += len(line)
            previous = line
        for start, stop in pairwise([*starts, position]):
            if stop > start and (document := self.rule.trim(chunk.text(start, chunk.data[start:stop]))) is not None:
                yield start, document

    def texts(self, row: bytes) -> tuple[bytes, ...]:
        return (row,)


@dataclass(frozen=True)
class JsonLines(TextFormat):
    """A JSON object and a document in each line that is not blank; texts under `keys`."""

    keys: tuple[str, ...]
    setting: str = "--json-keys"
    """Names the keys, in messages."""

    def parts(self, file: TextFile, cuts: Sequence[int]) -> list[TextFile]:
        return PlainText(EachLine()).parts(file, cuts)

    def chunks(self, file: TextFile, size: int, split_point: Callable[[bytes], int]) -> Iterator[Chunk]:
        return PlainText(EachLine()).chunks(file, size, split_point)

    def rows(self, chunk: Chunk) -> Iterator[tuple[int, Any]]:
        offset = 0
        for line in io.BytesIO(chunk.data):
            if line.strip():
                yield offset, chunk.text(offset, line)
            offset += len(line)

    def texts(self, row: bytes) -> tuple[bytes, ...]:
        """Raises UserError for a line that is not a JSON object with a string under each key."""
        if problem := too_many_values(row):
            raise UserError(problem)
        try:
            record = json.loads(row)
        except (ValueError, RecursionError) as error:
            text = row[:60].decode("utf-8", errors="replace").rstrip()
            raise UserError(f"not valid JSON ({json_fault(error)}): {text!r}. It must be one JSON object.") from error
        if not isinstance(record, dict):
            keys = ", ".join(self.keys)
            raise UserError(f"a JSON {_kind(record)}, but it must be an object with the keys {keys}.")
        for key in self.keys:
            if key not in record:
                has = ", ".join(repr(name) for name in record) or "none"
                raise UserError(f"no key {key!r}; the object has {has}. Choose keys with {self.setting}.")
            if not isinstance(record[key], str):
                raise UserError(f"key {key!r} holds a {_kind(record[key])}, not a string.")
        # JSON can contain half a surrogate pair, which has no UTF-8 encoding: it is encoded to three bytes.
        return tuple(record[key].encode("utf-8", errors="surrogatepass") for key in self.keys)


@dataclass(frozen=True)
class Parquet(TextFormat):
    """A document in each row; texts in the columns `keys`. A chunk is a row group."""

    keys: tuple[str, ...]
    setting: str = "--json-keys"
    """Names the columns, in messages."""

    def parts(self, file: TextFile, cuts: Sequence[int]) -> list[TextFile]:
        with _open_parquet(file) as parquet:
            groups = parquet.num_row_groups
        borders = sorted({0, *(-(-offset * groups // file.size) for offset in cuts), groups})
        share = file.size / max(groups, 1)
        return [
            replace(file, start=first, stop=last, size=int(last * share) - int(first * share))
            for first, last in pairwise(borders)
        ] or [file]

    def chunks(self, file: TextFile, size: int, split_point: Callable[[bytes], int]) -> Iterator[Chunk]:
        with _open_parquet(file) as parquet:
            groups, schema = parquet.num_row_groups, parquet.schema_arrow
        self.check_columns(file.path, schema)
        stop = groups if file.stop is None else file.stop
        share = file.size / max(stop - file.start, 1)
        for number in range(stop - file.start):
            yield Chunk(file, file.start + number, b"", int((number + 1) * share) - int(number * share))

    def check_columns(self, path: str, schema: Any) -> None:
        """Raises UserError if a column is missing, or not one of strings. schema: of pyarrow."""
        pyarrow = require("pyarrow", path)
        for key in self.keys:
            if key not in schema.names:
                has = ", ".join(schema.names) or "none"
                raise UserError(
                    f"{path}, row 1: no column {key!r}; the file has {has}. Choose columns with {self.setting}."
                )
            if schema.names.count(key) > 1:
                raise UserError(f"{path}, row 1: several columns have the name {key!r}: rename all but one.")
            kind = schema.field(key).type
            kind = kind.value_type if pyarrow.types.is_dictionary(kind) else kind
            texts = (pyarrow.types.is_string, pyarrow.types.is_large_string, pyarrow.types.is_string_view)
            # A column without any value has no type; reading its first row raises the error.
            if not any(is_text(kind) for is_text in (*texts, pyarrow.types.is_null)):
                raise UserError(f"{path}, row 1: column {key!r} holds {kind}, not strings.")

    def rows(self, chunk: Chunk) -> Iterator[tuple[int, Any]]:
        with _open_parquet(chunk.file, self.keys) as parquet:
            yield from self.rows_of(parquet.iter_batches(BATCH_ROWS, row_groups=[chunk.start], columns=list(self.keys)))

    def rows_of(self, batches: Iterable[Any]) -> Iterator[tuple[int, tuple[bytes | None, ...]]]:
        """(number, texts) of each row of record batches of pyarrow. A repeated entry of a dictionary is one object."""
        place, binary = 0, require("pyarrow", "Parquet").binary()

        def texts(column: Any) -> Iterator[bytes | None]:
            if not hasattr(column, "dictionary"):
                return iter(column.cast(binary).to_pylist())
            entries = column.dictionary.cast(binary).to_pylist()
            return (None if index is None else entries[index] for index in column.indices.to_pylist())

        for batch in batches:
            for row in zip(*(texts(batch.column(key)) for key in self.keys), strict=True):
                yield place, row
                place += 1

    def texts(self, row: Any) -> tuple[bytes, ...]:
        """Raises UserError for a row without a value in one of the columns."""
        for key, value in zip(self.keys, row, strict=True):
            if value is None:
                raise UserError(f"column {key!r} is empty (null).")
        return row

    def location(self, chunk: Chunk, place: int) -> str:
        with _open_parquet(chunk.file) as parquet:
            before = sum(parquet.metadata.row_group(group).num_rows for group in range(chunk.start))
        return f"row {before + place + 1}"


@dataclass(frozen=True)
class LinePairs(TextFormat):
    """Two files of plain text with corresponding lines."""

    def chunks(self, file: TextFile, size: int, split_point: Callable[[bytes], int]) -> Iterator[Chunk]:
        start = before = lines = 0
        second = str(file.second)
        with (
            open_text(file.path, file.generation) as (sources, position),
            open_text(second, file.second_generation) as (targets, also),
        ):
            while True:
                source_lines, room = list[bytes](), size
                while room > 0 and (line := read_line(sources, Budget(file.path, LIMITS))):
                    source_lines.append(line)
                    room -= len(line)
                target_lines = [line for _ in source_lines if (line := read_line(targets, Budget(second, LIMITS)))]
                lines += len(target_lines)
                if len(target_lines) < len(source_lines) or (not source_lines and targets.readline(1)):
                    longer, shorter = (file.path, second) if source_lines else (second, file.path)
                    message = f"has no line {lines + 1}, but {longer} has; the lines of both files belong together"
                    raise UserError(f"{shorter} {message}.")
                if not source_lines:
                    return
                data, stored = b"".join(source_lines), position() + also()
                yield Chunk(file, start, data, stored - before, second=b"".join(target_lines))
                start, before = start + len(data), stored

    def rows(self, chunk: Chunk) -> Iterator[tuple[int, Any]]:
        place = 0
        for source, target in zip(io.BytesIO(chunk.data), io.BytesIO(chunk.second), strict=True):
            yield place, (chunk.text(place, source), chunk.text(place, target, chunk.file.second))
            place += len(source)

    def texts(self, row: tuple[bytes, bytes]) -> tuple[bytes, ...]:
        return tuple(line.removesuffix(b"\n").removesuffix(b"\r") for line in row)


def format_of(name: str, rule: DocumentRule, keys: tuple[str, ...]) -> TextFormat:
    """The format of this name."""
    return {"text": PlainText(rule), "jsonl": JsonLines(keys), "parquet": Parquet(keys), "pairs": LinePairs()}[name]


def partitions(
    files: Sequence[TextFile], count: int, formats: Callable[[TextFile], TextFormat]
) -> list[list[TextFile]]:
    """The files in order, as at most `count` lists of files and parts of files of about the same size on disk.

    Compressed files, files that are one document, and pairs of files are not divided.
    """
    total, position = sum(file.size for file in files), 0
    lists: list[list[TextFile]] = [[] for _ in range(count)]
    for file in files:
        cuts = [total * number // count - position for number in range(1, count)]
        for part in formats(file).parts(file, [offset for offset in cuts if 0 < offset < file.size]):
            lists[min(position * count // max(total, 1), count - 1)].append(part)
            position += part.size
    return [files for files in lists if files]


class _Until(io.RawIOBase):
    """A file up to byte `stop`."""

    def __init__(self, file: io.BufferedIOBase, stop: int):
        self._file, self._stop = file, stop

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Buffer) -> int:
        data = self._file.read(min(len(memoryview(buffer)), self._stop - self._file.tell()))
        memoryview(buffer)[: len(data)] = data
        return len(data)


@contextmanager
def _open_part(file: TextFile) -> Generator[tuple[io.BufferedIOBase, Callable[[], int]]]:
    """`open_text` for the part of the file from `start` to `stop`."""
    with open_text(file.path, file.generation) as (stream, position):
        if file.stop is None:
            yield stream, position
        else:
            stream.seek(file.start)
            yield io.BufferedReader(_Until(stream, file.stop)), position


@contextmanager
def _open_parquet(source: TextFile, dictionaries: Sequence[str] = ()) -> Generator[Any]:
    """A pyarrow ParquetFile. Raises UserError for a damaged file or if pyarrow is not installed.

    dictionaries: columns of strings that are read as dictionaries, so that a long text in many rows is in memory once.
    """
    path = source.path
    errors = require("pyarrow", f"{path}, a Parquet file,").lib.ArrowException
    parquet = require("pyarrow.parquet", f"{path}, a Parquet file,")
    try:
        content = open_cached_object(path, source.generation) if source.generation else path
        with parquet.ParquetFile(content, read_dictionary=list(dictionaries)) as file:
            yield file
    except (errors, OSError) as error:
        raise UserError(f"{path}: damaged, or not a Parquet file: {error}. Copy it again.") from error


def _next_start(file: TextFile, rule: DocumentRule, place: int) -> int:
    """Start of the next document after byte `place` of an uncompressed file; its size if none follows."""
    with open_text(file.path, file.generation) as (stream, _):
        stream.seek(place)
        budget = Budget(file.path, LIMITS)
        place += len(read_line(stream, budget))
        previous = read_line(stream, budget)
        place += len(previous)
        while line := read_line(stream, budget):
            if rule.starts(previous, line):
                return place
            place += len(line)
            previous = line
    return file.size


def _to_next_start(path: str, stream: io.BufferedIOBase, rule: DocumentRule) -> tuple[bytes, bytes]:
    """Reads up to the next document start -> (the text before it, its first line; empty at the end of the file)."""
    budget = Budget(path, LIMITS)
    skipped = [read_line(stream, budget), read_line(stream, budget)]
    while line := read_line(stream, budget):
        if rule.starts(skipped[-1], line):
            return b"".join(skipped), line
        skipped.append(line)
    return b"".join(skipped), b""


def read_line(stream: io.BufferedIOBase, budget: Budget) -> bytes:
    """The next line. Raises OverBudget before a line fills the memory: a small compressed file may have a huge one."""
    pieces = [stream.readline(PIECE_BYTES)]
    while len(pieces[-1]) == PIECE_BYTES and not pieces[-1].endswith(b"\n"):
        budget.spend(bytes=PIECE_BYTES)
        pieces.append(stream.readline(PIECE_BYTES))
    budget.spend(bytes=len(pieces[-1]))
    return b"".join(pieces)


def _kind(value: object) -> str:
    kinds = {dict: "object", list: "list", bool: "boolean", type(None): "null", str: "string"}
    return kinds.get(type(value), "number")


ABBREVIATED = (
    "adj al approx assoc ave bd capt cf cie co col corp dept dr ed eds esp est gen gov hon inc jr lt ltd maj messrs "
    "mme mr mrs ms mt pl prof pt pvt rep rev sen sgt sr st supt trans univ viz vs "
    "jan feb mar apr jun jul aug sep sept oct nov dec"
)
COUNTED = "art ch eq fig figs no nos nr op p pp sec vol vols"
ABBREVIATIONS = frozenset(ABBREVIATED.split())
"""Words whose period does not end a sentence."""
NUMBERED = frozenset(COUNTED.split())
"""Words whose period does not end a sentence before a number."""
END = re.compile(
    r"""
      (?<![.!?…]) (?P<mark>[.!?…]++) ["'”’»)\]]*+ (?P<gap>\s++) (?= ["'“‘«(\[]* (?P<next>\w) )   # before the next word
    | [。！？]+ [”’」』）]* \s*   # full-width
    | (?<!\s) [^\S\n]*+ \n (?: [^\S\n]*+ \n )+   # blank lines
    """,
    re.VERBOSE,
)
WORD = re.compile(r"[\w.]+\Z")


def split_sentences(document: bytes) -> Iterator[bytes]:
    """Nonempty sentences of UTF-8 text, without surrounding white space. Bytes of invalid UTF-8 are kept.

    A sentence ends at a blank line, at full-width marks, and at `.`, `!`, `?` or `…` before white space and a word that
    does not start with a lower-case letter. A period after an abbreviation, an initial (J. S. Bach) or a word with an
    inner period (U.S.) does not end a sentence.
    """
    text, start = document.decode("utf-8", errors="surrogateescape"), 0
    for end in END.finditer(text):
        if end["mark"] is None or _ends_sentence(text, end):
            yield from _stripped(text[start : end.end()])
            start = end.end()
    yield from _stripped(text[start:])


def _ends_sentence(text: str, end: re.Match[str]) -> bool:
    if end["gap"].count("\n") > 1:
        return True
    if end["next"].islower():
        return False
    if end["mark"] != ".":
        return True
    # Words are short; a long one is no abbreviation.
    word = WORD.search(text[max(0, end.start() - 20) : end.start()])
    if word is None:
        return True
    name = word[0].lower()
    if name in NUMBERED:
        return not end["next"].isdigit()
    is_initial = len(name) == 1 and word[0].isupper()
    return not (is_initial or "." in name or name in ABBREVIATIONS)


def _stripped(text: str) -> Iterator[bytes]:
    stripped = text.strip()
    if stripped:
        yield stripped.encode("utf-8", errors="surrogateescape")
