"""Rows for language models: a fixed number of tokens from a stream of shuffled documents."""

import hashlib
import warnings
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Protocol

import numpy as np

from megajax.batch import Schema
from megajax.data.rows.blend import BlendBuilder
from megajax.data.rows.row_source import TokenRows, check_row, check_vocabulary, damaged_index, order_checksum
from megajax.data.rows.splits import Rows, Splits, parse_split
from megajax.data.text.config import BlendConfig, MockConfig
from megajax.data.text.gpt_index import IndexRequest, RowIndex, build_index, least_tokens, split_tokens
from megajax.data.text.indexed_dataset import IndexedTokens, SequencePart, integer_tokens
from megajax.storage.index_cache import load_or_build

MOCK_DOCUMENTS = 100_000
MAX_MOCK_LENGTH = 4096
MOCK_SPLIT = "1,1,1"
NO_PAD = -1
"""Padding value for tokenizers without a pad token; not a valid token."""


class DocumentTokenizer(Protocol):
    """The attributes of a tokenizer that datasets need."""

    vocabulary_size: int
    eod: int
    pad: int | None
    identity: str


class TokenSource(Protocol):
    """Sequences of tokens: of a token file (`text.indexed_dataset`), or generated (`MockTokens`)."""

    prefix: Path | str
    dtype: np.dtype
    lengths: np.ndarray

    def gather(self, pieces: Sequence[SequencePart]) -> tuple[np.ndarray, list[int]]: ...
    def document_of(self, sequence: int) -> int: ...
    def identity(self, folder: Path) -> str: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class RowOptions:
    """Length, masks and positions of rows."""

    sequence_length: int
    """S, tokens per row."""
    extra: int = 1
    """1: rows are read with one more token, the last label; 0: the last label is unknown and masked."""
    reset_positions: bool = False
    """Position 0 after each end-of-document token."""
    reset_attention_mask: bool = False
    """A new segment after each end-of-document token."""
    eod_mask_loss: bool = False
    """No loss where the input is the end-of-document token."""
    isolate_documents: bool = False
    """A new segment, from position 0, at the start of each document."""


def pad_token(tokenizer: DocumentTokenizer) -> int:
    """The tokenizer's pad token, or -1 if it has none or if it is the end-of-document token."""
    return NO_PAD if tokenizer.pad is None or tokenizer.pad == tokenizer.eod else tokenizer.pad


def _constant(values: np.ndarray) -> np.ndarray:
    values.setflags(write=False)
    return values


class GPTDataset(TokenRows):
    """Row i of a split as a dict of arrays, a pure function of i.

    `dataset[i]` has these read-only arrays of length S:

        tokens: int32, inputs. Padding is 0.
        labels: int32, the token after each input. Padding is 0.
        loss_mask: float32, 0 if the label is padding (optionally, if the input ends a document), else 1.
        positions: int32, from 0; optionally from 0 in each document.
        segment_ids: int32, index of the document in the row if documents are separated, else 0.
        padding: bool, whether the input is padding.

    Args:
        tokens: the sequences.
        index: the tokens of each row.
        options: row length and masks.
        tokenizer: vocabulary size, end-of-document and pad token.
        passes: number of epochs over the split's sequences.

    Attributes:
        index_files: the cache files of the index.

    Raises:
        UserError: on reading, a token outside the vocabulary.
    """

    def __init__(
        self,
        tokens: TokenSource,
        index: RowIndex,
        options: RowOptions,
        *,
        tokenizer: DocumentTokenizer,
        passes: int = 1,
    ):
        self.tokens, self.index, self.options, self.passes = tokens, index, options, passes
        self.index_files: tuple[Path, ...] = ()
        self.sequence_length = options.sequence_length
        self._vocabulary_size, self._eod, self._pad = tokenizer.vocabulary_size, tokenizer.eod, pad_token(tokenizer)
        # Look-ups in these views take a quarter of the time of arrays.
        # Unsigned, so that a negative number of a damaged index is an error, not an entry from the end.
        self._documents, self._samples, self._shuffle = (
            memoryview(values.view(f"u{values.itemsize}").reshape(-1)) for values in index
        )
        self._masked = options.eod_mask_loss or not options.extra or self._pad != NO_PAD
        self._separated = options.isolate_documents or options.reset_positions or options.reset_attention_mask
        length = options.sequence_length
        self._positions = _constant(np.arange(length, dtype=np.int32))
        self._zeros, self._no_padding = _constant(np.zeros(length, np.int32)), _constant(np.zeros(length, bool))
        self._ones = _constant(np.ones(length, np.float32))

    def order(self) -> str:
        """Identifier of the order of the rows; unchanged if rows are appended."""
        return f"{order_checksum(self.index.documents)}-{order_checksum(self.index.shuffle)}"

    def __len__(self) -> int:
        return len(self._shuffle)

    def __getitem__(self, row: int) -> dict[str, np.ndarray]:
        check_row(self._shuffle, row)
        text, borders, filled = self._text(row)
        loss_mask, positions, segment_ids = self._ones, self._positions, self._zeros
        if self._masked or filled < len(text):
            loss_mask = self._loss_mask(text)
        if self._separated:
            positions, segment_ids = self._numbers(text[: self.sequence_length], borders)
        padding = self._no_padding
        if (self._pad != NO_PAD or filled < len(text)) and (padded := text == self._pad).any():
            text[padded] = 0
            padding = padded[: self.sequence_length]
        text.setflags(write=False)
        if self.options.extra:
            tokens, labels = text[:-1], text[1:]
        else:
            tokens, labels = text, _constant(np.append(text[1:], np.int32(0)))
        return {
            "tokens": tokens,
            "labels": labels,
            "loss_mask": loss_mask,
            "positions": positions,
            "segment_ids": segment_ids,
            "padding": padding,
        }

    def document_lengths(self, row: int) -> np.ndarray | None:
        """Tokens of each document of a row, int64 [D]; None if they depend on its tokens."""
        options, length = self.options, self.sequence_length
        if options.reset_attention_mask:
            return None
        if not options.isolate_documents:
            return np.array([length])
        try:
            parts = [int(self.tokens.lengths[sequence]) - begin for sequence, begin, _ in self._pieces(row)]
        except (IndexError, ValueError) as error:
            raise damaged_index(self.tokens.prefix, row, self.index_files) from error
        starts = np.unique(np.minimum([0, *np.cumsum(parts[:-1])], length))
        return np.diff(starts[starts < length], append=length)

    def _pieces(self, row: int) -> list[SequencePart]:
        """The parts of a row."""
        position = 2 * self._shuffle[row]
        first, begin, last, end = self._samples[position : position + 4]
        end += self.options.extra
        if first == last:
            return [(self._documents[first], begin, end)]
        pieces: list[SequencePart] = [(document, 0, None) for document in self._documents[first : last + 1]]
        pieces[0], pieces[-1] = (pieces[0][0], begin, None), (pieces[-1][0], 0, end)
        return pieces

    def _text(self, row: int) -> tuple[np.ndarray, list[int], int]:
        """Tokens [S + extra] with padding at the end, the start of each document, and the number of real tokens."""
        size = self.sequence_length + self.options.extra
        try:
            pieces = self._pieces(row)
            stored, borders = self.tokens.gather(pieces)
        except (IndexError, ValueError) as error:
            raise damaged_index(self.tokens.prefix, row, self.index_files) from error

        def locate(at: int) -> str:
            piece = int(np.searchsorted(borders, at, side="right")) - 1
            sequence, begin, _ = pieces[piece]
            document = self.tokens.document_of(sequence)
            return f"document {document} (sequence {sequence}) at position {begin + at - borders[piece]}"

        check_vocabulary(stored, self._vocabulary_size, self.tokens.prefix, locate)
        text, filled = stored.astype(np.int32), len(stored)  # after the check, because int64 tokens may overflow
        if filled < size:
            text = np.append(text, np.full(size - filled, self._pad, np.int32))
        return text, borders, filled

    def _loss_mask(self, text: np.ndarray) -> np.ndarray:
        masked = text[1:] == self._pad if self.options.extra else np.append(text[1:] == self._pad, True)
        if self.options.eod_mask_loss:
            masked |= text[: self.sequence_length] == self._eod
        return _constant(np.where(masked, np.float32(0), np.float32(1))) if masked.any() else self._ones

    def _numbers(self, tokens: np.ndarray, borders: list[int]) -> tuple[np.ndarray, np.ndarray]:
        """(positions, segment_ids) [S]. An end-of-document token belongs to the document that it ends."""
        options, length = self.options, self.sequence_length
        starts = np.zeros(length, bool)
        if options.isolate_documents:
            starts[[border for border in borders if 0 < border < length]] = True
        after_eod = np.zeros(length, bool)
        after_eod[1:] = tokens[:-1] == self._eod
        positions, segments = self._positions, self._zeros
        new_run = starts | after_eod if options.reset_positions else starts
        if new_run.any():
            positions = positions - np.maximum.accumulate(np.where(new_run, positions, 0))
        new_segment = starts | after_eod if options.reset_attention_mask else starts
        if new_segment.any():
            segments = np.cumsum(new_segment, dtype=np.int32)
        return _constant(positions), _constant(segments)


class DatasetBuilder(BlendBuilder[GPTDataset]):
    """Rows for language models; splits are shares of the sequences."""

    def __init__(self, config: BlendConfig, *, tokenizer: DocumentTokenizer, sequence_length: int, seed: int):
        super().__init__(config, seed=seed)
        self.tokenizer, self.drop_last = tokenizer, config.drop_last
        self.options = RowOptions(
            sequence_length=sequence_length,
            extra=int(config.extra_token),
            reset_positions=config.reset_positions,
            reset_attention_mask=config.reset_attention_mask,
            eod_mask_loss=config.eod_mask_loss,
            isolate_documents=config.isolate_documents,
        )

    def read(self, path: str, *, prefetch: bool) -> IndexedTokens:
        return integer_tokens(path, self.blocks, prefetch=prefetch)

    def units(self, tokens: TokenSource) -> int:
        return len(tokens.lengths)

    def dataset(
        self, tokens: TokenSource, identity: str, split: str, bounds: tuple[int, int], rows: int | None
    ) -> GPTDataset:
        request = IndexRequest(
            first=bounds[0],
            last=bounds[1],
            rows=rows,
            sequence_length=self.options.sequence_length,
            seed=self.seed,
            extra=self.options.extra,
            drop_last=self.drop_last or split != "valid",
        )
        description = {"kind": "gpt", "data": identity, "split": split, **asdict(request), **asdict(self.options)}
        description |= {"tokenizer": self.tokenizer.identity, "pad": pad_token(self.tokenizer)}
        name = f"{tokens.prefix}, split {split}"
        arrays = load_or_build(
            self.folder, description, lambda new: build_index(tokens.lengths, request, name, new)._asdict()
        )
        index = RowIndex(**arrays)
        passes = len(index.documents) // (request.last - request.first)  # each reads every sequence once
        total = split_tokens(tokens.lengths, request, least_tokens(request))
        if total < least_tokens(request):
            plural = "s" * (total != 1)
            warnings.warn(
                f"{name}: has {total} token{plural}, but a row reads {least_tokens(request)}: its documents are "
                f"repeated within rows, {passes} times in all, as in Megatron-LM. Give it a larger share in "
                "data.split, or more data.",
                stacklevel=2,
            )
        dataset = self.make(tokens, identity, index, passes)
        dataset.index_files = arrays.files
        return dataset

    def make(self, tokens: TokenSource, identity: str, index: RowIndex, passes: int) -> GPTDataset:
        """The dataset of an index."""
        return GPTDataset(tokens, index, self.options, tokenizer=self.tokenizer, passes=passes)


def build_splits(config: BlendConfig, *, tokenizer: DocumentTokenizer, schema: Schema, rows: Rows, seed: int) -> Splits:
    """Rows of tokens for the splits that a run requests; see `BlendBuilder.build`."""
    builder = DatasetBuilder(config, tokenizer=tokenizer, sequence_length=schema["tokens"].positions(), seed=seed)
    return builder.build(rows)


class MockTokens:
    """Synthetic documents without disk access, for tests and to measure speed: each of 1 to 4095 tokens.

    One of length L reads 1, 2, …, L-1 (modulo the vocabulary), end. The lengths come from NumPy's
    `default_rng(0)`, as in Megatron-LM's mock dataset.
    """

    def __init__(self, *, vocabulary_size: int, eod: int, documents: int = MOCK_DOCUMENTS):
        self.prefix = Path("mock")
        self.dtype = np.dtype(np.int32)
        self.lengths = np.random.default_rng(0).integers(1, MAX_MOCK_LENGTH, size=documents, dtype=np.int32)
        self._eod = eod
        self._vocabulary_size = vocabulary_size
        self._counting = (np.arange(1, MAX_MOCK_LENGTH + 1) % vocabulary_size).astype(np.int32)

    def sequence(self, number: int, start: int = 0, stop: int | None = None) -> np.ndarray:
        """Tokens [start, stop) of a document (to its end when stop is None), int32."""
        length = int(self.lengths[number])
        if stop is not None and stop < length:
            return self._counting[start:stop]
        tokens = self._counting[start:length].copy()
        tokens[-1:] = self._eod
        return tokens

    def gather(self, pieces: Sequence[SequencePart]) -> tuple[np.ndarray, list[int]]:
        """Concatenated tokens of parts of documents, and the start of each part in them."""
        parts = [self.sequence(*piece) for piece in pieces]
        sizes = [len(part) for part in parts]
        return np.concatenate(parts), [0, *np.cumsum(sizes[:-1]).tolist()]

    def document_of(self, sequence: int) -> int:
        """The sequence itself: each is a document."""
        return sequence

    def identity(self, folder: Path) -> str:
        """Hash of the parameters of the tokens."""
        del folder
        count = len(self.lengths)
        number = "" if count == MOCK_DOCUMENTS else f" {count}"
        return hashlib.sha256(f"mock {self._vocabulary_size} {self._eod}{number}".encode()).hexdigest()


def build_mock_splits(
    config: MockConfig, *, tokenizer: DocumentTokenizer, schema: Schema, rows: Rows, seed: int
) -> Splits:
    """Synthetic rows for the splits that a run requests; each split has a third of the documents."""
    blend = BlendConfig(seed=config.seed, isolate_documents=config.isolate_documents)
    builder = DatasetBuilder(blend, tokenizer=tokenizer, sequence_length=schema["tokens"].positions(), seed=seed)
    documents = config.documents or MOCK_DOCUMENTS
    tokens = MockTokens(vocabulary_size=tokenizer.vocabulary_size, eod=tokenizer.eod, documents=documents)
    return builder.splits([tokens], None, parse_split(MOCK_SPLIT), rows)
