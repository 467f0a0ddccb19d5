"""Choice of the masked tokens of a text: random n-grams of words, as in Megatron-LM."""

from bisect import bisect_right
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

GEOMETRIC = 0.2
"""Parameter of the geometric distribution of span lengths (Joshi et al. 2020, "SpanBERT", section 3.1)."""


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
