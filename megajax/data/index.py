"""The tokens of each row: the document, sample and shuffle indices of Megatron-LM's GPT dataset.

E copies of the documents of a split are shuffled and concatenated into one stream of tokens. Row k of the stream starts
at token k·S and has S tokens plus one extra, the last label, so adjacent rows share a token. Then the rows are
shuffled. A single generator, seeded once, does both shuffles, and the arrays are bitwise equal to Megatron-LM's.
"""

from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from megajax.config.errors import UserError

SEPARATE_BELOW = 0.80
"""The last epoch is shuffled separately if less than this share of it is used."""
UINT32_MAX = np.iinfo(np.uint32).max
INT32_MAX = np.iinfo(np.int32).max


@dataclass(frozen=True, kw_only=True, slots=True)
class IndexRequest:
    """The parameters of an index."""

    first: int
    """First sequence of the split."""
    last: int
    """One past the last sequence of the split."""
    rows: int | None
    """Minimum number of rows; None: one epoch."""
    sequence_length: int
    """S, tokens per row."""
    seed: int
    """Seed of the generator, 0 to 2^32 - 1."""
    extra: int = 1
    """1 if each row reads one token more than its length, else 0."""
    drop_last: bool = True
    """False: an incomplete last row is kept."""


class RowIndex(NamedTuple):
    """The three arrays of an index. Row i is row `shuffle[i]` of the stream."""

    documents: np.ndarray
    """int32 [D]: sequence numbers in the order of the stream."""
    samples: np.ndarray
    """int32 or int64 [n + 1, 2]: start of each row: position in `documents`, token offset in that sequence."""
    shuffle: np.ndarray
    """uint32 or int64 [n]: order of the rows of the stream."""


class Epochs(NamedTuple):
    """Number of epochs, and whether the last one is shuffled separately."""

    count: int
    rows_before_last: int
    separate_last: bool


def plan_epochs(tokens_per_epoch: int, request: IndexRequest) -> Epochs:
    """The smallest number of epochs that hold the requested rows of S tokens and the extra token of the last row."""
    if request.rows is None:
        return Epochs(1, 0, False)
    length, extra = request.sequence_length, request.extra
    count = max(1, -(-(request.rows * length + extra) // tokens_per_epoch))
    if count == 1:
        return Epochs(1, 0, False)
    before = ((count - 1) * tokens_per_epoch - extra) // length
    per_epoch = (tokens_per_epoch - extra) // length
    return Epochs(count, before, request.rows - before < int(SEPARATE_BELOW * per_epoch))


def least_tokens(request: IndexRequest) -> int:
    """Minimum number of tokens of a split for one epoch to have a row."""
    return request.extra + (request.sequence_length if request.drop_last else 1)


def build_index(lengths: np.ndarray, request: IndexRequest, name: str) -> RowIndex:
    """Build the three arrays of a split. A split with too few tokens for a row is repeated until a row is full.

    Args:
        lengths: int32 [N], tokens of every sequence of the token file.
        request: split, rows, row length, seed.
        name: the split's name in errors.

    Raises:
        UserError: the split has no sequences or no tokens.
    """
    split_lengths = lengths[request.first : request.last]
    tokens = int(split_lengths.sum(dtype=np.int64))
    if not tokens:
        raise UserError(
            f"{name}: {len(split_lengths)} of {len(lengths)} sequences fall into it (numbers {request.first} to "
            f"{request.last}), with 0 tokens: there is nothing to make rows of. Give it a larger share in data.split, "
            "more data, or ask for no rows of it."
        )
    if request.rows is None and tokens < least_tokens(request):
        request = replace(request, rows=1)  # one epoch has no row
    epochs = plan_epochs(tokens, request)
    if tokens < least_tokens(request) and epochs.count * len(split_lengths) > INT32_MAX:
        raise UserError(
            f"{name}: its {tokens} tokens would be repeated {epochs.count} times for {request.rows} rows of "
            f"{request.sequence_length}. Give it a larger share in data.split, more data, or ask for fewer rows of it."
        )
    generator = np.random.RandomState(request.seed)
    documents = _document_index(request, epochs, generator)
    stream_ends = np.cumsum(lengths[documents], dtype=np.int64)
    samples = _sample_index(stream_ends, int(lengths.max()), request)
    rows = len(samples) - 1
    shuffle = _shuffle_index(epochs.rows_before_last if epochs.separate_last else rows, rows, generator)
    return RowIndex(documents, samples, shuffle)


def _document_index(request: IndexRequest, epochs: Epochs, generator: np.random.RandomState) -> np.ndarray:
    sequences = np.arange(request.first, request.last, dtype=np.int32)
    parts = (epochs.count - 1, 1) if epochs.separate_last else (epochs.count,)
    shuffled = [np.tile(sequences, copies) for copies in parts]
    for part in shuffled:
        generator.shuffle(part)
    return np.concatenate(shuffled)


def _sample_index(stream_ends: np.ndarray, longest: int, request: IndexRequest) -> np.ndarray:
    """Row k + 1 starts at token (k + 1)·S, in the document of the last token (including the extra one) of row k.

    If a row ends exactly at the end of a document, the next one starts at that document's last token, not in the next
    document.

    Args:
        stream_ends: int64 [D], cumulative sum of document lengths in stream order.
        longest: length of the longest sequence of the file; together with D, it determines the dtype.
        request: row length, extra token, whether to drop an incomplete last row.
    """
    length, extra, total = request.sequence_length, request.extra, int(stream_ends[-1])
    # Integer ceiling: Megatron-LM divides float32 numbers here, which is wrong above 2^24 tokens.
    rows = (total - extra) // length if request.drop_last else -(-(total - extra) // length)
    dtype = np.int32 if max(len(stream_ends), longest) <= INT32_MAX else np.int64
    samples = np.zeros((rows + 1, 2), dtype)
    starts = np.arange(1, rows + 1, dtype=np.int64) * length
    # If the stream ends inside the last row, that row ends there too.
    past_end = rows > 0 and int(starts[-1]) + extra > total
    last_tokens = starts + (extra - 1)
    positions = np.searchsorted(stream_ends, last_tokens[: rows - past_end], side="right")
    before = np.where(positions > 0, stream_ends[positions - 1], 0)
    samples[1 : rows + 1 - past_end, 0] = positions
    samples[1 : rows + 1 - past_end, 1] = starts[: rows - past_end] - before
    if past_end:
        last_start = int(stream_ends[-2]) if len(stream_ends) > 1 else 0
        samples[rows] = len(stream_ends) - 1, total - last_start - extra
    return samples


def _shuffle_index(first: int, rows: int, generator: np.random.RandomState) -> np.ndarray:
    """0 .. rows-1, with [0, first) and [first, rows) each shuffled in place."""
    shuffle = np.arange(rows, dtype=np.uint32 if rows < UINT32_MAX - 1 else np.int64)
    generator.shuffle(shuffle[:first])
    if first < rows:
        generator.shuffle(shuffle[first:])
    return shuffle
