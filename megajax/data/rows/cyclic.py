"""Rows in a different random order in each pass, with the permutations of Megatron-LM's random sampler."""

import zlib
from collections.abc import Mapping
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import numpy as np

from megajax.config.errors import UserError
from megajax.data.rows.balancing import lengths_of_row
from megajax.data.rows.config import CyclicConfig
from megajax.data.rows.row_source import check_row, files_of, index_files_of

LARGEST = (1 << 32) // 20
"""With this many rows or more, PyTorch uses another algorithm for permutations."""


def permutation(count: int, seed: int) -> np.ndarray:
    """`torch.randperm(count)` of a generator with this seed, int64 [count], count below `LARGEST`.

    Fisher-Yates from the bottom, with the numbers of MT19937 modulo the number of remaining rows.
    """
    draws = np.random.RandomState(seed).randint(0, 1 << 32, size=max(count - 1, 0), dtype=np.uint32)
    places = (draws % np.arange(count, 1, -1)).tolist()
    order = list(range(count))
    for place, ahead in enumerate(places):
        partner = place + ahead
        order[place], order[partner] = order[partner], order[place]
    return np.array(order, np.int64)


class CyclicRows:
    """Rows of a source in repeated passes; pass e has the random order of seed e.

    A pass has only full microbatches. The remaining rows differ between passes if `buckets` is false, and are the last
    of the source if it is true.

    Args:
        config: whether data shards have buckets.
        source: rows by number.
        rows: number of rows over all passes.
        shards: number of data shards.
        micro_rows: rows of a microbatch over all shards.

    Raises:
        UserError: fewer rows than a microbatch, or too many.
    """

    def __init__(self, config: CyclicConfig, *, source: Any, rows: int, shards: int, micro_rows: int):
        self.source, self._rows, self._buckets = source, rows, config.buckets
        self._shards, self._shard_rows = shards, micro_rows // shards
        if not micro_rows <= len(source) < LARGEST:
            raise UserError(
                f"data.loader.cyclic: the data has {len(source)} rows, expected at least the {micro_rows} of a "
                f"microbatch on all devices, and less than {LARGEST}."
            )
        self._groups = len(source) // micro_rows
        self._pass = self._groups * micro_rows
        self.passes = -(-rows // self._pass) * getattr(source, "passes", 1)
        bucket = self._groups if self._buckets else len(source) // self._shard_rows
        self._order = lru_cache(1)(partial(permutation, bucket * self._shard_rows))

    def __len__(self) -> int:
        return self._rows

    @property
    def skipped(self) -> Mapping[str, int]:
        """Reason -> rows that the source has skipped."""
        return getattr(self.source, "skipped", {})

    def order(self) -> str:
        """Identifier of the order of the rows; unchanged if rows are appended, but not if the source grows."""
        before = self.source.order() if hasattr(self.source, "order") else ""
        settings = (len(self.source), self._shards, self._shard_rows, self._buckets)
        return f"cyclic-{zlib.crc32(repr(settings).encode()):08x}-{before}"

    def files(self) -> list[str]:
        """The files that are read."""
        return files_of(self.source)

    @property
    def index_files(self) -> tuple[Path, ...]:
        """The cache files of the source."""
        return index_files_of(self.source)

    def number(self, row: int) -> int:
        """The row of the source that is row `row`."""
        check_row(self, row)
        epoch, place = divmod(row, self._pass)
        group, place = divmod(place, self._shards * self._shard_rows)
        shard, place = divmod(place, self._shard_rows)
        place += group * self._shard_rows  # of the shard's own rows in this pass
        order = self._order(epoch)
        if self._buckets:
            return shard * len(order) + int(order[place])
        return int(order[place * self._shards + shard])

    def __getitem__(self, row: int) -> Mapping[str, np.ndarray]:
        return self.source[self.number(row)]

    def document_lengths(self, row: int) -> np.ndarray:
        """Tokens of each document of a row, int64 [D]."""
        return lengths_of_row(self.source, self.number(row))
