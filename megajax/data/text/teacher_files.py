"""Files with the likeliest tokens of a teacher, beside token files; and rows that have them.

For each token of PREFIX.bin, in the same order, PREFIX.teacher has a record of little-endian int32 and float32 numbers:
the K tokens that the teacher expects at its place, the likeliest first, their log-probabilities, and that of all other
tokens together. The teacher reads documents alone, so it says nothing about the first token of each: ids of -1 there.
PREFIX.teacher.json says what the records were computed from (`TeacherOrigin`), and their number. It is replaced after
each part of the records, so that an interrupted computation goes on, and nobody reads what is not complete.
"""

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from megajax.batch import Schema
from megajax.config.errors import UserError
from megajax.config.file_paths import store_url
from megajax.data.rows.splits import Rows, Splits
from megajax.data.text.config import TeacherFilesConfig
from megajax.data.text.gpt import DatasetBuilder, GPTDataset, RowOptions
from megajax.data.text.gpt_index import RowIndex
from megajax.data.text.indexed_dataset import IndexedTokens, SequencePart
from megajax.storage.index_cache import atomic_write
from megajax.storage.reading import ReadFile, with_retries
from megajax.storage.write_errors import write_fault

WORD = np.dtype("<i4")
"""Records are arrays of these; log-probabilities have the same size."""
UNKNOWN = -1
"""The id where the teacher says nothing."""


class TeacherOrigin(NamedTuple):
    """What records were computed from."""

    data: str
    """Identity of the token file."""
    tokenizer: str
    """Identity of the teacher's tokenizer."""
    vocabulary: int
    """Token ids of the teacher."""
    teacher: str
    """Checksum of its weights."""
    k: int
    temperature: float
    """Divisor of its logits."""
    length: int
    """Tokens that it reads at most."""
    stride: int
    """Tokens between the starts of windows in a longer document."""
    compute: str
    """Dtype of the computation."""


def teacher_path(prefix: Path | str, folder: str | None) -> Path:
    """The file of records of a token file; folder None: beside it. Raises UserError for None and a file in a store."""
    if folder is None and store_url(prefix) is not None:
        raise UserError(f"{prefix} is in an object store, and a teacher's files are not: set data.teacher_dir")
    name = f"{Path(prefix).name}.teacher"
    return Path(folder).expanduser() / name if folder else Path(prefix).expanduser().with_name(name)


def about_path(path: Path) -> Path:
    """The description of a file of records."""
    return path.with_name(f"{path.name}.json")


def read_about(path: Path) -> tuple[TeacherOrigin, int]:
    """The origin of a file of records, and their number. Raises UserError."""
    about = about_path(path)
    try:
        content = json.loads(about.read_text(encoding="utf-8"))
        records = int(content.pop("records"))
        return TeacherOrigin(**content), records
    except OSError as error:
        hint = "python -m megajax.evaluate --run=TEACHER --tasks=teacher:PREFIX writes it"
        raise UserError(f"{about}: cannot be read: {error.strerror or error}; {hint}") from error
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"{about}: is damaged ({error}): delete it, and write the file again") from error


class TeacherWriter:
    """Appends records to a file. One process writes."""

    def __init__(self, path: Path, origin: TeacherOrigin):
        self.path, self.origin, self.records = path, origin, 0

    def open(self) -> None:
        """Count the records that are there. Raises UserError for a file of another origin."""
        if about_path(self.path).exists():
            theirs, self.records = read_about(self.path)
            other = [name for name, value in self.origin._asdict().items() if getattr(theirs, name) != value]
            if other:
                values = [f"{name} {getattr(theirs, name)}, not {getattr(self.origin, name)}" for name in other]
                raise UserError(
                    f"{self.path}: exists, with {'; '.join(values)}: delete it, or choose another folder (:folder=DIR)"
                )

    def add(self, ids: np.ndarray, log_p: np.ndarray) -> None:
        """Append records: int32 [n, K], float32 [n, K + 1]. Raises UserError."""
        records = np.concatenate([ids.astype(WORD), log_p.astype("<f4").view(WORD)], axis=1)
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self.path.open("r+b" if self.path.exists() else "w+b") as file:
                file.truncate(self.records * records[:1].nbytes)  # what an interruption has left
                file.seek(0, os.SEEK_END)
                file.write(records.tobytes())
                file.flush()
                os.fsync(file.fileno())
            self.records += len(records)
            with atomic_write(about_path(self.path)) as file:
                content = {**self.origin._asdict(), "records": self.records}
                file.write(f"{json.dumps(content, indent=1)}\n".encode())
        except OSError as error:
            raise UserError(f"{self.path}: cannot be written: {write_fault(error)}") from error


class TeacherFile:
    """The records of a token file, read by position."""

    def __init__(self, tokens: IndexedTokens, path: Path, wanted: dict[str, Any]):
        """wanted: values of the origin that the run needs; `k` may be larger. Raises UserError for others."""
        origin, records = read_about(path)
        for name, value in wanted.items():
            theirs = getattr(origin, name)
            if theirs < value if name == "k" else theirs != value:
                raise UserError(
                    f"{path}: was written with {name} {theirs}, and this run needs {name} {value}{HINTS.get(name, '')}"
                )
        if records != tokens.total:
            raise UserError(
                f"{path}: has {records:,} of {tokens.total:,} records: give the command that writes it again"
            )
        self._tokens, self._width, self.k = tokens, 2 * origin.k + 1, origin.k
        self._file = with_retries(lambda: ReadFile(path), str(path))
        if self._file.size != records * self._width * WORD.itemsize:
            expected = records * self._width * WORD.itemsize
            raise UserError(f"{path}: expected {expected:,} bytes, found {self._file.size:,}: delete it and its .json")

    def files(self) -> tuple[Path, ...]:
        """The files that are read."""
        return self._file.path, about_path(self._file.path)

    def gather(self, pieces: Sequence[SequencePart], k: int) -> tuple[np.ndarray, np.ndarray]:
        """Records of parts of sequences: ids int32 [n, k], log-probabilities float32 [n, k + 1]. Raises OSError."""
        size, parts = self._width * WORD.itemsize, []
        for sequence, start, stop in pieces:
            length = int(self._tokens.lengths[sequence])
            count = max((length if stop is None else min(stop, length)) - start, 0)
            first = int(self._tokens.offsets[sequence]) // self._tokens.dtype.itemsize + start
            parts.append((first * size, count * size))
        words = self._file.read(parts, WORD, lambda part: f"sequence {pieces[part][0]}").reshape(-1, self._width)
        log_p = np.ascontiguousarray(words[:, self.k :]).view("<f4")
        others = np.logaddexp.reduce(log_p[:, k:], axis=1, keepdims=True)
        return words[:, :k], np.concatenate([log_p[:, :k], others], axis=1)


HINTS = {
    "data": " (the identity of its token file): it belongs to another token file, or this one was written again",
    "tokenizer": ": use a teacher with the tokenizer of the student",
    "vocabulary": ": use a teacher with the token ids of the student",
    "k": " or more: lower model.distillation.k, or write it again with :k=",
    "temperature": ": change the temperatures of model.distillation and data, or write it again with :temperature=",
}
"""Name of a value of the origin -> what to do about another one."""


class TaughtRows(GPTDataset):
    """Rows as in `GPTDataset`, with what the teacher expects in place of each label:

    teacher_ids: int32 [S, K], -1 where it says nothing.
    teacher_log_p: float32 [S, K + 1].
    """

    def __init__(
        self, tokens: IndexedTokens, index: RowIndex, options: RowOptions, *, teacher: TeacherFile, k: int, **more: Any
    ):
        super().__init__(tokens, index, options, **more)
        self._teacher, self._k = teacher, k

    def files(self) -> list[str]:
        """The files that are read."""
        return [*super().files(), *map(str, self._teacher.files())]

    def __getitem__(self, row: int) -> dict[str, np.ndarray]:
        arrays, length = super().__getitem__(row), self.sequence_length
        records = self._teacher.gather(self._pieces(row), self._k)
        ids, log_p = (part[1 : length + 1] for part in records)
        missing = ((0, length - len(ids)), (0, 0))
        ids, log_p = np.pad(ids, missing, constant_values=UNKNOWN), np.pad(log_p, missing)
        return {**arrays, "teacher_ids": ids, "teacher_log_p": log_p}


class TaughtBuilder(DatasetBuilder):
    """Builds rows with the records of a teacher."""

    config: TeacherFilesConfig

    def __init__(self, config: TeacherFilesConfig, schema: Schema, **options: Any):
        super().__init__(config, **options)
        leaf = schema["teacher_ids"]
        self._k, self._wanted = leaf.shape[1], {"tokenizer": self.tokenizer.identity, "vocabulary": leaf.below}

    def make(self, tokens: Any, identity: str, index: RowIndex, passes: int) -> TaughtRows:
        wanted = {"data": identity, **self._wanted, "k": self._k, "temperature": self.config.teacher_temperature}
        teacher = TeacherFile(tokens, teacher_path(tokens.prefix, self.config.teacher_dir), wanted)
        more = {"tokenizer": self.tokenizer, "passes": passes}
        return TaughtRows(tokens, index, self.options, teacher=teacher, k=self._k, **more)


def build_splits(config: TeacherFilesConfig, *, tokenizer: Any, schema: Schema, rows: Rows, seed: int) -> Splits:
    """Rows for the splits that a run requests; see `BlendBuilder.build`.

    Raises:
        UserError: no records of a token file, or those of another token file, vocabulary or temperature; otherwise as
            `BlendBuilder.build`.
    """
    length = schema["tokens"].positions()
    return TaughtBuilder(config, schema, tokenizer=tokenizer, sequence_length=length, seed=seed).build(rows)
