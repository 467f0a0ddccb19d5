"""The tokens of each row: the document, sample and shuffle indices of Megatron-LM's GPT dataset.

E copies of the documents of a split are shuffled and concatenated into one stream of tokens. Row k of the stream starts
at token k·S and has S tokens plus one extra, the last label, so adjacent rows share a token. Then the rows are
shuffled. A single generator, seeded once, does both shuffles, and the arrays are bitwise equal to Megatron-LM's.

All arrays are computed in chunks, where the caller allocates them. In memory-mapped files, they need no other memory:
4 bytes for a document of each epoch, and 12 for a row.
"""

from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from megajax.config.errors import UserError
from megajax.storage.index_cache import NewArray

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


CHUNK = 1 << 20
"""Documents or rows that are computed at a time, to limit memory."""


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


def split_tokens(lengths: np.ndarray, request: IndexRequest, enough: int) -> int:
    """Tokens of a split if they are fewer than `enough`, else some number from `enough` on."""
    total = 0
    for start in range(request.first, request.last, CHUNK):
        total += int(lengths[start : min(start + CHUNK, request.last)].sum(dtype=np.int64))
        if total >= enough:
            break
    return total


def build_index(lengths: np.ndarray, request: IndexRequest, name: str, new: NewArray = np.zeros) -> RowIndex:
    """Build the three arrays of a split. A split with too few tokens for a row is repeated until a row is full.

    Args:
        lengths: int32 [N], tokens of every sequence of the token file.
        request: split, rows, row length, seed.
        name: the split's name in errors.
        new: allocates the arrays.

    Raises:
        UserError: the split has no sequences or no tokens.
    """
    split_lengths = lengths[request.first : request.last]
    tokens = int(split_lengths.sum(dtype=np.int64))
    if not tokens:
        raise UserError(
            f"{name}: {len(split_lengths)} of {len(lengths)} sequences fall into it (numbers {request.first} to "
            f"{request.last}), with 0 tokens: there is nothing to make rows of. Give it a larger share in data.split, "
            "more data, or ask for no rows of it. Plain text is one sequence, unless preprocess divides it "
            "(--document=paragraph)."
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
    documents = _document_index(request, epochs, generator, new)
    samples = _sample_index(lengths, documents, tokens * epochs.count, request, new)
    rows = len(samples) - 1
    shuffle = _shuffle_index(epochs.rows_before_last if epochs.separate_last else rows, rows, generator, new)
    return RowIndex(documents, samples, shuffle)


def _count_up(values: np.ndarray, first: int) -> None:
    """first, first + 1, … in place."""
    for start in range(0, len(values), CHUNK):
        part = values[start : start + CHUNK]
        part[:] = np.arange(first + start, first + start + len(part), dtype=values.dtype)


def _document_index(
    request: IndexRequest, epochs: Epochs, generator: np.random.RandomState, new: NewArray
) -> np.ndarray:
    sequences = request.last - request.first
    documents = new(epochs.count * sequences, np.int32)
    _count_up(documents[:sequences], request.first)
    filled = sequences
    while filled < len(documents):
        part = documents[filled : 2 * filled]
        part[:] = documents[: len(part)]
        filled += len(part)
    together = epochs.count - epochs.separate_last
    for part in (documents[: together * sequences], documents[together * sequences :]):
        generator.shuffle(part)
    return documents


def _sample_index(
    lengths: np.ndarray, documents: np.ndarray, total: int, request: IndexRequest, new: NewArray
) -> np.ndarray:
    """Row k + 1 starts at token (k + 1)·S, in the document of the last token (including the extra one) of row k.

    If a row ends exactly at the end of a document, the next one starts at that document's last token, not in the next
    document.

    Args:
        lengths: int32 [N], tokens of every sequence of the file; the longest, with D, determines the dtype.
        documents: int32 [D], sequences in stream order.
        total: tokens of the stream.
        request: row length, extra token, whether to drop an incomplete last row.
        new: allocates the array.
    """
    length, extra = request.sequence_length, request.extra
    # Integer ceiling: Megatron-LM divides float32 numbers here, which is wrong above 2^24 tokens.
    rows = (total - extra) // length if request.drop_last else -(-(total - extra) // length)
    dtype = np.int32 if max(len(documents), int(lengths.max())) <= INT32_MAX else np.int64
    samples = new((rows + 1, 2), dtype)
    # If the stream ends inside the last row, that row ends there too.
    past_end = rows > 0 and rows * length + extra > total
    row, chunk_start = 1, 0  # the next row, and the first token of the chunk
    for first in range(0, len(documents), CHUNK):
        ends = np.cumsum(lengths[documents[first : first + CHUNK]], dtype=np.int64)
        ends += chunk_start
        chunk_end = int(ends[-1])
        last_row = min((chunk_end - extra) // length, rows - past_end)
        while row <= last_row:
            starts = np.arange(row, min(row + CHUNK, last_row + 1), dtype=np.int64) * length
            positions = np.searchsorted(ends, starts + (extra - 1), side="right")
            before = np.where(positions > 0, ends[positions - 1], chunk_start)
            samples[row : row + len(starts), 0] = positions + first
            samples[row : row + len(starts), 1] = starts - before
            row += len(starts)
        chunk_start = chunk_end
    if past_end:
        last_start = total - int(lengths[documents[-1]])
        samples[rows] = len(documents) - 1, total - last_start - extra
    return samples


def _shuffle_index(first: int, rows: int, generator: np.random.RandomState, new: NewArray) -> np.ndarray:
    """0 .. rows-1, with [0, first) and [first, rows) each shuffled in place."""
    shuffle = new(rows, np.uint32 if rows < UINT32_MAX - 1 else np.int64)
    _count_up(shuffle, 0)
    generator.shuffle(shuffle[:first])
    if first < rows:
        generator.shuffle(shuffle[first:])
    return shuffle
