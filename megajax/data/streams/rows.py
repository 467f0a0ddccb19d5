"""Rows of streamed text, each a pure function of its number.

Row i is row i // L of lane i % L. A lane draws its rows from the sources of the mixture in a fixed pattern. Of each
source it has a share of the chunks, in a random order in each pass, whose tokens are one text without end; row k has
its tokens k * S to k * S + S. The counts of tokens of the chunks before it say where that is. They become known as
chunks are read, and are kept in files, without which a resumed run reads the chunks before its place again.
"""

import json
import os
import socket
import sys
import threading
import zlib
from bisect import bisect_right
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from megajax.batch import Schema
from megajax.config.errors import UserError
from megajax.data.rows.row_source import check_row, data_seed
from megajax.data.rows.splits import Rows, Splits, parse_paths
from megajax.data.streams.config import StreamConfig
from megajax.data.streams.files import Documents
from megajax.storage.index_cache import content_key, user_cache
from megajax.storage.ranged_files import BlockCache
from megajax.tokenizers.base import Tokenizer

PATTERN = 1000
"""Rows of a lane in which each source of a mixture has its share, rounded to one of them."""
CACHED = 2
"""Tokenized chunks that a lane keeps of each source."""


class Counts:
    """The token counts of the chunks of a source, in files that the processes of runs append to."""

    def __init__(self, folder: Path):
        self._folder, self._counts, self._lock = folder, dict[int, int](), threading.Lock()
        for path in sorted(folder.glob("*.jsonl")) if folder.is_dir() else ():
            for line in path.read_text(encoding="utf-8").splitlines():
                try:
                    unit, count = json.loads(line)
                    self._counts[int(unit)] = int(count)
                except (ValueError, TypeError):  # a line that was cut off
                    continue
        self._path = folder / f"{socket.gethostname()}-{os.getpid()}.jsonl"

    def get(self, unit: int) -> int | None:
        return self._counts.get(unit)

    def put(self, unit: int, count: int) -> None:
        with self._lock:
            if unit in self._counts:
                return
            self._counts[unit] = count
            try:
                self._folder.mkdir(parents=True, exist_ok=True)
                with self._path.open("a", encoding="utf-8") as file:
                    file.write(f"{json.dumps([unit, count])}\n")
            except OSError as error:
                print(f"{self._folder} can't be written ({error.strerror}): a resume is slow", file=sys.stderr)


class TextPart:
    """A part of the mixture: documents in units, which are chunks or, if there are fewer than lanes, shares of them."""

    def __init__(
        self, pattern: str, config: StreamConfig, tokenizer: Tokenizer, blocks: BlockCache, number: int, seed: int
    ):
        self.documents = Documents(pattern, config.text, blocks)
        self._tokenizer, self._number, self._seed = tokenizer, number, seed
        self._shuffle, self.pattern = config.shuffle, pattern
        self._shares = -(-config.lanes // max(1, len(self.documents.places)))
        self.units = len(self.documents.places) * self._shares
        facts = [source.version for source in self.documents.sources]
        key = content_key(
            {"files": facts, "text": config.text, "tokenizer": tokenizer.identity, "shares": self._shares}
        )
        self.counts = Counts((Path(config.cache_dir) if config.cache_dir else user_cache()) / "streams" / key[:24])
        if not self.units:
            raise UserError(f"data: the files of {pattern} have no documents")

    def order(self, epoch: int) -> np.ndarray:
        """The units in the order of a pass, int64 [units]."""
        return self._permutation(self.units, epoch, 0)

    def tokens(self, unit: int, epoch: int) -> np.ndarray:
        """The tokens of a unit, int32, each document with the end-of-document token."""
        chunk, share = divmod(unit, self._shares)
        texts = self.documents.texts(chunk)[share :: self._shares]
        pieces = list[np.ndarray]()
        end = np.array([self._tokenizer.eod], np.int32)
        for place in self._permutation(len(texts), epoch, 1 + unit).tolist():
            text = texts[place]
            if text:
                encode = self._tokenizer.encode if isinstance(text, str) else self._tokenizer.encode_bytes
                pieces += [encode(text), end]
        tokens = np.concatenate(pieces) if pieces else np.zeros(0, np.int32)
        self.counts.put(unit, len(tokens))
        return tokens

    def _permutation(self, count: int, epoch: int, what: int) -> np.ndarray:
        if not self._shuffle:
            return np.arange(count)
        return np.random.RandomState([self._seed, self._number, epoch, what]).permutation(count)


class Lane:
    """The text of a source in a lane."""

    def __init__(self, source: TextPart, lane: int, lanes: int):
        self._source, self._lane, self._lanes, self._lock = source, lane, lanes, threading.Lock()
        self._units, self._ends = list[tuple[int, int]](), [0]
        """Unit and pass of each part of the text, and the place of its end, after 0."""
        self._cached = dict[int, np.ndarray]()
        self._epoch = 0

    def read(self, first: int, stop: int) -> np.ndarray:
        """The tokens at these places, int32 [stop - first]."""
        with self._lock:
            while self._ends[-1] < stop:
                self._extend()
            pieces, part = list[np.ndarray](), bisect_right(self._ends, first) - 1
            while first < stop:
                start, end = self._ends[part], self._ends[part + 1]
                if end > first:
                    pieces.append(self._part(part)[first - start : stop - start])
                    first = min(end, stop)
                part += 1
            return np.concatenate(pieces)

    def _extend(self) -> None:
        """Adds a part; reads it only if its count of tokens is unknown."""
        if (place := len(self._units) - self._epoch * self._per_epoch) == self._per_epoch:
            if self._ends[-1] == self._ends[-1 - self._per_epoch]:
                raise UserError(f"data: the files of {self._source.pattern} have no text in lane {self._lane}")
            self._epoch, place = self._epoch + 1, 0
        unit = int(self._source.order(self._epoch)[self._lane :: self._lanes][place])
        self._units.append((unit, self._epoch))
        if (count := self._source.counts.get(unit)) is None:
            count = len(self._part(len(self._units) - 1))
        self._ends.append(self._ends[-1] + count)

    @cached_property
    def _per_epoch(self) -> int:
        return len(range(self._lane, self._source.units, self._lanes))

    def _part(self, part: int) -> np.ndarray:
        if part not in self._cached:
            while len(self._cached) >= CACHED:
                del self._cached[next(iter(self._cached))]
            self._cached[part] = self._source.tokens(*self._units[part])
        return self._cached[part]


class StreamRows:
    """Row i of a split, see the top of this file: tokens, labels and positions int32 [S], loss_mask float32 [S].

    segment_ids int32 [S]: the document of each token in the row, with isolate_documents.
    """

    def __init__(
        self, config: StreamConfig, patterns: Sequence[str], *, tokenizer: Tokenizer, length: int, rows: int, seed: int
    ):
        paths, weights = parse_paths(patterns)
        blocks = BlockCache(None if config.cache_dir is None else Path(config.cache_dir) / "blocks", config.cache_gib)
        self._sources = [TextPart(path, config, tokenizer, blocks, number, seed) for number, path in enumerate(paths)]
        self._rows, self._length, self._seed, self._lanes = rows, length, seed, config.lanes
        self._isolated, self._eod = config.isolate_documents, tokenizer.eod
        shares = np.array(weights or [1.0] * len(paths), np.float64)
        exact = shares / shares.sum() * PATTERN
        counts = np.maximum(np.floor(exact).astype(int), 1)
        for source in np.argsort(-(exact - counts), kind="stable")[: max(0, PATTERN - int(counts.sum()))]:
            counts[source] += 1
        self.counts, self._pattern = counts, np.repeat(np.arange(len(paths)), counts)
        self._settings = repr((patterns, config.lanes, config.shuffle, seed, length))
        self._texts = dict[tuple[int, int], Lane]()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return self._rows

    def order(self) -> str:
        """Identifier of the order of the rows."""
        return f"{zlib.crc32(self._settings.encode()):08x}"

    def files(self) -> list[str]:
        """The files that are read."""
        return [file.name for source in self._sources for file in source.documents.sources]

    def place(self, row: int) -> tuple[int, int, int]:
        """TextPart, lane and number of a row in the text of the source in the lane."""
        number, lane = divmod(row, self._lanes)
        period, place = divmod(number, len(self._pattern))
        pattern = np.random.RandomState([self._seed, lane]).permutation(self._pattern)
        source = int(pattern[place])
        return source, lane, period * int(self.counts[source]) + int((pattern[:place] == source).sum())

    def __getitem__(self, row: int) -> dict[str, np.ndarray]:
        check_row(self, row)
        (source, lane, number), length = self.place(row), self._length
        with self._lock:
            if (source, lane) not in self._texts:
                self._texts[source, lane] = Lane(self._sources[source], lane, self._lanes)
            text = self._texts[source, lane]
        tokens = text.read(number * length, number * length + length + 1)
        values: dict[str, Any] = {
            "tokens": tokens[:-1],
            "labels": tokens[1:],
            "loss_mask": np.ones(length, np.float32),
            "positions": np.arange(length, dtype=np.int32),
        }
        if self._isolated:
            starts = np.concatenate([[True], tokens[:-2] == self._eod])
            segments = np.cumsum(starts, dtype=np.int32) - 1
            values["segment_ids"] = segments
            values["positions"] = values["positions"] - np.flatnonzero(starts).astype(np.int32)[segments]
        return values


def build_splits(config: StreamConfig, *, tokenizer: Tokenizer, schema: Schema, rows: Rows, seed: int) -> Splits:
    """Row sources of streamed text. Raises UserError for patterns without files, and files that can't be read."""
    own_seed, length = data_seed(config.seed, seed), schema["tokens"].positions()
    patterns = (config.paths, config.valid_paths, config.test_paths)

    def make(place: int, name: str, count: int | None) -> StreamRows | None:
        if not patterns[place]:
            return None
        if count is None:
            raise UserError(f"data.type=Stream has no end: say how many rows of {name} the run reads")
        return StreamRows(config, patterns[place], tokenizer=tokenizer, length=length, rows=count, seed=own_seed)

    return Splits.build(rows, make)
