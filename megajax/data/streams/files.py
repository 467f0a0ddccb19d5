"""Files of documents in chunks that are read one by one: row groups, record batches, tar files, ranges of records."""

import glob
import io
import tarfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol

from megajax.config.errors import UserError
from megajax.config.file_paths import store_url
from megajax.config.optional_packages import require
from megajax.config.read_limits import parse_json, without_mark
from megajax.data.preprocessing.text_files import unpacked
from megajax.mesh.processes.peers import Peers
from megajax.mesh.processes.reading_once import read_by_first
from megajax.storage.local_copies import local_copy
from megajax.storage.ranged_files import BlockCache, StoredFile, StoredStream
from megajax.storage.stores import Store, in_parallel, matching, open_pattern

LINES_BYTES = 2**22
"""Bytes of JSON lines in a chunk."""
RECORDS = 1024
"""Records of ArrayRecord in a chunk."""
BUFFER = 1 << 20
"""Bytes of an object that are read at a time."""


class Source(Protocol):
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

    def texts(self, chunk: int) -> Sequence[str | bytes]:
        """The documents of a chunk."""
        ...


class Parquet:
    """A chunk is a row group."""

    def __init__(self, source: Source, key: str):
        self._file, self._key = require("pyarrow.parquet", source.name).ParquetFile(source.seekable()), key
        self.chunks = self._file.num_row_groups

    def texts(self, chunk: int) -> Sequence[str | bytes]:
        return self._file.read_row_group(chunk, columns=[self._key], use_threads=False).column(self._key).to_pylist()


class Arrow:
    """A stream or file of Arrow, as Hugging Face datasets writes it. A chunk is a record batch."""

    def __init__(self, source: Source, key: str):
        arrow = require("pyarrow", source.name)
        content = arrow.memory_map(str(source.local()))
        try:
            self._batches = list(arrow.ipc.open_stream(content))
        except arrow.ArrowInvalid:
            file = arrow.ipc.open_file(content)
            self._batches = [file.get_batch(number) for number in range(file.num_record_batches)]
        self._key, self.chunks = key, len(self._batches)

    def texts(self, chunk: int) -> Sequence[str | bytes]:
        return self._batches[chunk].column(self._key).to_pylist()


class JsonLines:
    """A chunk is the lines that begin in LINES_BYTES; the whole of a compressed file."""

    def __init__(self, source: Source, key: str):
        self._source, self._key, self._plain = source, key, source.name.endswith(".jsonl")
        self.chunks = max(1, -(-source.size // LINES_BYTES)) if self._plain else 1

    def texts(self, chunk: int) -> Sequence[str | bytes]:
        with self._source.open() as file:
            if not self._plain:
                with unpacked(file, self._source.name) as stream:
                    return [self._text(line) for line in io.BufferedReader(stream) if line.strip()]
            lines, start, stop = [], chunk * LINES_BYTES, (chunk + 1) * LINES_BYTES
            if start:
                file.seek(start - 1)
                file.readline()  # the line before, or its end
            while file.tell() < stop and (line := file.readline()):
                lines.append(line)
        return [self._text(line) for line in lines if line.strip()]

    def _text(self, line: bytes) -> str:
        return parse_json(line)[self._key]


class WebDataset:
    """A chunk is the tar file; a document each .txt file, and each .json file with the key."""

    chunks = 1

    def __init__(self, source: Source, key: str):
        self._source, self._key = source, key

    def texts(self, chunk: int) -> Sequence[str | bytes]:
        texts = []
        with self._source.open() as file, tarfile.open(fileobj=file, mode="r:") as tar:
            for member in tar:
                if member.isfile() and member.name.endswith((".txt", ".json")):
                    content: Any = tar.extractfile(member)
                    data = without_mark(content.read(), f"{self._source.name}, {member.name}")
                    texts.append(data if member.name.endswith(".txt") else parse_json(data)[self._key])
        return texts


class ArrayRecord:
    """A chunk is RECORDS records."""

    def __init__(self, source: Source, key: str):
        module = require("array_record.python.array_record_module", source.name)
        self._reader = module.ArrayRecordReader(str(source.local()))
        self._count, self._key = self._reader.num_records(), key
        self.chunks = -(-self._count // RECORDS)

    def texts(self, chunk: int) -> Sequence[str | bytes]:
        records = self._reader.read(chunk * RECORDS, min((chunk + 1) * RECORDS, self._count))
        return [parse_json(record)[self._key] for record in records] if self._key else records


READERS: Mapping[str, Callable[[Source, str], StreamFile]] = MappingProxyType(
    {
        ".parquet": Parquet,
        ".arrow": Arrow,
        ".tar": WebDataset,
        ".array_record": ArrayRecord,
        ".arrayrecord": ArrayRecord,
        ".jsonl": JsonLines,
        ".jsonl.gz": JsonLines,
        ".jsonl.zst": JsonLines,
    }
)
"""Suffix -> reader."""


def open_file(source: Source, key: str) -> StreamFile:
    """Raises UserError for an unknown suffix or a malformed file, OSError."""
    suffix = next((suffix for suffix in READERS if source.name.endswith(suffix)), None)
    if suffix is None:
        raise UserError(f"{source.name}: the suffix is none of {', '.join(READERS)}")
    return guarded(source.name, lambda: READERS[suffix](source, key))


def guarded[T](name: str, read: Callable[[], T]) -> T:
    """The result of a read. Raises UserError for a malformed file, OSError."""
    try:
        return read()
    except (UserError, OSError):
        raise
    except KeyError as error:
        raise UserError(f"{name}: there is no {error} in it: set data.text to the column or key of the text") from error
    except Exception as error:  # of the library of its format
        raise UserError(f"{name} can't be read: {str(error).splitlines()[0] if str(error) else error!r}") from error


def on_disk(pattern: str, key: str) -> list[tuple[Source, int]]:
    """The files that match a pattern, and the number of chunks of each.

    A collective: a file that one process lacks or can't read is a UserError of all. The next source may be in a store.
    """
    files = list[tuple[Source, int]]()

    def look() -> None:
        paths = sorted(map(Path, glob.glob(str(Path(pattern).expanduser()), recursive=True)))
        if not paths:
            raise UserError(f"data: no files match {pattern} (looked for in {Path.cwd()})")
        files.extend((file := DiskFile(path), open_file(file, key).chunks) for path in paths)

    Peers().check(look)
    return files


def in_store(pattern: str, key: str, blocks: BlockCache) -> list[tuple[Source, int]]:
    """The same of a store: process 0 looks, and tells the others. A collective. Raises UserError, StoreError."""

    store = open_pattern(pattern)

    def facts() -> list[tuple[str, int, str, int]]:
        def look(name: str) -> tuple[str, int, str, int]:
            generation, size = store.stamp(name), store.size(name)
            blocks.generations[f"{store.url}/{name}"] = generation
            return name, size, generation.hex(), open_file(StoreFile(store, name, size, blocks), key).chunks

        return in_parallel(look, matching(store, pattern))

    files = list[tuple[Source, int]]()
    for name, size, generation, chunks in read_by_first(facts):
        blocks.generations[f"{store.url}/{name}"] = bytes.fromhex(generation)
        files.append((StoreFile(store, name, size, blocks), chunks))
    return files


class Documents:
    """The files of a pattern as one list of chunks. Raises UserError if there are none, or for an unknown suffix."""

    def __init__(self, pattern: str, key: str, blocks: BlockCache):
        url = store_url(pattern)
        files = on_disk(pattern, key) if url is None else in_store(url, key, blocks)
        if not files:
            raise UserError(f"data: no files match {pattern}")
        self.sources, self._key, self._files = [source for source, _ in files], key, dict[int, StreamFile]()
        self.places = [(number, chunk) for number, (_, chunks) in enumerate(files) for chunk in range(chunks)]
        """File and chunk of each chunk of the list."""

    def texts(self, place: int) -> Sequence[str | bytes]:
        """The documents of a chunk. Raises UserError for a malformed file, OSError."""
        number, chunk = self.places[place]
        source = self.sources[number]
        if number not in self._files:
            self._files[number] = open_file(source, self._key)
        return guarded(source.name, lambda: self._files[number].texts(chunk))
