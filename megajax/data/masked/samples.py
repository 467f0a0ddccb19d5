"""The common part of BERT's and T5's data: samples of sentences of a token file, and the choice of masked words.

The masked tokens of a text are random n-grams of words, as in Megatron-LM.
"""

from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np

from megajax.config.errors import UserError
from megajax.data.masked.config import MaskedConfig
from megajax.data.masked.sample_map import MaskedRequest, build_masked_index
from megajax.data.rows.blend import BlendBuilder, Dataset
from megajax.data.rows.row_source import SampleGenerators, TokenRows, check_row, check_vocabulary, order_checksum
from megajax.data.text.indexed_dataset import IndexedTokens, integer_tokens
from megajax.storage.index_cache import load_or_build

GEOMETRIC = 0.2
"""Parameter of the geometric distribution of span lengths (Joshi et al. 2020, "SpanBERT", section 3.1)."""


class MaskingTokenizer(Protocol):
    """The attributes of a tokenizer that masked data needs."""

    vocabulary_size: int
    pad: int
    specials: Mapping[str, int]
    """Ids by role, such as mask."""
    sentinels: Sequence[int]
    """The tokens that replace masked spans, in this order."""
    continues: np.ndarray | None
    """bool [vocabulary]: the token continues the word before it, as WordPiece's ## pieces do."""
    identity: str


def demand_tokens(tokenizer: MaskingTokenizer, roles: Sequence[str], data: str, full_words: bool) -> None:
    """Raises UserError for a tokenizer without pad token or one of the roles, or with `full_words` without words."""
    missing = [role for role in roles if role not in tokenizer.specials]
    missing += ["pad"] if tokenizer.pad is None else []
    if missing:
        lacks = " and ".join(f"no {role} token" for role in missing)
        raise UserError(
            f"{data} need the tokens {', '.join((*roles, 'pad'))}; the tokenizer {tokenizer.identity} has {lacks}. "
            "Choose the WordPiece tokenizer, or a vocabulary that has them."
        )
    if full_words and tokenizer.continues is None:
        lacks = "does not distinguish words from pieces of words"
        raise UserError(f"the tokenizer {tokenizer.identity} {lacks}: set data.full_words=false to mask single tokens.")


@dataclass(frozen=True, kw_only=True, slots=True)
class Masking:
    """Share and units of masked tokens."""

    probability: float
    """Share of masked tokens."""
    largest: int
    """Words of the longest n-gram."""
    full_words: bool
    """A word is masked with all its pieces; false: each piece is a word."""
    geometric: bool = False
    """Lengths of n-grams follow a geometric distribution; false: their probability falls with 1/n."""
    longer: bool = False
    """Probabilities rise with length instead of falling; only without `geometric`."""


class NgramMasking:
    """Draws disjoint n-grams of words until the share of tokens is reached.

    Args:
        masking: share and units.
        continues: bool [vocabulary], whether a token continues the word before it.
        special: tokens that are never masked.
    """

    def __init__(self, masking: Masking, continues: np.ndarray, special: tuple[int, ...]):
        self.masking = masking
        self._special = np.zeros(len(continues), bool)
        self._special[list(special)] = True
        self._starts_word = ~continues if masking.full_words else np.ones(len(continues), bool)
        shares = 1.0 / np.arange(1, masking.largest + 1)
        shares = shares / shares.sum(keepdims=True)
        if masking.longer:
            shares = shares[::-1]
        # Computed exactly as NumPy's `choice` does, since rounding affects the draws.
        steps = (shares / shares.sum(keepdims=True)).cumsum()
        self._steps: list[float] = (steps / steps[-1]).tolist()

    def spans(self, tokens: np.ndarray, target: int, generator: np.random.RandomState) -> Iterator[list[int]]:
        """Positions of each masked n-gram, in the order in which they are drawn.

        The caller draws the replacements of a span's tokens before it asks for the next span: both come from the same
        generator, in this order.

        Args:
            tokens: int [length], in the vocabulary.
            target: the sample's target length.
            generator: of the sample.
        """
        masking = self.masking
        positions, word_starts = self._split_words(tokens)
        limit = min(masking.probability * target, max(1, round(len(tokens) * masking.probability)))
        length_of = self._length_of(generator)
        masked: set[int] = set()
        order = np.arange(len(word_starts) - 1)
        generator.shuffle(order)
        for word in order.tolist():
            # Even a single token would exceed the limit; no further draws are needed from this generator.
            if len(masked) + 1 > limit:
                return
            number, begin = length_of(), word_starts[word]
            word_ends = word_starts[word + 1 : word + 1 + number]
            fitting = bisect_right(word_ends, begin + limit - len(masked))
            if not fitting:
                continue
            span = positions[begin : word_ends[fitting - 1]]
            if masked.isdisjoint(span):
                masked.update(span)
                yield span

    def _split_words(self, tokens: np.ndarray) -> tuple[list[int], list[int]]:
        """(positions of the tokens that may be masked; start of each word in that list, then its length)."""
        ordinary = np.flatnonzero(~self._special[tokens])
        is_start = self._starts_word[tokens[ordinary]]
        is_start[:1] = True
        return ordinary.tolist(), [*np.flatnonzero(is_start).tolist(), len(ordinary)]

    def _length_of(self, generator: np.random.RandomState) -> Callable[[], int]:
        """A function that draws the length of an n-gram in words."""
        largest, steps = self.masking.largest, self._steps
        if self.masking.geometric:
            return lambda: min(generator.geometric(GEOMETRIC), largest)
        return lambda: bisect_right(steps, generator.random_sample()) + 1


class SampleMap(NamedTuple):
    """The samples of a split."""

    index: np.ndarray
    """[n, 3], see `build_masked_index`."""
    masking: Masking
    """The choice of masked words."""
    seed: int
    """Row i has its own generator with seed + i."""
    passes: int
    """Number of epochs over the split's documents."""
    files: tuple[Path, ...] = ()
    """The cache files of the index."""


class MaskedSamples(TokenRows):
    """Samples of sentences by number; the base of the datasets.

    Args:
        tokens: a sequence for each sentence.

    Raises:
        UserError: on reading, a token outside the vocabulary.
    """

    def __init__(self, tokens: IndexedTokens, samples: SampleMap, tokenizer: MaskingTokenizer):
        self.tokens, self.index, self.passes = tokens, samples.index, samples.passes
        self.index_files = samples.files
        unmasked = tuple(tokenizer.specials[role] for role in ("cls", "sep") if role in tokenizer.specials)
        continues = np.zeros(tokenizer.vocabulary_size, bool) if tokenizer.continues is None else tokenizer.continues
        self.ngrams = NgramMasking(samples.masking, continues, unmasked)
        self._generators, self._vocabulary_size = SampleGenerators(samples.seed), tokenizer.vocabulary_size

    def order(self) -> str:
        """Identifier of the order of the rows."""
        return order_checksum(self.index)

    def __len__(self) -> int:
        return len(self.index)

    def sample(self, row: int) -> tuple[int, int, int, np.random.RandomState]:
        """First sentence of a row, one past its last, its target length, and its generator."""
        check_row(self, row)
        first, last, target = self.index[row].tolist()
        return first, last, target, self._generators.of(row)

    def token_offset(self, number: int) -> int:
        """Offset of a sentence in the file, in tokens."""
        return int(self.tokens.offsets[number]) // self.tokens.dtype.itemsize

    def read(self, first: int, last: int) -> np.ndarray:
        """Tokens of sentences [first, last), which are contiguous in the file."""
        text = self.tokens.read(first, last)

        def locate(_: int) -> str:
            return f"document {self.tokens.document_of(first)} (sentences {first} to {last - 1})"

        check_vocabulary(text, self._vocabulary_size, self.tokens.prefix, locate)
        return text


class MaskedBuilder[Data: Dataset](BlendBuilder[Data]):
    """Rows of masked text; splits are shares of the documents.

    Args:
        config: files, split and masking.
        target: tokens of a sample, without the special ones.
        sentences: minimum number of sentences of a sample.
        seed: of the run.
        make: (token file, sample map) -> dataset.
    """

    def __init__(
        self,
        config: MaskedConfig,
        *,
        target: int,
        sentences: int,
        seed: int,
        make: Callable[[IndexedTokens, SampleMap], Data],
    ):
        super().__init__(config, seed=seed)
        self.short_probability, self.target = config.short_probability, target
        self.sentences, self.make = sentences, make
        if target < 2:
            room = f"{max(target, 0)} positions for text, besides those of special tokens"
            raise UserError(f"the rows have {room}, but need at least 2. Raise the length of the model's rows.")
        self.masking = Masking(
            probability=config.mask_probability,
            largest=config.largest_ngram,
            full_words=config.full_words,
            geometric=config.geometric,
            longer=config.longer_ngrams,
        )

    def read(self, path: str, *, prefetch: bool) -> IndexedTokens:
        return integer_tokens(path, self.blocks, prefetch=prefetch)

    def dataset(self, tokens: Any, identity: str, split: str, bounds: tuple[int, int], rows: int | None) -> Data:
        request = MaskedRequest(
            first=bounds[0],
            last=bounds[1],
            rows=rows,
            target=self.target,
            sentences=self.sentences,
            short_probability=self.short_probability,
            seed=self.seed,
        )
        name = f"{tokens.prefix}, split {split}"

        def build(_: object) -> dict[str, np.ndarray]:
            samples, passes = build_masked_index(tokens.lengths, tokens.document_table, request, name)
            return {"samples": samples, "passes": np.array([passes])}

        arrays = load_or_build(self.folder, {"kind": "masked", "data": identity, **asdict(request)}, build)
        samples = SampleMap(arrays["samples"], self.masking, self.seed, int(arrays["passes"][0]), arrays.files)
        return self.make(tokens, samples)
