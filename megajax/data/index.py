"""Which tokens make up row i: the document, sample and shuffle indices of Megatron-LM's GPT dataset.

The documents of a split, E copies of them, are shuffled and read as one stream of tokens. Row k of the stream starts
at token k·S and spans S tokens plus one extra that is the last label, so neighbours share a token. The rows are
shuffled in turn. One generator, seeded once, does both, and the arrays are equal to Megatron-LM's to the last bit.
"""

from dataclasses import asdict, dataclass
from typing import NamedTuple

import numpy as np

from megajax.config.errors import UserError

SEPARATE_BELOW = 0.80
"""The last epoch is shuffled apart when less than this share of it is asked for."""
UINT32_MAX = np.iinfo(np.uint32).max
INT32_MAX = np.iinfo(np.int32).max


@dataclass(frozen=True, kw_only=True, slots=True)
class IndexRequest:
    """What an index is built for."""

    first: int
    """First sequence of the split."""
    last: int
    """One past its last sequence."""
    rows: int | None
    """Rows needed at least; None is one epoch."""
    sequence_length: int
    """S, tokens of a row."""
    seed: int
    """Seed of the generator, 0 to 2^32 - 1."""
    extra: int = 1
    """1 when each row reads one token more than it holds, else 0."""
    drop_last: bool = True
    """False: the incomplete last row counts too."""

    def describe(self) -> dict[str, int | bool | None]:
        """Everything the index depends on but the data."""
        return asdict(self)


class RowIndex(NamedTuple):
    """Three arrays that give row i: its place in the stream is `shuffle[i]`."""

    documents: np.ndarray
    """int32 [D]: sequence numbers in the order of the stream."""
    samples: np.ndarray
    """int32 or int64 [n + 1, 2]: where each row begins: position in `documents`, token offset in that sequence."""
    shuffle: np.ndarray
    """uint32 or int64 [n]: order in which the rows of the stream are used."""


class Epochs(NamedTuple):
    """How often the split is read, and whether its last epoch is shuffled apart from the others."""

    count: int
    rows_before_last: int
    separate_last: bool


def plan_epochs(tokens_per_epoch: int, request: IndexRequest) -> Epochs:
    """Fewest epochs that hold the rows asked for, each row S tokens, plus the extra token of the last row."""
    if request.rows is None:
        return Epochs(1, 0, False)
    length, extra = request.sequence_length, request.extra
    count = max(1, -(-(request.rows * length + extra) // tokens_per_epoch))
    if count == 1:
        return Epochs(1, 0, False)
    before = ((count - 1) * tokens_per_epoch - extra) // length
    per_epoch = (tokens_per_epoch - extra) // length
    return Epochs(count, before, request.rows - before < int(SEPARATE_BELOW * per_epoch))


def build_index(lengths: np.ndarray, request: IndexRequest, name: str) -> RowIndex:
    """Build the three arrays of a split.

    Args:
        lengths: int32 [N], tokens of every sequence of the token file.
        request: split, rows, row length, seed.
        name: what to call the split in errors.

    Raises:
        UserError: the split has no sequences, no tokens, or too few tokens for a single row.
    """
    own = lengths[request.first : request.last]
    tokens = int(own.sum(dtype=np.int64))
    least = 1 if not request.drop_last else request.sequence_length
    if tokens < least + request.extra:
        raise UserError(
            f"{name}: {len(own)} of {len(lengths)} sequences fall into it (numbers {request.first} to {request.last}), "
            f"with {tokens} tokens; one row needs {least + request.extra}. Give it a larger share in data.split, "
            "more data, or ask for no rows of it."
        )
    epochs = plan_epochs(tokens, request)
    generator = np.random.RandomState(request.seed)
    documents = _document_index(request, epochs, generator)
    stream_ends = np.cumsum(lengths[documents], dtype=np.int64)
    samples = _sample_index(stream_ends, int(lengths.max()), request)
    rows = len(samples) - 1
    shuffle = _shuffle_index(epochs.rows_before_last if epochs.separate_last else rows, rows, generator)
    return RowIndex(documents, samples, shuffle)


def _document_index(request: IndexRequest, epochs: Epochs, generator: np.random.RandomState) -> np.ndarray:
    own = np.arange(request.first, request.last, dtype=np.int32)
    parts = (epochs.count - 1, 1) if epochs.separate_last else (epochs.count,)
    shuffled = [np.tile(own, copies) for copies in parts]
    for part in shuffled:
        generator.shuffle(part)
    return np.concatenate(shuffled)


def _sample_index(stream_ends: np.ndarray, longest: int, request: IndexRequest) -> np.ndarray:
    """Row k + 1 starts at token (k + 1)·S, recorded in the document of row k's last token (extra included).

    So after an exact fit the next row starts on the last token of that document, not at the head of the next one.

    Args:
        stream_ends: int64 [D], running sum of document lengths in stream order.
        longest: tokens of the longest sequence of the file; decides on the dtype, as does D.
        request: row length, extra token, what to do with an incomplete last row.
    """
    length, extra, total = request.sequence_length, request.extra, int(stream_ends[-1])
    # A ceiling in integers: Megatron-LM divides float32 numbers here, which miscounts above 2^24 tokens.
    rows = (total - extra) // length if request.drop_last else -(-(total - extra) // length)
    dtype = np.int32 if max(len(stream_ends), longest) <= INT32_MAX else np.int64
    samples = np.zeros((rows + 1, 2), dtype)
    starts = np.arange(1, rows + 1, dtype=np.int64) * length
    # The stream may end inside the last row; that row then ends where the stream does.
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
