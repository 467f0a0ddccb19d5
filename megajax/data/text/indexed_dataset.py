"""Reading and writing token files: the `.bin`/`.idx` pairs of Megatron-LM's preprocessing.

PREFIX.bin holds the tokens of all sequences back to back, nothing else. PREFIX.idx, little-endian throughout:

    bytes      field
    0..8       "MMIDIDX" and two zero bytes
    9..16      uint64 version, 1
    17         uint8 dtype code (1 uint8, 2 int8, 3 int16, 4 int32, 5 int64, 6 float64, 7 float32, 8 uint16)
    18..25     uint64 N, number of sequences
    26..33     uint64 D, entries of the document table (documents + 1)
    34..       N int32 lengths in tokens · N int64 byte offsets into .bin · D int64 document table ·
               N int8 modes (multimodal files only)

Entry d of the document table is the first sequence of document d; its last entry is N.
"""

import hashlib
import mmap
import os
import shutil
import struct
import uuid
from array import array
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import BinaryIO, Self

import numpy as np

from megajax.config.errors import UserError
from megajax.config.paths_and_store_urls import store_url
from megajax.data.progress_line import FileProgress
from megajax.storage.index_cache import content_digest
from megajax.storage.local_copies import local_copy
from megajax.storage.ranged_files import BlockCache, StoredFile
from megajax.storage.retried_reads import ReadFile, with_retries
from megajax.storage.stores import open_object
from megajax.storage.write_errors import write_fault

MAGIC = b"MMIDIDX\x00\x00"
VERSION = 1
HEADER_BYTES = 34
CODES = (None, "<u1", "<i1", "<i2", "<i4", "<i8", "<f8", "<f4", "<u2")
"""Dtype code (the position in this tuple) -> numpy dtype name."""
UINT16_VOCABULARY = 65500
"""Vocabularies below this size are stored as uint16, all others as int32."""
PREFIX_HINT = (
    "A data path is a prefix: PREFIX.bin and PREFIX.idx must both exist (python -m megajax.preprocess writes them"
)
DAMAGED = "The file is damaged or not an index of tokens: write it again, or delete it if it is the copy of an object."
CHECK_ROWS = 1 << 22
"""Table entries that are checked at a time, to limit memory. A larger index is not checked whole when it is opened."""


def token_dtype(vocabulary_size: int | None) -> np.dtype:
    """Stored dtype for this vocabulary size: uint16 below 65500, int32 otherwise or if unknown."""
    small = vocabulary_size is not None and vocabulary_size < UINT16_VOCABULARY
    return np.dtype("<u2" if small else "<i4")


def index_path(prefix: Path | str) -> Path:
    """PREFIX -> PREFIX.idx (a dot inside the prefix is part of the name)."""
    return Path(f"{prefix}.idx")


def tokens_path(prefix: Path | str) -> Path:
    """PREFIX -> PREFIX.bin."""
    return Path(f"{prefix}.bin")


def _fault(path: Path, field: str, offset: int, expected: object, actual: object, hint: str = "") -> UserError:
    text = f"{path}: {field} at byte {offset}: expected {expected}, found {actual}."
    return UserError(f"{text} {hint or DAMAGED}")


type SequencePart = tuple[int, int, int | None]
"""(sequence, first token, one past the last token) of a part of a sequence; None: to the end of the sequence."""


class IndexedTokens:
    """A validated token file; its index is memory-mapped, its tokens are read by position.

    Opening it checks the header and the sizes of both files, and every entry of an index of up to `CHECK_ROWS`
    sequences. Larger ones are checked by `identity`, once.

    Attributes:
        prefix: path without `.bin` / `.idx`, or the URL in an object store.
        dtype: dtype of the stored tokens.
        lengths: int32 [N], tokens per sequence.
        offsets: int64 [N], byte offset of each sequence in `.bin`.
        document_table: int64 [D], first sequence of each document, then N.
        modes: int8 [N] for multimodal files, else None.
        file: the open `.bin`.
        total: tokens of all sequences.

    Raises:
        UserError: a file is missing or a field of the index is invalid; names file, field, byte offset, and the
            expected and actual value. ReadError: the disk or file server fails.
    """

    def __init__(self, prefix: Path | str, *, multimodal: bool = False, blocks: BlockCache | None = None):
        """blocks: of files in an object store; None: in the user's cache folder."""
        self.prefix, index, open_tokens_file = _pair(prefix, blocks)
        self._index_path = index
        self._index = with_retries(lambda: ReadFile(index), str(index))
        buffer = _map(index)
        self.dtype, sequences, entries = _header(index, buffer, multimodal)
        self._width = self.dtype.itemsize
        lengths_at = HEADER_BYTES
        offsets_at = lengths_at + 4 * sequences
        documents_at = offsets_at + 8 * sequences
        modes_at = documents_at + 8 * entries
        # Look-ups in these views take a quarter of the time of arrays.
        view = memoryview(buffer)
        self._lengths = view[lengths_at:offsets_at].cast("i")
        self._offsets = view[offsets_at:documents_at].cast("q")
        self.lengths = np.frombuffer(buffer, "<i4", sequences, lengths_at)
        self.offsets = np.frombuffer(buffer, "<i8", sequences, offsets_at)
        self.document_table = np.frombuffer(buffer, "<i8", entries, documents_at)
        self.modes = np.frombuffer(buffer, "<i1", sequences, modes_at) if multimodal else None
        if sequences <= CHECK_ROWS:
            self.check_tables()
        total = int(self.offsets[-1]) + int(self.lengths[-1]) * self.dtype.itemsize if sequences else 0
        self.file = open_tokens_file(total)
        size = self.file.size
        if size != total:
            raise UserError(
                f"{self.file.path}: expected {total} bytes (the lengths in {index.name} add up to "
                f"{total // self.dtype.itemsize} tokens of {self.dtype.name}), found {size} bytes. "
                "The file is cut short or belongs to another index: write both again."
            )
        self.total = total // self.dtype.itemsize

    def __len__(self) -> int:
        """Number of sequences."""
        return len(self.lengths)

    @property
    def documents(self) -> int:
        """Number of documents, empty ones included."""
        return len(self.document_table) - 1

    def sequence(self, number: int, start: int = 0, stop: int | None = None) -> np.ndarray:
        """Tokens [start, stop) of a sequence (to its end when stop is None). Raises as `gather`."""
        return self.gather([(number, start, stop)])[0]

    def gather(self, pieces: Sequence[SequencePart]) -> tuple[np.ndarray, list[int]]:
        """Concatenated tokens of parts of sequences, and the start of each part in them.

        Raises:
            ChangedFile: one of the two files has been truncated since it was opened.
            OSError: the disk or file server fails.
        """
        self._demand_index(pieces[0][0])
        parts, starts, total = [], [], 0
        lengths, offsets, width = self._lengths, self._offsets, self._width
        for number, start, stop in pieces:
            length = lengths[number]
            count = (length if stop is None or stop > length else stop) - start
            if count < 0:
                count = 0
            parts.append((offsets[number] + start * width, count * width))
            starts.append(total)
            total += count
        return self.file.read(parts, self.dtype, lambda part: f"sequence {pieces[part][0]}"), starts

    def document(self, number: int) -> np.ndarray:
        """All tokens of a document. Raises as `gather`."""
        self._demand_index(number)
        return self.read(*self.document_table[number : number + 2].tolist())

    def read(self, first: int, last: int) -> np.ndarray:
        """All tokens of sequences [first, last), which are contiguous. Raises as `gather`."""
        if first == last:
            return np.zeros(0, self.dtype)
        self._demand_index(first)
        begin = int(self.offsets[first])
        end = int(self.offsets[last - 1]) + int(self.lengths[last - 1]) * self.dtype.itemsize
        return self.file.read([(begin, end - begin)], self.dtype, lambda _: f"sequences {first} to {last - 1}")

    def _demand_index(self, number: int) -> None:
        """Raises ChangedFile if the index has been truncated: a look-up would kill the process."""
        if self._index.size_now() < self._index.size:
            raise self._index.changed(f"number {number} cannot be looked up")

    def read_all(self) -> np.ndarray:
        """All tokens of `.bin` [total], in `dtype`, read into memory at once."""
        return self.read(0, len(self))

    def files(self) -> tuple[Path | str, ...]:
        """The files that are read, or the URLs of objects."""
        stored = isinstance(self.file, StoredFile)
        return self.file.path, f"{self.prefix}.idx" if stored else self._index_path

    def document_of(self, sequence: int) -> int:
        """Number of the document that contains a sequence."""
        return int(np.searchsorted(self.document_table, sequence, side="right")) - 1

    def check_tables(self) -> None:
        """Checks every entry of the index. Raises UserError as the constructor."""
        index, sequences = self._index_path, len(self)
        _check_sequences(index, self.lengths, self.offsets, self.dtype.itemsize)
        _check_documents(index, self.document_table, sequences, HEADER_BYTES + 12 * sequences)

    def identity(self, folder: Path) -> str:
        """SHA-256 of the content of `.idx` and the size of `.bin`: independent of names and dates.

        The content is read once, with a check of every entry of the index, until the file changes; see
        `content_digest`. folder: folder of cache files.

        Raises UserError: a damaged index. ReadError: the disk or file server fails.
        """
        # A failed read raises an error; an unreadable page of the memory map would kill the process.
        content = content_digest(folder, self._index_path, self.check_tables)
        return hashlib.sha256(content + struct.pack("<Q", self.file.size)).hexdigest()


type _Opening = Callable[[int], ReadFile | StoredFile]
"""Opens the tokens, given the bytes that they should have."""


def _pair(prefix: Path | str, blocks: BlockCache | None) -> tuple[Path | str, Path, _Opening]:
    """The prefix, the index and how to open the tokens."""
    if (url := store_url(prefix)) is not None:
        blocks, (store, name) = blocks or BlockCache(), open_object(url)
        index = local_copy(store, f"{name}.idx", blocks, f". {PREFIX_HINT}; copy both there)")
        return url, index, lambda size: StoredFile(store, f"{name}.bin", size, blocks)
    index, tokens = index_path(prefix), tokens_path(prefix)
    for path in (index, tokens):
        if not path.is_file():
            raise UserError(f"{path}: no such file. {PREFIX_HINT}).")
    return Path(prefix), index, lambda size: with_retries(lambda: ReadFile(tokens), str(tokens))


def integer_tokens(prefix: Path | str, blocks: BlockCache | None = None, *, prefetch: bool = False) -> IndexedTokens:
    """A token file of integer ids. Raises UserError as `IndexedTokens`, and for floating-point numbers.

    prefetch: read all of a file in an object store into `blocks` first.
    """
    tokens = IndexedTokens(prefix, blocks=blocks)
    if prefetch and isinstance(tokens.file, StoredFile):
        tokens.file.prefetch(FileProgress("MiB", f"reading {tokens.file.path}"))
    if tokens.dtype.kind not in "iu":
        raise UserError(f"{prefix}: stored as {tokens.dtype.name}, but tokens must be integers.")
    return tokens


def _map(path: Path) -> mmap.mmap | bytes:
    """Read-only memory map; b"" for an empty file, which cannot be mapped."""
    with path.open("rb") as file:
        if os.fstat(file.fileno()).st_size == 0:
            return b""
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)


def _header(path: Path, buffer: mmap.mmap | bytes, multimodal: bool) -> tuple[np.dtype, int, int]:
    """Checked header -> (dtype, sequences, entries of the document table)."""
    if len(buffer) < HEADER_BYTES:
        raise _fault(path, "header", 0, f"at least {HEADER_BYTES} bytes", f"{len(buffer)} bytes")
    if buffer[: len(MAGIC)] != MAGIC:
        raise _fault(path, "magic", 0, MAGIC, bytes(buffer[: len(MAGIC)]))
    version, code, sequences, entries = struct.unpack_from("<QBQQ", buffer, len(MAGIC))
    if version != VERSION:
        raise _fault(path, "version", 9, VERSION, version)
    if not 1 <= code < len(CODES):
        raise _fault(path, "dtype code", 17, f"1 to {len(CODES) - 1}", code)
    if entries < 1:
        raise _fault(path, "entries of the document table", 26, "at least 1", entries)
    plain = HEADER_BYTES + 12 * sequences + 8 * entries
    expected = plain + (sequences if multimodal else 0)
    if len(buffer) != expected:
        hint = ""
        if len(buffer) in (plain, plain + sequences):
            kind = "without" if multimodal else "with"
            hint = f"The size fits a file {kind} modes: open it with multimodal={not multimodal}."
        counts = f"{expected} bytes for {sequences} sequences and {entries} entries of the document table"
        raise _fault(path, "file size (counts)", 18, counts, f"{len(buffer)} bytes", hint)
    return np.dtype(CODES[code]), sequences, entries


def _check_sequences(path: Path, lengths: np.ndarray, offsets: np.ndarray, itemsize: int) -> int:
    """Checks that lengths are not negative and offsets are their exclusive cumulative sum in bytes. -> total bytes."""
    total, sequences = 0, len(lengths)
    for start in range(0, sequences, CHECK_ROWS):
        part = lengths[start : start + CHECK_ROWS].astype(np.int64)
        if part.min() < 0:
            row = start + int(np.argmax(part < 0))
            raise _fault(path, f"length of sequence {row}", HEADER_BYTES + 4 * row, "0 or more", int(lengths[row]))
        sequence_ends = total + np.cumsum(part * itemsize)
        expected = sequence_ends - part * itemsize
        is_wrong = expected != offsets[start : start + CHECK_ROWS]
        if is_wrong.any():
            row = start + int(np.argmax(is_wrong))
            at = HEADER_BYTES + 4 * sequences + 8 * row
            raise _fault(path, f"offset of sequence {row}", at, int(expected[row - start]), int(offsets[row]))
        total = int(sequence_ends[-1])
    return total


def _check_documents(path: Path, table: np.ndarray, sequences: int, at: int) -> None:
    """Checks that the document table starts at 0, never decreases and ends at the number of sequences."""
    if table[0] != 0:
        raise _fault(path, "first entry of the document table", at, 0, int(table[0]))
    for start in range(0, len(table) - 1, CHECK_ROWS):
        part = table[start : start + CHECK_ROWS + 1]
        is_wrong = part[1:] < part[:-1]
        if is_wrong.any():
            row = start + int(np.argmax(is_wrong)) + 1
            least = int(table[row - 1])
            raise _fault(path, f"entry {row} of the document table", at + 8 * row, f"{least} or more", int(table[row]))
    if table[-1] != sequences:
        last = len(table) - 1
        raise _fault(path, "last entry of the document table", at + 8 * last, sequences, int(table[-1]))


def has_modes(prefix: Path | str) -> bool:
    """Whether the size of PREFIX.idx is that of a multimodal file; other fields are not checked."""
    path = index_path(prefix)
    if not path.is_file():
        return False
    with path.open("rb") as file:
        head = file.read(HEADER_BYTES)
    if len(head) < HEADER_BYTES:
        return False
    sequences, entries = struct.unpack_from("<QQ", head, 18)
    return sequences > 0 and path.stat().st_size == HEADER_BYTES + 13 * sequences + 8 * entries


def open_tokens(prefix: Path | str) -> IndexedTokens:
    """A token file, with modes if it is multimodal. Raises UserError as `IndexedTokens`."""
    return IndexedTokens(prefix, multimodal=has_modes(prefix))


class IndexedWriter:
    """Writes a `.bin`/`.idx` pair, document by document, with 4 to 12 bytes of memory per sequence.

    Both files have temporary names until `finish` renames them, so an incomplete corpus is never visible. A context
    manager: calls `finish` at the end of the block, or `discard` if the block raises.

    Args:
        prefix: output path without `.bin` / `.idx`; missing folders are created.
        dtype: stored dtype, one of the eight of the format; see `token_dtype`.

    Raises:
        UserError: an unsupported dtype, or a folder that cannot be written.
    """

    def __init__(self, prefix: Path | str, dtype: np.dtype):
        self.prefix = Path(prefix)
        self.dtype = np.dtype(dtype).newbyteorder("<")
        if self.dtype.str.replace("|", "<") not in CODES:
            names = ", ".join(np.dtype(name).name for name in CODES if name)
            raise UserError(f"{prefix}: tokens cannot be stored as {self.dtype.name}; choose one of {names}.")
        self._lengths = array("i")
        self._documents = array("q", [0])
        self._modes = array("b")
        self._tag = f"{os.getpid()}-{uuid.uuid4().hex[:8]}.tmp"
        try:
            self.prefix.parent.mkdir(parents=True, exist_ok=True)
            self._file: BinaryIO = self._temporary(tokens_path(prefix)).open("wb", buffering=1 << 20)
        except OSError as error:
            raise UserError(
                f"{prefix}: cannot be written: {write_fault(error)}. Choose another output prefix."
            ) from error

    def _temporary(self, path: Path) -> Path:
        return path.with_name(f"{path.name}.{self._tag}")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        if kind is None:
            self.finish()
        else:
            self.discard()

    def add_document(self, sequences: Sequence[np.ndarray], modes: Sequence[int] | None = None) -> None:
        """Adds a document of zero or more sequences; an empty document adds a boundary only.

        Args:
            sequences: integer (or float, for the float dtypes) arrays [length], values in the range of the dtype.
            modes: int8 mode of each sequence, for all documents or none; makes the file multimodal.

        Raises:
            UserError: a value outside the stored dtype, or a wrong number of modes.
        """
        if modes is not None and len(modes) != len(sequences):
            raise UserError(f"{self.prefix}: {len(sequences)} sequences with {len(modes)} modes; give one each.")
        self._check_modes(modes is not None, len(sequences))
        for sequence in sequences:
            stored = self._stored(np.asarray(sequence))
            self._file.write(stored.data)
            self._lengths.append(len(stored))
        self._documents.append(len(self._lengths))
        self._modes.extend(modes or ())

    def _check_modes(self, with_modes: bool, sequences: int) -> None:
        if sequences and self._lengths and with_modes != bool(self._modes):
            raise UserError(f"{self.prefix}: sequences with and without modes in one file; a multimodal file has all.")

    def _stored(self, sequence: np.ndarray) -> np.ndarray:
        if sequence.ndim != 1:
            raise UserError(f"{self.prefix}: a sequence must have one dimension, found shape {sequence.shape}.")
        if len(sequence) == 0:
            return np.zeros(0, self.dtype)
        if self.dtype.kind in "iu" and not np.can_cast(sequence.dtype, self.dtype):
            low, high, limits = sequence.min(), sequence.max(), np.iinfo(self.dtype)
            if sequence.dtype.kind not in "iu" or low < limits.min or high > limits.max:
                raise UserError(
                    f"{self.prefix}: sequence {len(self._lengths)} has values from {low} to {high} ({sequence.dtype}), "
                    f"but {self.dtype.name} holds integers from {limits.min} to {limits.max}. Choose a wider dtype."
                )
        return np.ascontiguousarray(sequence, dtype=self.dtype)

    def append_index(self, prefix: Path | str) -> None:
        """Appends all documents of another dataset, which must have the same dtype.

        Raises:
            UserError: the other dataset is damaged, has another dtype, or only one of the two has modes.
        """
        dataset = open_tokens(prefix)
        dataset.check_tables()
        if dataset.dtype != self.dtype:
            raise UserError(
                f"{prefix}: stored as {dataset.dtype.name}, cannot be merged into {self.prefix}, which is "
                f"{self.dtype.name}. Preprocess both with the same vocabulary."
            )
        self._check_modes(dataset.modes is not None, len(dataset))
        first = len(self._lengths)
        with tokens_path(prefix).open("rb") as source:
            shutil.copyfileobj(source, self._file, 1 << 24)
        self._lengths.frombytes(dataset.lengths.astype(np.intc).tobytes())
        self._documents.frombytes((dataset.document_table[1:] + first).astype(np.int64).tobytes())
        if dataset.modes is not None:
            self._modes.frombytes(dataset.modes.tobytes())

    def finish(self) -> None:
        """Writes the index and renames both files; the tokens first, because readers look for the index."""
        if self._file.closed:
            return
        lengths = np.frombuffer(self._lengths, np.intc).astype("<i4") if self._lengths else np.zeros(0, "<i4")
        table = np.frombuffer(self._documents, np.int64).astype("<i8")
        sequence_ends = np.cumsum(lengths.astype("<i8") * self.dtype.itemsize)
        index, code = index_path(self.prefix), CODES.index(self.dtype.str.replace("|", "<"))
        with self._temporary(index).open("wb") as file:
            file.write(MAGIC + struct.pack("<QBQQ", VERSION, code, len(lengths), len(table)))
            for part in (lengths, sequence_ends - lengths.astype("<i8") * self.dtype.itemsize, table):
                file.write(part.tobytes())
            file.write(self._modes.tobytes())
            file.flush()
            os.fsync(file.fileno())
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        self._temporary(tokens_path(self.prefix)).replace(tokens_path(self.prefix))
        self._temporary(index).replace(index)

    def discard(self) -> None:
        """Removes the temporary files; existing files with the final names stay."""
        self._file.close()
        for path in (tokens_path(self.prefix), index_path(self.prefix)):
            self._temporary(path).unlink(missing_ok=True)


def check_output(prefix: Path | str, overwrite: bool) -> None:
    """Raises UserError if token files exist and may not be replaced."""
    for path in (tokens_path(prefix), index_path(prefix)):
        if path.is_dir():
            raise UserError(f"{path}: is a folder. Choose another --output-prefix.")
        if path.exists() and not overwrite:
            raise UserError(f"{path}: exists already. Choose another --output-prefix, or give --overwrite.")


def merge(inputs: Sequence[str | Path], output: str | Path, *, overwrite: bool = False) -> IndexedTokens:
    """Writes the documents of all inputs, prefixes or folders, to `output` and opens it.

    Raises:
        UserError: no or damaged input, inputs of different dtypes, some with modes and some without, or output that
            exists.
    """
    prefixes = [prefix for path in inputs for prefix in _prefixes(Path(path))]
    check_output(output, overwrite)
    if Path(output).absolute() in [prefix.absolute() for prefix in prefixes]:
        raise UserError(f"{output}: is also one of the inputs. Choose another --output-prefix.")
    with IndexedWriter(output, open_tokens(prefixes[0]).dtype) as writer:
        for prefix in prefixes:
            writer.append_index(prefix)
    return open_tokens(output)


def _prefixes(path: Path) -> list[Path]:
    """The prefix itself, or for a folder the prefixes of its token files, sorted."""
    if not path.is_dir():
        return [path]
    prefixes = sorted({file.with_suffix("") for file in path.iterdir() if file.suffix in (".bin", ".idx")})
    if not prefixes:
        raise UserError(f"--input {path}: the folder has no token files (.bin and .idx).")
    return prefixes
