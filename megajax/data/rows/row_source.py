"""The interface of row sources, and their common checks and identifiers."""

import os
import threading
import zlib
from collections.abc import Callable, Mapping, Sequence, Sized
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np

from megajax.config.errors import UserError

SEEDS = 1 << 32
"""Seeds of NumPy's RandomState are below this."""
ORDER_SAMPLE = 65536
"""Number of index entries that identify an order: another epoch or rule reshuffles all entries."""


class RowSource(Protocol):
    """Rows by number: `len` and `[i]` -> a mapping from name to array, with at least the leaves of the schema.

    Optional members, which a run reports: `passes` (int, epochs over its text), `order()` (str that changes with the
    order of the rows), `files()` (paths of the files that it reads; a resumed run checks whether their content has
    changed), `index_files` (paths of the cache files of its index, for `--verify-data`), `skipped` (reason -> number of
    skipped rows; may grow as rows are read), and `packing` (`megajax.data.rows.packing.Packing`). With
    `document_lengths` (see `lengths_of_row`), rows are balanced over data groups without being read.
    """

    def __len__(self) -> int: ...
    def __getitem__(self, row: int, /) -> Mapping[str, np.ndarray]: ...


@runtime_checkable
class MadeDuringRun(Protocol):
    """A training split whose rows depend on the weights of the run: in place of rows by number it has batches."""

    def batches(self, parts: Any, consumed: int, progress: Callable[[], None]) -> "RunBatches":
        """The batches of the run of these parts after `consumed` rows. progress: to be called in long waits."""
        ...


@runtime_checkable
class RunBatches(Protocol):
    """Batches like a loader's, each with metrics: `next` -> (batch, rows consumed after it, metrics by name)."""

    def attach(self, run: Any) -> None:
        """Make the batches from the state of this run."""
        ...

    def keep_reference(self, folder: Path, expected: str | None) -> Any:
        """Store the reference model of a new run in its folder, or read it -> `megajax.training.reference.Reference`.

        expected: checksum of its weights; None: the run is new. None: there is no such model to keep.
        """
        ...

    def state(self) -> dict[str, Any]:
        """What a checkpoint of the run's present step has to keep of them, as plain values."""
        ...

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from the state of a checkpoint."""
        ...


def files_of(source: Any) -> list[str]:
    """The files that a row source reads: its `files()`, without duplicates; [] if it has no such method."""
    return list(dict.fromkeys(os.fspath(file) for file in source.files())) if hasattr(source, "files") else []


def index_files_of(source: object) -> tuple[Path, ...]:
    """The cache files of a row source: its `index_files`, or ()."""
    return tuple(getattr(source, "index_files", ()))


class TokenRows:
    """The base of rows that are read from a token file, or from several that belong together.

    Attributes:
        tokens: the file.
    """

    tokens: Any

    def files(self) -> list[str]:
        """The files that are read."""
        return files_of(self.tokens)


def check_row(source: Sized, row: int) -> None:
    """Raises IndexError for a row outside the source."""
    if not 0 <= row < len(source):
        raise IndexError(f"row {row} of a dataset of {len(source)} rows")


def damaged_index(name: object, row: int, files: Sequence[Path]) -> UserError:
    """The error of a row outside the data: a cached index is verified as a whole only with --verify-data.

    Args:
        name: of the data.
        row: number of the row.
        files: the cache files of the index.
    """
    return UserError(
        f"{name}: the index of its rows is damaged, at row {row} ({', '.join(map(str, files)) or 'in memory'}). Delete "
        "that file: the next start builds it again. --verify-data finds all damaged ones."
    )


def order_checksum(order: np.ndarray) -> str:
    """Identifier of an order of rows; unchanged if rows are appended."""
    return f"{zlib.crc32(np.ascontiguousarray(order[:ORDER_SAMPLE]).tobytes()):08x}"


def check_vocabulary(tokens: np.ndarray, size: int, file: object, locate: Callable[[int], str]) -> None:
    """Raises UserError for a token outside a vocabulary of `size`.

    Args:
        tokens: integers [n].
        file: the file of the tokens, for the message.
        locate: position in `tokens` -> location in the file, for the message.
    """
    unsigned = tokens.view(f"u{tokens.itemsize}")  # negative numbers are large ones
    if len(tokens) and np.maximum.reduce(unsigned) >= size:
        first = int(np.argmax((tokens >= size) | (tokens < 0)))
        raise UserError(
            f"{file}: token {int(tokens[first])} in {locate(first)} lies outside the vocabulary of {size}. The file "
            "was written with another tokenizer: set tokenizer.type, its path and model.vocabulary_size to that one's, "
            "or preprocess again."
        )


def data_seed(config_seed: int | None, run: int) -> int:
    """The seed of data: the config's, or else the run's. Raises UserError for a seed outside 0 to 2^32 - 1."""
    seed = run if config_seed is None else config_seed
    if not 0 <= seed < SEEDS:
        raise UserError(f"data.seed: expected 0 to {SEEDS - 1} (NumPy's RandomState), found {seed}.")
    return seed


class SampleGenerators:
    """A generator for each row, seeded with a seed plus the row's number.

    Each thread has a single generator, because seeding takes a tenth of the time of creating one.
    """

    def __init__(self, seed: int):
        self._seed, self._local = seed, threading.local()

    def of(self, row: int) -> np.random.RandomState:
        """The generator of a row; valid until the next call in this thread."""
        if not hasattr(self._local, "generator"):
            self._local.generator = np.random.RandomState(0)
        self._local.generator.seed((self._seed + row) % SEEDS)
        return self._local.generator
