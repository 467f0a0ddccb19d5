"""The sentences of each sample of masked data: the sample map of Megatron-LM's BERT and T5 datasets.

A sample is a run of sentences of one document, up to a target length. The targets are drawn one after another from
`std::mt19937`, and the samples are shuffled by `std::mt19937_64`; the array is bitwise equal to Megatron-LM's.
"""

from array import array
from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from megajax.config.errors import UserError

LONGEST_SENTENCE = 512
"""A document of several sentences is skipped if one has more tokens than this."""
DRAWS = 1 << 20
"""Random numbers that are drawn at a time."""
STATE, MIDDLE = 312, 156
"""Words of the state of the 64-bit Mersenne Twister, and the distance between the words that it combines."""
UPPER, LOWER = np.uint64(0xFFFFFFFF80000000), np.uint64(0x7FFFFFFF)
TWIST = np.uint64(0xB5026F5AA96619E9)


@dataclass(frozen=True, kw_only=True, slots=True)
class MaskedRequest:
    """The parameters of a sample map."""

    first: int
    """First document of the split."""
    last: int
    """One past the last document of the split."""
    rows: int | None
    """Minimum number of samples; None: one epoch."""
    target: int
    """Tokens of a sample, without special tokens."""
    sentences: int
    """Minimum number of sentences of a sample."""
    short_probability: float
    """Share of the samples whose target is drawn between 2 and `target`."""
    seed: int
    """Seed of both generators."""


def mersenne_twister_64(seed: int, count: int) -> Iterator[np.ndarray]:
    """The first `count` numbers of C++'s `std::mt19937_64(seed)`, uint64, in blocks of up to 312.

    Nishimura 2000, "Tables of 64-bit Mersenne twisters"; the constants are those of the C++ standard, [rand.predef].
    """
    seeds = [seed & 0xFFFFFFFFFFFFFFFF]
    for number in range(1, STATE):
        seeds.append((6364136223846793005 * (seeds[-1] ^ (seeds[-1] >> 62)) + number) & 0xFFFFFFFFFFFFFFFF)
    state = np.array(seeds, np.uint64)

    def twisted(upper: np.ndarray, lower: np.ndarray, source: np.ndarray) -> np.ndarray:
        joined = (upper & UPPER) | (lower & LOWER)
        return source ^ (joined >> np.uint64(1)) ^ (joined & np.uint64(1)) * TWIST

    for start in range(0, count, STATE):
        # The second half of the new state depends on the first, and its last word on the first word.
        state[:MIDDLE] = twisted(state[:MIDDLE], state[1 : MIDDLE + 1], state[MIDDLE:])
        state[MIDDLE:-1] = twisted(state[MIDDLE:-1], state[MIDDLE + 1 :], state[: MIDDLE - 1])
        state[-1:] = twisted(state[-1:], state[:1], state[MIDDLE - 1 : MIDDLE])
        block = state[: count - start]
        block = block ^ ((block >> np.uint64(29)) & np.uint64(0x5555555555555555))
        block ^= (block << np.uint64(17)) & np.uint64(0x71D67FFFEDA60000)
        block ^= (block << np.uint64(37)) & np.uint64(0xFFF7EEE000000000)
        yield block ^ (block >> np.uint64(43))


def shuffled_indices(count: int, seed: int) -> np.ndarray:
    """Permutation of 0 … count-1, int64: Fisher-Yates from the top, with numbers of `mersenne_twister_64`."""
    order, top = array("q", range(count)), count - 1
    for block in mersenne_twister_64(seed, max(count - 1, 0)):
        choices = block % np.arange(top + 1, top + 1 - len(block), -1, dtype=np.uint64)
        # Each swap depends on the ones before it.
        for partner in choices.tolist():
            order[top], order[partner] = order[partner], order[top]
            top -= 1
    return np.frombuffer(order, np.int64) if count else np.zeros(0, np.int64)


def target_lengths(request: MaskedRequest) -> Iterator[int]:
    """Infinite sequence of target lengths, in the order in which they are drawn."""
    # C's round(); Python's rounds halves to even.
    ratio = int(np.floor(1 / request.short_probability + 0.5)) if request.short_probability else 0
    generator = np.random.RandomState(request.seed)  # with an integer seed, the state of std::mt19937
    while True:
        if not ratio:
            yield from [request.target] * DRAWS
            continue
        draws = generator.randint(0, 1 << 32, DRAWS, dtype=np.uint32).astype(np.int64)
        yield from np.where(draws % ratio == 0, 2 + draws % (request.target - 1), request.target).tolist()


def build_masked_index(
    lengths: np.ndarray, documents: np.ndarray, request: MaskedRequest, name: str
) -> tuple[np.ndarray, int]:
    """(the sample map, number of passes over the documents).

    The map is uint32 (int64 for large files) [n, 3]: first sentence, one past the last, target length.

    Full passes over the documents repeat until there are `rows` samples. A document is skipped if it has fewer than
    `sentences` sentences, or has several and one of them is longer than 512 tokens. A sample ends when it reaches its
    target length and more than one sentence follows in the document, or at the end of the document.

    Args:
        lengths: int32 [N], tokens of each sentence.
        documents: int64 [D + 1], first sentence of each document, then N.
        request: the parameters.
        name: of the data, for messages.

    Raises:
        UserError: no document can be used.
    """
    table = documents[request.first : request.last + 1]
    usable = _usable(lengths, table, request, name)
    first, last = int(table[0]), int(table[-1])
    bounds = np.zeros(last - first + 1, np.int64)
    np.cumsum(lengths[first:last], out=bounds[1:])
    # End of a sample of full length that starts at each sentence; most samples have that length.
    full = np.searchsorted(bounds, bounds[:-1] + request.target)
    full = np.maximum(full, np.arange(len(full)) + request.sentences)
    starts, stops = ((table[:-1] - first)[usable], (table[1:] - first)[usable])
    targets, samples, passes = target_lengths(request), array("q"), 0
    while len(samples) < 3 * max(request.rows or 1, 1):
        passes += 1
        _walk(samples, (starts, stops), (bounds, full), targets, request)
    unordered = np.frombuffer(samples, np.int64).reshape(-1, 3) + np.array([first, first, 0])
    dtype = np.uint32 if len(lengths) <= np.iinfo(np.uint32).max else np.int64
    return unordered.astype(dtype)[shuffled_indices(len(unordered), request.seed + 1)], passes


def _usable(lengths: np.ndarray, table: np.ndarray, request: MaskedRequest, name: str) -> np.ndarray:
    """Whether each document has samples, bool [documents]."""
    counts = np.diff(table)
    long_before = np.concatenate([[0], np.cumsum(lengths[table[0] : table[-1]] > LONGEST_SENTENCE)])
    too_long = (np.diff(long_before[table - table[0]]) > 0) & (counts > 1)
    enough = counts >= request.sentences
    if not (enough & ~too_long).any():
        raise UserError(
            f"{name}: none of its {len(counts)} documents can be used: {np.sum(counts == 0)} have no sentence, "
            f"{np.sum(~enough)} fewer than the {request.sentences} that a sample needs, {np.sum(enough & too_long)} "
            f"one longer than {LONGEST_SENTENCE} tokens. Masked data needs a sequence for each "
            "sentence (python -m megajax.preprocess --split-sentences), and documents of several sentences."
        )
    return enough & ~too_long


def _walk(
    samples: array,
    documents: tuple[np.ndarray, np.ndarray],
    tables: tuple[np.ndarray, np.ndarray],
    targets: Iterator[int],
    request: MaskedRequest,
) -> None:
    """Appends the samples of one pass. Each sample's draw depends on all earlier ones, so this cannot be vectorized.

    documents: first sentence and one past the last of each; tables: `bounds` and `full` of `build_masked_index`.
    """
    bounds, full = memoryview(tables[0]), memoryview(tables[1])
    most, least, add = request.target, request.sentences, samples.extend
    for start, end in zip(documents[0].tolist(), documents[1].tolist(), strict=True):
        while start < end:
            target = next(targets)
            stop = (
                full[start]
                if target == most
                else max(bisect_left(bounds, bounds[start] + target, start, end), start + least)
            )
            # The last sentence of a document is never a sample by itself.
            stop = end if stop > end - 2 else stop
            add((start, stop, target))
            start = stop
        next(targets)  # also drawn after the last sample
