"""What a row source offers a run, and the checks and identifiers that row sources share."""

import os
import zlib
from collections.abc import Callable, Mapping, Sized
from typing import Any, Protocol

import numpy as np

from megajax.config.errors import UserError

SEEDS = 1 << 32
"""Seeds that NumPy's RandomState takes: 0 up to this."""
ORDER_SAMPLE = 65536
"""Number of index entries that identify an order: another epoch or another rule reshuffles all entries."""


class RowSource(Protocol):
    """Rows by number: `len` and `[i]` -> a mapping from name to array, with at least the leaves of the schema.

    A source may have more, which a run shows: `passes` (int, epochs over its text), `order()` (str that changes with
    the order of the rows), `files()` (paths of the files that are read: whether their content changed is asked when a
    run resumes), `skipped` (mapping from a reason to the number of rows left out; it may grow as rows are
    read), and `packing` (`megajax.data.packing.Packing`). With `document_lengths` (see `lengths_of_row`), rows are
    balanced over data groups without being read.
    """

    def __len__(self) -> int: ...
    def __getitem__(self, row: int) -> Mapping[str, np.ndarray]: ...


def files_of(source: Any) -> list[str]:
    """The files that a row source reads: its `files()`, each once, in the order given; [] where it has none."""
    return list(dict.fromkeys(os.fspath(file) for file in source.files())) if hasattr(source, "files") else []


def check_row(source: Sized, row: int) -> None:
    """Raises IndexError for a row that the source does not have."""
    if not 0 <= row < len(source):
        raise IndexError(f"row {row} of a dataset of {len(source)} rows")


def order_checksum(order: np.ndarray) -> str:
    """Identifier of an order of rows; unchanged if rows are appended."""
    return f"{zlib.crc32(np.ascontiguousarray(order[:ORDER_SAMPLE]).tobytes()):08x}"


def check_vocabulary(tokens: np.ndarray, size: int, file: object, locate: Callable[[int], str]) -> None:
    """Raises UserError for a token outside a vocabulary of `size`.

    Args:
        tokens: integers [n].
        file: holds them, for the message.
        where: position in `tokens` -> its place in the file, for the message.
    """
    signed = tokens.dtype.kind == "i"
    if len(tokens) and (tokens.max() >= size or (signed and tokens.min() < 0)):
        first = int(np.argmax((tokens >= size) | (tokens < 0)))
        raise UserError(
            f"{file}: token {int(tokens[first])} in {locate(first)} lies outside the vocabulary of {size}. The file was "
            "written with another tokenizer: use that one, or preprocess again."
        )


def data_seed(config_seed: int | None, run: int) -> int:
    """The seed of data: its own, or the run's. Raises UserError for one that generators do not take."""
    seed = run if config_seed is None else config_seed
    if not 0 <= seed < SEEDS:
        raise UserError(f"data.seed: expected 0 to {SEEDS - 1} (NumPy's RandomState), found {seed}.")
    return seed
