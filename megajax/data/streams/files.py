"""Files of documents in chunks that are read one by one: row groups, record batches, tar files, ranges of records."""

import glob
import io
import tarfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol

from megajax.config.errors import UserError
from megajax.config.optional_packages import require
from megajax.config.read_limits import parse_json
from megajax.data.preprocessing.text_files import open_text

LINES_BYTES = 2**22
"""Bytes of JSON lines in a chunk."""
RECORDS = 1024
"""Records of ArrayRecord in a chunk."""


class StreamFile(Protocol):
    """A file of documents. Its methods raise OSError, and any other error for a malformed file."""

    chunks: int
    """Number of chunks."""

    def texts(self, chunk: int) -> Sequence[str | bytes]:
        """The documents of a chunk."""
        ...


class Parquet:
    """A chunk is a row group."""

    def __init__(self, path: Path, key: str):
        self._file, self._key = require("pyarrow.parquet", str(path)).ParquetFile(path), key
        self.chunks = self._file.num_row_groups

    def texts(self, chunk: int) -> Sequence[str | bytes]:
        return self._file.read_row_group(chunk, columns=[self._key]).column(self._key).to_pylist()


class Arrow:
    """A stream or file of Arrow, as Hugging Face datasets writes it. A chunk is a record batch."""

    def __init__(self, path: Path, key: str):
        arrow = require("pyarrow", str(path))
        source = arrow.memory_map(str(path))
        try:
            self._batches = list(arrow.ipc.open_stream(source))
        except arrow.ArrowInvalid:
            file = arrow.ipc.open_file(source)
            self._batches = [file.get_batch(number) for number in range(file.num_record_batches)]
        self._key, self.chunks = key, len(self._batches)

    def texts(self, chunk: int) -> Sequence[str | bytes]:
        return self._batches[chunk].column(self._key).to_pylist()


class JsonLines:
    """A chunk is the lines that begin in LINES_BYTES; the whole of a compressed file."""

    def __init__(self, path: Path, key: str):
        self._path, self._key, self._plain = path, key, path.suffix == ".jsonl"
        self.chunks = max(1, -(-path.stat().st_size // LINES_BYTES)) if self._plain else 1

    def texts(self, chunk: int) -> Sequence[str | bytes]:
        if not self._plain:
            with open_text(str(self._path)) as (stream, _):
                return [self._text(line) for line in io.BufferedReader(stream) if line.strip()]
        lines, start, stop = [], chunk * LINES_BYTES, (chunk + 1) * LINES_BYTES
        with self._path.open("rb") as file:
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

    def __init__(self, path: Path, key: str):
        self._path, self._key = path, key

    def texts(self, chunk: int) -> Sequence[str | bytes]:
        texts = []
        with tarfile.open(self._path, "r:") as tar:
            for member in tar:
                if member.isfile() and member.name.endswith((".txt", ".json")):
                    content: Any = tar.extractfile(member)
                    data = content.read()
                    texts.append(data if member.name.endswith(".txt") else parse_json(data)[self._key])
        return texts


class ArrayRecord:
    """A chunk is RECORDS records."""

    def __init__(self, path: Path, key: str):
        self._reader = require("array_record.python.array_record_module", str(path)).ArrayRecordReader(str(path))
        self._count, self._key = self._reader.num_records(), key
        self.chunks = -(-self._count // RECORDS)

    def texts(self, chunk: int) -> Sequence[str | bytes]:
        records = self._reader.read(chunk * RECORDS, min((chunk + 1) * RECORDS, self._count))
        return [parse_json(record)[self._key] for record in records] if self._key else records


READERS: Mapping[str, Callable[[Path, str], StreamFile]] = MappingProxyType(
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


class Documents:
    """The files of a pattern as one list of chunks. Raises UserError if there are none, or for an unknown suffix."""

    def __init__(self, pattern: str, key: str):
        self.paths = sorted(map(Path, glob.glob(str(Path(pattern).expanduser()), recursive=True)))
        if not self.paths:
            raise UserError(f"data: no files match {pattern} (looked for in {Path.cwd()})")
        self._key, self._files = key, dict[int, StreamFile]()
        self.places = [
            (number, chunk)
            for number, path in enumerate(self.paths)
            for chunk in range(self._guarded(path, lambda number=number: self._file(number).chunks))
        ]
        """File and chunk of each chunk of the list."""

    def texts(self, place: int) -> Sequence[str | bytes]:
        """The documents of a chunk. Raises UserError for a malformed file, OSError."""
        number, chunk = self.places[place]
        return self._guarded(self.paths[number], lambda: self._file(number).texts(chunk))

    def _file(self, number: int) -> StreamFile:
        if number not in self._files:
            path = self.paths[number]
            suffix = next((suffix for suffix in READERS if path.name.endswith(suffix)), None)
            if suffix is None:
                raise UserError(f"{path}: the suffix is none of {', '.join(READERS)}")
            self._files[number] = READERS[suffix](path, self._key)
        return self._files[number]

    def _guarded[T](self, path: Path, read: Callable[[], T]) -> T:
        try:
            return read()
        except (UserError, OSError):
            raise
        except KeyError as error:
            raise UserError(
                f"{path}: there is no {error} in it: set data.text to the column or key of the text"
            ) from error
        except Exception as error:  # of the library of its format
            raise UserError(f"{path} can't be read: {str(error).splitlines()[0] if str(error) else error!r}") from error
