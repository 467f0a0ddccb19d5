"""Files of documents in chunks that are read one by one: row groups, record batches, tar files, ranges of records."""

import glob
import io
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import accumulate, islice
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol

from megajax.config.errors import UserError
from megajax.config.optional_packages import require
from megajax.config.paths_and_store_urls import store_url
from megajax.config.read_limits import Budget, Limits, without_mark
from megajax.data.images.shards import tar_members
from megajax.data.preprocessing.text_files import line_number, unpacked
from megajax.data.preprocessing.text_formats import BATCH_ROWS, PIECE_BYTES, read_line
from megajax.data.preprocessing.text_formats import JsonLines as JsonTexts
from megajax.data.preprocessing.text_formats import Parquet as ParquetTexts
from megajax.processes.peers import Peers
from megajax.processes.reading_once import read_by_first
from megajax.storage.local_copies import local_copy
from megajax.storage.ranged_files import BlockCache, StoredFile, StoredStream
from megajax.storage.stores import Store, in_parallel, matching, open_pattern

LINES_BYTES = 2**22
"""Bytes of JSON lines in a chunk."""
RECORDS = 1024
"""Records of ArrayRecord in a chunk."""
BUFFER = 1 << 20
"""Bytes of an object that are read at a time."""
CHUNK_BYTES = 2**30
CHUNK = Limits(bytes=CHUNK_BYTES, entries=2**24)
"""Of the documents of a chunk, which are in memory at once."""
SAMPLE = 16
"""Documents of a file that are read at the start, to find one that is not text before the first step."""
SETTING = "data.text"


class FileSource(Protocol):
    """A file on a disk or in a store."""

    name: str
    """Path or URL."""
    size: int
    version: tuple[Any, ...]
    """Changes with the content."""

    def open(self) -> io.BufferedIOBase:
        """The file, open for reading. Raises OSError, UserError."""
        ...

    def seekable(self) -> Any:
        """The file for pyarrow: its path, or an open file that reads only the parts that are asked for."""
        ...

    def local(self) -> Path:
        """The whole file on the local disk."""
        ...


class DiskFile:
    """A file on a disk."""

    def __init__(self, path: Path):
        facts, self.name, self._path = path.stat(), str(path), path
        self.size, self.version = facts.st_size, (str(path.absolute()), facts.st_size, facts.st_mtime_ns)

    def open(self) -> io.BufferedIOBase:
        return self._path.open("rb")

    def seekable(self) -> Path:
        return self._path

    def local(self) -> Path:
        return self._path


class StoreFile:
    """An object of a store, of the generation that `blocks` knows."""

    def __init__(self, store: Store, key: str, size: int, blocks: BlockCache):
        self.name, self.size, self._store, self._key, self._blocks = f"{store.url}/{key}", size, store, key, blocks
        self.version = (self.name, size, blocks.generations[self.name].hex())

    def open(self) -> io.BufferedIOBase:
        return io.BufferedReader(self.seekable(), BUFFER)

    def seekable(self) -> StoredStream:
        return StoredStream(StoredFile(self._store, self._key, self.size, self._blocks))

    def local(self) -> Path:
        return local_copy(self._store, self._key, self._blocks)


class StreamFile(Protocol):
    """A file of documents. Its methods raise OSError, and any other error for a malformed file."""

    chunks: int
    """Number of chunks."""

    def texts(self, chunk: int, budget: Budget) -> Iterator[bytes]:
        """The documents of a chunk in UTF-8, whose bytes are taken from the budget. Raises UserError, with the place in
        the file, for a value that is not a text."""
        ...


class JsonFile:
    """Documents under a key of JSON objects."""

    def __init__(self, source: FileSource, key: str):
        self._source, self._format = source, JsonTexts((key,), SETTING)

    def text(self, content: bytes, place: Callable[[], str]) -> bytes:
        """The document of an object. Raises UserError. place: where it is in the file."""
        try:
            return self._format.texts(content)[0]
        except UserError as error:
            raise UserError(f"{self._source.name}, {place()}: {error}") from error


class Columns:
    """Documents in a column of a table."""

    def __init__(self, source: FileSource, key: str, schema: Any, nulls: Iterable[tuple[int, int]]):
        """nulls: number of rows of each chunk, and how many of them are known to have no text."""
        self._name, self._key, self._format = source.name, key, ParquetTexts((key,), SETTING)
        self._format.check_columns(source.name, schema)
        counts = list(nulls)
        self._starts = [0, *accumulate(rows for rows, _ in counts)]
        self.chunks = len(counts)
        for chunk, (_, missing) in enumerate(counts):
            if missing:
                place = f"rows {self._starts[chunk] + 1} to {self._starts[chunk + 1]}"
                raise UserError(f"{source.name}, {place}: column {key!r} is empty (null) in {missing} of them.")

    def texts(self, chunk: int, budget: Budget) -> Iterator[bytes]:
        for place, row in self._format.rows_of(self.batches(chunk)):
            try:
                (text,) = self._format.texts(row)
            except UserError as error:
                raise UserError(f"{self._name}, row {self._starts[chunk] + place + 1}: {error}") from error
            budget.spend(bytes=len(text))
            yield text

    def batches(self, chunk: int) -> Iterator[Any]:
        """The rows of a chunk as record batches."""
        raise NotImplementedError


class ParquetFile(Columns):
    """A chunk is a row group."""

    def __init__(self, source: FileSource, key: str):
        library = require("pyarrow.parquet", source.name)
        file = library.ParquetFile(source.seekable())
        facts, schema = file.metadata, file.schema_arrow
        self._groups = [facts.row_group(number) for number in range(facts.num_row_groups)]
        paths = [facts.schema.column(number).path for number in range(facts.num_columns)]
        self._column = paths.index(key) if key in paths else 0

        def nulls(group: Any) -> int:
            statistics = group.column(self._column).statistics
            return 0 if statistics is None else statistics.null_count or 0

        super().__init__(source, key, schema, ((group.num_rows, nulls(group)) for group in self._groups))
        # As dictionaries, so that a long text in many rows is in memory once.
        self._file = library.ParquetFile(source.seekable(), metadata=facts, read_dictionary=[key])

    def batches(self, chunk: int) -> Iterator[Any]:
        group = self._groups[chunk]
        Budget(self._name, CHUNK).spend(group.num_rows, bytes=group.column(self._column).total_uncompressed_size)
        yield from self._file.iter_batches(BATCH_ROWS, row_groups=[chunk], columns=[self._key], use_threads=False)


class ArrowFile(Columns):
    """A stream or file of Arrow, as Hugging Face datasets writes it. A chunk is a record batch."""

    def __init__(self, source: FileSource, key: str):
        arrow = require("pyarrow", source.name)
        content = arrow.memory_map(str(source.local()))
        try:
            reader = batches = arrow.ipc.open_stream(content)
        except arrow.ArrowInvalid:
            reader = arrow.ipc.open_file(content)
            batches = map(reader.get_batch, range(reader.num_record_batches))
        self._batches, place = list[Any](), reader.schema.get_field_index(key)

        def nulls() -> Iterator[tuple[int, int]]:
            # Columns are mapped, but compressed ones take memory.
            budget = Budget(source.name, Limits(bytes=CHUNK_BYTES + source.size))
            for batch in batches:
                self._batches.append(batch.select([place]))
                column = batch.column(place)
                budget.spend(bytes=getattr(column, "indices", column).nbytes)
                yield len(batch), column.null_count

        super().__init__(source, key, reader.schema, nulls())

    def batches(self, chunk: int) -> Iterator[Any]:
        batch = self._batches[chunk]
        return (batch.slice(start, BATCH_ROWS) for start in range(0, len(batch), BATCH_ROWS))


class JsonLinesFile(JsonFile):
    """A chunk is the lines that begin in LINES_BYTES; the whole of a compressed file."""

    def __init__(self, source: FileSource, key: str):
        super().__init__(source, key)
        self._plain = source.name.endswith(".jsonl")
        self.chunks = max(1, -(-source.size // LINES_BYTES)) if self._plain else 1

    def texts(self, chunk: int, budget: Budget) -> Iterator[bytes]:
        place, stop = (chunk * LINES_BYTES, (chunk + 1) * LINES_BYTES) if self._plain else (0, sys.maxsize)
        with self._source.open() as file, unpacked(file, self._source.name) as stream:
            if place:
                place, piece = place - 1, b""
                stream.seek(place)
                while place < stop and not piece.endswith(b"\n"):  # the line before, or its end
                    piece = stream.readline(PIECE_BYTES)
                    place = place + len(piece) if piece else stop
            while place < stop and (line := read_line(stream, budget)):
                if not line.strip():
                    budget.spend(1)
                else:
                    yield self.text(line, lambda place=place: f"line {self._number(place)}")
                place += len(line)

    def _number(self, place: int) -> int:
        with self._source.open() as file, unpacked(file, self._source.name) as stream:
            return line_number(stream, place)


class WebDatasetFile(JsonFile):
    """A chunk is the tar file; a document each .txt file, and each .json file with the key."""

    chunks = 1

    def texts(self, chunk: int, budget: Budget) -> Iterator[bytes]:
        with self._source.open() as file:

            def part(start: int, size: int) -> bytes:
                file.seek(start)
                return file.read(size)

            for name, start, size in tar_members(part, self._source.size):
                if name.endswith((".txt", ".json")):
                    budget.spend(bytes=size)
                    content = without_mark(part(start, size), f"{self._source.name}, {name}")
                    yield content if name.endswith(".txt") else self.text(content, lambda name=name: name)


class ArrayRecordFile(JsonFile):
    """A chunk is RECORDS records."""

    def __init__(self, source: FileSource, key: str):
        super().__init__(source, key)
        module = require("array_record.python.array_record_module", source.name)
        self._reader, self._key = module.ArrayRecordReader(str(source.local())), key
        self._count = self._reader.num_records()
        self.chunks = -(-self._count // RECORDS)

    def texts(self, chunk: int, budget: Budget) -> Iterator[bytes]:
        first = chunk * RECORDS
        records = self._reader.read(first, min(first + RECORDS, self._count))
        budget.spend(bytes=sum(map(len, records)))
        for number, record in enumerate(records, first + 1):
            yield self.text(record, lambda number=number: f"record {number}") if self._key else record


READERS: Mapping[str, Callable[[FileSource, str], StreamFile]] = MappingProxyType(
    {
        ".parquet": ParquetFile,
        ".arrow": ArrowFile,
        ".tar": WebDatasetFile,
        ".array_record": ArrayRecordFile,
        ".arrayrecord": ArrayRecordFile,
        ".jsonl": JsonLinesFile,
        ".jsonl.gz": JsonLinesFile,
        ".jsonl.zst": JsonLinesFile,
    }
)
"""Suffix -> reader."""


def open_file(source: FileSource, key: str) -> StreamFile:
    """Raises UserError for an unknown suffix, a malformed file, or one without a column of texts; OSError."""
    suffix = next((suffix for suffix in READERS if source.name.endswith(suffix)), None)
    if suffix is None:
        plain = "; plain text becomes token files for BlendConfig: python -m megajax.preprocess --input {0} ..."
        hint = plain.format(source.name) if source.name.endswith((".txt", ".md")) else ""
        raise UserError(f"{source.name}: the suffix is none of {', '.join(READERS)}{hint}")
    return guarded(source.name, lambda: READERS[suffix](source, key))


def read_texts(file: StreamFile, name: str, chunk: int, most: int | None = None) -> list[bytes]:
    """The documents of a chunk, or the first `most`. Raises UserError for what is malformed or too large, OSError."""

    def texts() -> Iterator[bytes]:
        budget = Budget(name, CHUNK)
        for text in islice(file.texts(chunk, budget), most):
            budget.spend(1)
            yield text

    return guarded(name, lambda: list(texts()))


def chunks_of(source: FileSource, key: str) -> int:
    """The number of chunks of a file, whose first documents are read to check them. Raises as `read_texts`."""
    file = open_file(source, key)
    if file.chunks and not isinstance(file, Columns):  # which have a type
        read_texts(file, source.name, 0, SAMPLE)
    return file.chunks


def guarded[T](name: str, read: Callable[[], T]) -> T:
    """The result of a read. Raises UserError for a malformed file, OSError."""
    try:
        return read()
    except (UserError, OSError):
        raise
    except Exception as error:  # of the library of its format
        raise UserError(f"{name} can't be read: {(str(error) or repr(error)).splitlines()[0]}") from error


def on_disk(pattern: str, key: str) -> list[tuple[FileSource, int]]:
    """The files that match a pattern, and the number of chunks of each.

    A collective: a file that one process lacks or can't read is a UserError of all. The next source may be in a store.
    """
    files = list[tuple[FileSource, int]]()

    def look() -> None:
        paths = sorted(map(Path, glob.glob(str(Path(pattern).expanduser()), recursive=True)))
        if not paths:
            raise UserError(f"data: no files match {pattern} (looked for in {Path.cwd()})")
        files.extend((file := DiskFile(path), chunks_of(file, key)) for path in paths)

    Peers().check(look)
    return files


def in_store(pattern: str, key: str, blocks: BlockCache) -> list[tuple[FileSource, int]]:
    """The same of a store: process 0 looks, and tells the others. A collective. Raises UserError, StoreError."""
    store = open_pattern(pattern)

    def facts() -> list[tuple[str, int, str, int]]:
        def look(name: str) -> tuple[str, int, str, int]:
            generation, size = store.stamp(name), store.size(name)
            blocks.generations[f"{store.url}/{name}"] = generation
            return name, size, generation.hex(), chunks_of(StoreFile(store, name, size, blocks), key)

        return in_parallel(look, matching(store, pattern))

    files = list[tuple[FileSource, int]]()
    for name, size, generation, chunks in read_by_first(facts):
        blocks.generations[f"{store.url}/{name}"] = bytes.fromhex(generation)
        files.append((StoreFile(store, name, size, blocks), chunks))
    return files


class StreamDocuments:
    """The files of a pattern as one list of chunks. Raises UserError if there are none, or for an unknown suffix."""

    def __init__(self, pattern: str, key: str, blocks: BlockCache):
        url = store_url(pattern)
        files = on_disk(pattern, key) if url is None else in_store(url, key, blocks)
        if not files:
            raise UserError(f"data: no files match {pattern}")
        self.sources, self._key, self._files = [source for source, _ in files], key, dict[int, StreamFile]()
        self.places = [(number, chunk) for number, (_, chunks) in enumerate(files) for chunk in range(chunks)]
        """File and chunk of each chunk of the list."""

    def texts(self, place: int) -> Sequence[bytes]:
        """The documents of a chunk, in UTF-8. Raises UserError for a malformed file or one too large, OSError."""
        number, chunk = self.places[place]
        source = self.sources[number]
        if number not in self._files:
            self._files[number] = open_file(source, self._key)
        return read_texts(self._files[number], source.name, chunk)
