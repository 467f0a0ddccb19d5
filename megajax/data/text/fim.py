"""Rows for language models that fill in the middle (FIM): documents cut at two places, with the middle at the end.

Bavarian et al. 2022, "Efficient Training of Language Models to Fill in the Middle".
"""

import threading
import zlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np

from megajax.batch import Schema
from megajax.data.rows.row_source import SEEDS, SampleGenerators
from megajax.data.rows.splits import Rows, Splits
from megajax.data.text.config import FillInMiddleConfig
from megajax.data.text.gpt import DatasetBuilder, GPTDataset, RowOptions, TokenSource
from megajax.data.text.gpt_index import RowIndex
from megajax.tokenizers.base import Tokenizer, token_id

SNAPSHOT_ROWS = 256
"""Rows between snapshots of the state of a sequential generator."""


class Specials(NamedTuple):
    """Ids of special tokens."""

    prefix: int
    middle: int
    suffix: int
    eod: int
    fragment: int | None


class MiddleLast:
    """Reorders the documents of a row.

    A document is reordered with probability `rate`: two random positions in its text divide it into prefix, middle and
    suffix, each tokenized separately.

    Args:
        config: probabilities.
        tokenizer: decodes and encodes the documents.
    """

    def __init__(self, config: FillInMiddleConfig, tokenizer: Tokenizer):
        self.config, self._tokenizer = config, tokenizer
        self._ids = Specials(
            prefix=token_id(tokenizer, config.prefix_token, "data.prefix_token"),
            middle=token_id(tokenizer, config.middle_token, "data.middle_token"),
            suffix=token_id(tokenizer, config.suffix_token, "data.suffix_token"),
            eod=tokenizer.eod,
            fragment=None
            if config.fragment_token is None
            else token_id(tokenizer, config.fragment_token, "data.fragment_token"),
        )

    def __call__(self, tokens: np.ndarray, generator: np.random.RandomState) -> np.ndarray:
        """Tokens [n] -> tokens [m]. Drops the end-of-document tokens of empty documents."""
        return _each_part(tokens, self._ids.eod, lambda document: self._document(document, generator))

    def _document(self, tokens: np.ndarray, generator: np.random.RandomState) -> np.ndarray:
        config, fragment = self.config, self._ids.fragment
        if fragment is None or not (tokens == fragment).any():
            return self._reordered(tokens, config.rate, generator)
        if not generator.binomial(1, config.rate):
            return tokens
        return _each_part(tokens, fragment, lambda part: self._reordered(part, config.fragment_rate, generator))

    def _reordered(self, tokens: np.ndarray, rate: float, generator: np.random.RandomState) -> np.ndarray:
        if not generator.binomial(1, rate):
            return tokens
        text, ids = self._tokenizer.decode(tokens), self._ids
        if self.config.unchanged_prefix is not None and text.startswith(self.config.unchanged_prefix):
            return tokens
        first, last = sorted(generator.randint(low=0, high=len(text) + 1, size=2).tolist())
        prefix, middle, suffix = map(self._tokenizer.encode, (text[:first], text[first:last], text[last:]))
        if generator.binomial(1, self.config.spm_rate):
            return np.concatenate([[ids.prefix, ids.suffix], suffix, [ids.middle], prefix, middle])
        return np.concatenate([[ids.prefix], prefix, [ids.suffix], suffix, [ids.middle], middle])


def _each_part(tokens: np.ndarray, border: int, change: Callable[[np.ndarray], np.ndarray]) -> np.ndarray:
    """Applies `change` to each part between border tokens, and keeps the borders. Drops empty parts, except the last,
    with the border that follows."""

    def parts() -> Iterator[np.ndarray]:
        start = 0
        for end in np.flatnonzero(tokens == border).tolist():
            if end > start:
                yield change(tokens[start:end])
                yield tokens[end : end + 1]
            start = end + 1
        yield change(tokens[start:])

    return np.concatenate(list(parts()))


class FillInMiddle(GPTDataset):
    """Rows as in `GPTDataset`, with reordered documents; each row is cut or padded to its original length.

    Row i is a pure function of i: each row has its own generator.

    Args:
        reorder: changes the tokens of a row.
        seed: of the generators.
        Others: as for `GPTDataset`.
    """

    def __init__(
        self, tokens: TokenSource, index: RowIndex, options: RowOptions, *, reorder: MiddleLast, seed: int, **more: Any
    ):
        super().__init__(tokens, index, options, **more)
        self._reorder, self._generators = reorder, SampleGenerators(seed)

    def _text(self, row: int) -> tuple[np.ndarray, list[int], int]:
        return self._reordered(row, self._generators.of(row))

    def _reordered(self, row: int, generator: np.random.RandomState) -> tuple[np.ndarray, list[int], int]:
        text, borders, filled = super()._text(row)
        changed = self._reorder(text[:filled], generator)[:filled]
        text = np.full(len(text), self._pad, np.int32)
        text[: len(changed)] = changed
        return text, borders, len(changed)


class SequentialFillInMiddle(FillInMiddle):
    """Fill-in-the-middle as in Megatron-LM, with one generator for all rows: its state depends on all earlier rows.

    Row i is still a pure function of i: the generator first replays the earlier rows, from the nearest snapshot on.
    """

    def __init__(self, *positional: Any, seed: int, **options: Any):
        super().__init__(*positional, seed=seed, **options)
        self._generator, self._next, self._lock = np.random.RandomState(seed), 0, threading.Lock()
        self._states = [self._generator.get_state()]

    def _text(self, row: int) -> tuple[np.ndarray, list[int], int]:
        with self._lock:
            if row < self._next:
                snapshot = row // SNAPSHOT_ROWS
                self._generator.set_state(self._states[snapshot])
                self._next = snapshot * SNAPSHOT_ROWS
            while True:
                result = self._reordered(self._next, self._generator)
                self._next += 1
                if self._next == len(self._states) * SNAPSHOT_ROWS:
                    self._states.append(self._generator.get_state())
                if self._next == row + 1:
                    return result


class FillInMiddleBuilder(DatasetBuilder):
    """Rows for models that fill in the middle."""

    def __init__(self, config: FillInMiddleConfig, *, tokenizer: Tokenizer, sequence_length: int, seed: int):
        super().__init__(config, tokenizer=tokenizer, sequence_length=sequence_length, seed=seed)
        self.reorder, self.sequential = MiddleLast(config, tokenizer), config.sequential_draws

    def make(self, tokens: TokenSource, identity: str, index: RowIndex, passes: int) -> GPTDataset:
        rows = SequentialFillInMiddle if self.sequential else FillInMiddle
        # Without the hash, all files of a blend would draw the same numbers for row i.
        seed = self.seed if self.sequential else (self.seed + zlib.crc32(identity.encode())) % SEEDS
        return rows(
            tokens, index, self.options, reorder=self.reorder, seed=seed, tokenizer=self.tokenizer, passes=passes
        )


def build_splits(config: FillInMiddleConfig, *, tokenizer: Tokenizer, schema: Schema, rows: Rows, seed: int) -> Splits:
    """Rows for the splits that a run requests; see `BlendBuilder.build`.

    Raises:
        UserError: the tokenizer lacks one of the tokens; otherwise as `BlendBuilder.build`.
    """
    length = schema["tokens"].positions()
    return FillInMiddleBuilder(config, tokenizer=tokenizer, sequence_length=length, seed=seed).build(rows)
