"""Rows of texts in pairs, such as translations, for models with an encoder and a decoder."""

import hashlib
import math
from pathlib import Path

import numpy as np

from megajax.batch import Schema
from megajax.config.errors import UserError
from megajax.config.paths_and_store_urls import store_url
from megajax.data.masked.config import PairsConfig
from megajax.data.masked.samples import MaskingTokenizer, demand_tokens
from megajax.data.masked.spans import two_sided_row, two_sided_specials
from megajax.data.rows.blend import BlendBuilder
from megajax.data.rows.row_source import TokenRows, check_row, check_vocabulary, order_checksum
from megajax.data.rows.splits import Rows, Splits
from megajax.data.text.indexed_dataset import IndexedTokens, integer_tokens


class PairedTokens:
    """Two token files with corresponding documents.

    Raises:
        UserError: a file that is missing, damaged or not of integers, different numbers of documents, or a pair without
            tokens on one side.
    """

    def __init__(self, path: str, sides: tuple[IndexedTokens, ...]):
        self.prefix, self.sides = store_url(path) or Path(path), sides
        self.documents = self.sides[0].documents
        counts = [side.documents for side in self.sides]
        if len(set(counts)) > 1:
            sizes = " and ".join(f"{side.prefix} has {side.documents}" for side in self.sides)
            raise UserError(f"{path}: {sizes} documents, but they form pairs. Preprocess both together.")
        for side in self.sides:
            # Offset of each document in tokens, and the end.
            starts = np.append(side.offsets // side.dtype.itemsize, side.total)[side.document_table]
            if empty := np.flatnonzero(np.diff(starts) == 0).tolist():
                message = f"{len(empty)} of {self.documents} documents have no tokens, the first is number {empty[0]}"
                raise UserError(f"{side.prefix}: {message}. Preprocess with --pairs --on-error=skip to leave them out.")

    def pair(self, number: int) -> list[np.ndarray]:
        """Tokens of both texts of a pair."""
        return [side.document(number) for side in self.sides]

    def files(self) -> tuple[Path | str, ...]:
        """The files that are read."""
        return tuple(file for side in self.sides for file in side.files())

    def identity(self, folder: Path) -> str:
        """Hash of both files' identities; see `IndexedTokens.identity`."""
        return hashlib.sha256("".join(side.identity(folder) for side in self.sides).encode()).hexdigest()


class TranslationPairs(TokenRows):
    """Row i of a split as a dict of the arrays of `two_sided_row`, a pure function of i.

    Args:
        tokens: the pairs.
        numbers: int64 [n], the pair of each row.
        lengths: (T, S), positions of the encoder and of the decoder.
        passes: number of epochs over the split's pairs.

    Raises:
        UserError: on reading, a token outside the vocabulary.
    """

    def __init__(
        self,
        tokens: PairedTokens,
        numbers: np.ndarray,
        *,
        lengths: tuple[int, int],
        tokenizer: MaskingTokenizer,
        passes: int = 1,
    ):
        self.tokens, self.numbers, self.passes = tokens, numbers, passes
        self.lengths, self.sequence_length, self.index_files = lengths, lengths[1], tuple[Path, ...]()
        self._special, self._vocabulary_size = two_sided_specials(tokenizer), tokenizer.vocabulary_size

    def order(self) -> str:
        """Identifier of the order of the rows; unchanged if rows are appended."""
        return order_checksum(self.numbers)

    def __len__(self) -> int:
        return len(self.numbers)

    def __getitem__(self, row: int) -> dict[str, np.ndarray]:
        check_row(self, row)
        number = int(self.numbers[row])
        texts = self.tokens.pair(number)
        for text, side in zip(texts, self.tokens.sides, strict=True):
            check_vocabulary(text, self._vocabulary_size, side.prefix, lambda _: f"document {number}")
        truncated = len(texts[0]) > self.lengths[0] or len(texts[1]) + 1 > self.lengths[1]
        return two_sided_row(texts[0].tolist(), texts[1].tolist(), self.lengths, self._special, truncated)


def shuffled_passes(bounds: tuple[int, int], rows: int | None, seed: int) -> np.ndarray:
    """Full passes over first to last - 1, each shuffled, with at least `rows` numbers (None: one pass), int64 [n]."""
    generator, count = np.random.RandomState(seed), bounds[1] - bounds[0]
    passes = 1 if rows is None else max(1, math.ceil(rows / count))
    order = np.tile(np.arange(*bounds, dtype=np.int64), (passes, 1))
    for part in order:
        generator.shuffle(part)
    return order.reshape(-1)


class PairsBuilder(BlendBuilder[TranslationPairs]):
    """Rows of pairs; splits are shares of the pairs."""

    def __init__(self, config: PairsConfig, *, lengths: tuple[int, int], tokenizer: MaskingTokenizer, seed: int):
        super().__init__(config, seed=seed)
        self.lengths, self.tokenizer = lengths, tokenizer

    def read(self, path: str, *, prefetch: bool) -> PairedTokens:
        files = self.config.token_files(path)
        return PairedTokens(path, tuple(integer_tokens(f, self.blocks, prefetch=prefetch) for f in files))

    def dataset(
        self, tokens: PairedTokens, identity: str, split: str, bounds: tuple[int, int], rows: int | None
    ) -> TranslationPairs:
        if bounds[0] == bounds[1]:
            raise UserError(
                f"{tokens.prefix}, split {split}: none of {tokens.documents} pairs fall into it. Give it a larger "
                "share in data.split, more data, or ask for no rows of it."
            )
        numbers = shuffled_passes(bounds, rows, self.seed)
        passes = len(numbers) // (bounds[1] - bounds[0])
        return TranslationPairs(tokens, numbers, lengths=self.lengths, tokenizer=self.tokenizer, passes=passes)


def build_splits(config: PairsConfig, *, tokenizer: MaskingTokenizer, schema: Schema, rows: Rows, seed: int) -> Splits:
    """Rows of pairs for the splits that a run requests; see `BlendBuilder.build`.

    Raises:
        UserError: a tokenizer without one of the special tokens; errors of `PairedTokens`.
    """
    demand_tokens(tokenizer, ("bos", "eos"), "pairs of texts", full_words=False)
    lengths = schema["encoder_tokens"].positions(), schema["tokens"].positions()
    return PairsBuilder(config, lengths=lengths, tokenizer=tokenizer, seed=seed).build(rows)
