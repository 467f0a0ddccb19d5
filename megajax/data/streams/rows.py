"""Rows of streamed text, each a pure function of its number.

Row i is row i // L of lane i % L. A lane draws its rows from the sources of the mixture in a fixed pattern. Of each
source it has a share of the chunks, in a random order in each pass, whose tokens are one text without end; row k has
its tokens k * S to k * S + S. The counts of tokens of the chunks before it say where that is. They become known as
chunks are read, and are kept in files, without which a resumed run reads the chunks before its place again.
"""

import os
import socket
import sys
import threading
import zlib
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from megajax.batch import Schema
from megajax.config.errors import UserError
from megajax.data.rows.row_source import check_row, data_seed
from megajax.data.rows.splits import Rows, Splits, parse_paths
from megajax.data.streams.files import StreamDocuments
from megajax.data.text.config import StreamConfig
from megajax.storage.index_cache import checked_line, checked_values, content_key, user_cache
from megajax.storage.ranged_files import BlockCache
from megajax.tokenizers.base import Tokenizer

PATTERN = 1000
"""Rows of a lane in which each source of a mixture has its share, rounded to one of them."""
CACHED = 2
"""Units that a lane keeps of each source."""


class TokenCounts:
    """The token counts of the chunks of a source, in files that the processes of runs append to.

    A line that is cut off or damaged is left out, and so are lines that differ: their chunks are counted again.
    """

    def __init__(self, folder: Path):
        self._folder, self._counts, self._lock = folder, dict[int, int](), threading.Lock()
        self._path, damaged, known = folder / f"{socket.gethostname()}-{os.getpid()}.jsonl", 0, dict[int, set[int]]()
        try:
            for line in (line for path in sorted(folder.glob("*.jsonl")) for line in path.read_bytes().split(b"\n")):
                match checked_values(line):
                    case [int(unit), int(count)] if unit >= 0 <= count and bool not in (type(unit), type(count)):
                        known.setdefault(unit, set()).add(count)
                    case _:
                        damaged += bool(line)
        except OSError as error:
            print(f"{folder} can't be read ({error.strerror}): a resume is slow", file=sys.stderr)
        self._counts = {unit: counts.pop() for unit, counts in known.items() if len(counts) == 1}
        damaged += sum(map(bool, known.values()))  # with several counts
        if damaged:
            print(f"{folder}: {damaged} lines are damaged or differ; their chunks are counted again", file=sys.stderr)

    def get(self, unit: int) -> int | None:
        return self._counts.get(unit)

    def put(self, unit: int, count: int) -> None:
        """Raises UserError for another count than a known one, by which rows were found."""
        with self._lock:
            if (known := self._counts.get(unit)) is not None:
                if known != count:
                    problem = f"chunk {unit} had {known} tokens when it was counted, and has {count} now"
                    raise UserError(f"{self._folder}: {problem}: a file has changed. Restore it, or start a new run.")
                return
            self._counts[unit] = count
            try:
                self._folder.mkdir(parents=True, exist_ok=True)
                with self._path.open("ab") as file:
                    file.write(checked_line([unit, count]) + b"\n")
            except OSError as error:
                print(f"{self._folder} can't be written ({error.strerror}): a resume is slow", file=sys.stderr)


class TextPart:
    """A part of the mixture: documents in units, which are chunks or, if there are fewer than lanes, shares of them."""

    def __init__(
        self, pattern: str, config: StreamConfig, tokenizer: Tokenizer, blocks: BlockCache, number: int, seed: int
    ):
        self.documents = StreamDocuments(pattern, config.text, blocks)
        self._tokenizer, self._number, self._seed = tokenizer, number, seed
        self._shuffle, self.pattern = config.shuffle, pattern
        self._shares = -(-config.lanes // max(1, len(self.documents.places)))
        self.units = len(self.documents.places) * self._shares
        facts = [source.version for source in self.documents.sources]
        key = content_key(
            {"files": facts, "text": config.text, "tokenizer": tokenizer.identity, "shares": self._shares}
        )
        self.counts = TokenCounts((Path(config.cache_dir) if config.cache_dir else user_cache()) / "streams" / key[:24])
        if not self.units:
            raise UserError(f"data: the files of {pattern} have no documents")

    def order(self, epoch: int) -> np.ndarray:
        """The units in the order of a pass, int64 [units]."""
        return self._permutation(self.units, epoch, 0)

    def tokens(self, unit: int, epoch: int) -> Iterator[np.ndarray]:
        """The tokens of each document of a unit, int32, with the end-of-document token. Reads the texts at once.

        Raises UserError for a malformed file, OSError.
        """
        chunk, share = divmod(unit, self._shares)
        return self._encoded(self.documents.texts(chunk)[share :: self._shares], unit, epoch)

    def _encoded(self, texts: Sequence[bytes], unit: int, epoch: int) -> Iterator[np.ndarray]:
        end, count = np.array([self._tokenizer.eod], np.int32), 0
        for place in self._permutation(len(texts), epoch, 1 + unit).tolist():
            if text := texts[place]:
                tokens = np.concatenate([self._tokenizer.encode_bytes(text), end])
                count += len(tokens)
                yield tokens
        self.counts.put(unit, count)

    def _permutation(self, count: int, epoch: int, what: int) -> np.ndarray:
        if not self._shuffle:
            return np.arange(count)
        return np.random.RandomState([self._seed, self._number, epoch, what]).permutation(count)


class UnitText:
    """The tokens of a unit, document by document, made as far as they are read."""

    def __init__(self, documents: Iterator[np.ndarray]):
        self._documents, self._pieces, self._ends = documents, list[np.ndarray](), [0]

    @property
    def size(self) -> int:
        """Number of tokens that were made."""
        return self._ends[-1]

    def read(self, first: int, stop: int) -> list[np.ndarray]:
        """The tokens at these places, fewer at the end of the unit."""
        while self.size < stop and (piece := next(self._documents, None)) is not None:
            self._pieces.append(piece)
            self._ends.append(self.size + len(piece))
        parts = range(bisect_right(self._ends, first) - 1, bisect_left(self._ends, stop, 0, len(self._pieces)))
        return [self._pieces[part][max(0, first - self._ends[part]) : stop - self._ends[part]] for part in parts]


class Lane:
    """The text of a source in a lane."""

    def __init__(self, source: TextPart, lane: int, lanes: int):
        self._source, self._lane, self._lock = source, lane, threading.Lock()
        self._units, self._ends = list[tuple[int, int]](), [0]
        """Unit and pass of each part of the text, and the place of its end, after 0; of the last it may be unknown."""
        self._cached = dict[int, UnitText]()
        self._epoch, self._lanes, self._order = 0, lanes, source.order(0)[lane::lanes]

    def read(self, first: int, stop: int) -> np.ndarray:
        """The tokens at these places, int32 [stop - first]."""
        pieces = list[np.ndarray]()
        with self._lock:
            while first < stop:
                if (part := bisect_right(self._ends, first) - 1) == len(self._units):
                    self._extend()
                    continue
                start, text = self._ends[part], self._part(part)
                pieces += (tokens := text.read(first - start, stop - start))
                first += sum(map(len, tokens))
                if part + 1 == len(self._ends) and text.size < stop - start:
                    self._ends.append(start + text.size)
        return np.concatenate(pieces)

    def _extend(self) -> None:
        """Adds a part, with its end if the count of its tokens is known."""
        per_epoch = len(self._order)
        if (place := len(self._units) - self._epoch * per_epoch) == per_epoch:
            if self._ends[-1] == self._ends[-1 - per_epoch]:
                raise UserError(f"data: the files of {self._source.pattern} have no text in lane {self._lane}")
            self._epoch, place = self._epoch + 1, 0
            self._order = self._source.order(self._epoch)[self._lane :: self._lanes]
        unit = int(self._order[place])
        self._units.append((unit, self._epoch))
        if (count := self._source.counts.get(unit)) is not None:
            self._ends.append(self._ends[-1] + count)

    def _part(self, part: int) -> UnitText:
        if part not in self._cached:
            while len(self._cached) >= CACHED:
                del self._cached[next(iter(self._cached))]
            self._cached[part] = UnitText(self._source.tokens(*self._units[part]))
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
        self.counts, self._pattern = counts, np.repeat(np.arange(len(paths), dtype=np.int16), counts)
        self._patterns = dict[int, tuple[np.ndarray, np.ndarray]]()
        """Of each lane: the source of each of PATTERN rows, and how many rows of the source are before it."""
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
        if lane not in self._patterns:
            pattern = np.random.RandomState([self._seed, lane]).permutation(self._pattern)
            before = np.empty_like(pattern)
            for source, count in enumerate(self.counts):
                before[pattern == source] = np.arange(count)
            self._patterns[lane] = pattern, before
        source, before_it = (int(values[place]) for values in self._patterns[lane])
        return source, lane, period * int(self.counts[source]) + before_it

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
            "padding": np.zeros(length, bool),
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
