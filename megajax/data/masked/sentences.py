"""Rows for BERT: consecutive sentences in two parts, with masked words."""

from functools import partial

import numpy as np

from megajax.batch import Schema
from megajax.data.masked.config import MaskedSentencesConfig
from megajax.data.masked.samples import MaskedBuilder, MaskedSamples, MaskingTokenizer, SampleMap, demand_tokens
from megajax.data.rows.splits import Rows, Splits
from megajax.data.text.indexed_dataset import IndexedTokens

MASKED = 0.8
"""Share of the chosen tokens that become the mask token; half of the others become a random one."""
SPECIAL = 3
"""[CLS] and two [SEP]."""


class MaskedSentences(MaskedSamples):
    """Row i of a split as a dict of arrays, a pure function of i: [CLS] part A [SEP] part B [SEP], then padding.

    All arrays but the last two have length S:

        tokens: int32, masked; padding is the pad token.
        labels: int32, the original token where `loss_mask` is 1, else 0.
        loss_mask: float32, 1 for the tokens chosen by the masking, including unchanged ones.
        segment_ids: int32, 1 for tokens, 0 for padding.
        token_types: int32, 1 in part B, else 0.
        is_random: int32, 1 if the parts are swapped.
        truncated: int32, 1 if the sentences were longer than the row's target.

    Args:
        sequence_length: S.
        next_sentence: two parts, swapped in half of the rows.
    """

    def __init__(
        self,
        tokens: IndexedTokens,
        samples: SampleMap,
        *,
        tokenizer: MaskingTokenizer,
        sequence_length: int,
        next_sentence: bool,
    ):
        super().__init__(tokens, samples, tokenizer)
        self.sequence_length, self.next_sentence, self._tokenizer = sequence_length, next_sentence, tokenizer
        self._specials = tokenizer.specials

    def __getitem__(self, row: int) -> dict[str, np.ndarray]:
        first, last, target, generator = self.sample(row)
        parts, is_random = self._parts(first, last, generator)
        parts, truncated = truncate(parts, target, generator)
        # One block for all int32 leaves: allocating an array per leaf takes longer than filling it.
        block = np.zeros((4, self.sequence_length), np.int32)
        tokens, labels, segments, types = block
        middle = len(parts[0]) + 1
        length = middle + 1 + (len(parts[1]) + 1 if len(parts[1]) else 0)
        text = tokens[:length]
        text[0], text[middle], text[-1] = self._specials["cls"], self._specials["sep"], self._specials["sep"]
        text[1:middle] = parts[0]
        text[middle + 1 : -1] = parts[1]
        tokens[length:] = self._tokenizer.pad
        segments[:length] = 1
        types[middle + 1 : length] = 1
        positions, replaced = self._replacements(text, target, generator)
        labels[positions] = text[positions]
        text[positions] = replaced
        loss_mask = np.zeros(self.sequence_length, np.float32)
        loss_mask[positions] = 1
        for values in (block, loss_mask):
            values.setflags(write=False)
        tokens, labels, segments, types = block  # again, as views that cannot be written
        return {
            "tokens": tokens,
            "labels": labels,
            "loss_mask": loss_mask,
            "segment_ids": segments,
            "token_types": types,
            "is_random": np.array(is_random, np.int32),
            "truncated": np.array(truncated, np.int32),
        }

    def _parts(self, first: int, last: int, generator: np.random.RandomState) -> tuple[list[np.ndarray], bool]:
        """The sentences [first, last) as parts A and B, and whether they are swapped."""
        text = self.read(first, last)
        if not self.next_sentence:
            return [text, text[:0]], False
        border = first + (int(generator.randint(1, last - first)) if last - first > 2 else 1)
        place = self.token_offset(border) - self.token_offset(first)
        parts = [text[:place], text[place:]]
        is_random = generator.random_sample() < 0.5
        return parts[::-1] if is_random else parts, is_random

    def _replacements(
        self, text: np.ndarray, target: int, generator: np.random.RandomState
    ) -> tuple[np.ndarray, np.ndarray]:
        """Positions of the chosen tokens and their replacements: the mask token, a random token, or the same token."""
        draw, mask, size = generator.random_sample, self._specials["mask"], self._tokenizer.vocabulary_size
        positions, replaced = [], []
        for span in self.ngrams.spans(text, target, generator):
            positions += span
            for position in span:
                if draw() < MASKED:
                    replaced.append(mask)
                elif draw() >= 0.5:
                    replaced.append(int(generator.randint(0, size)))
                else:
                    replaced.append(int(text[position]))
        return np.array(positions, np.intp), np.array(replaced, np.int32)


def truncate(parts: list[np.ndarray], target: int, generator: np.random.RandomState) -> tuple[list[np.ndarray], bool]:
    """Both parts truncated to `target` tokens in total, and whether any token was removed.

    Tokens are removed one by one from the longer part (the second if equal), at a random end.
    """
    lengths = len(parts[0]), len(parts[1])
    excess = sum(lengths) - target
    if excess <= 0:
        return parts, False
    at_start = generator.random_sample(excess) < 0.5
    # From the longer part until both are equal; then from the second and the first in turn.
    single, longer = min(abs(lengths[0] - lengths[1]), excess), int(lengths[0] <= lengths[1])
    turns = at_start[single + 1 :: 2], at_start[single::2]
    starts, removed = [np.count_nonzero(turn) for turn in turns], [len(turn) for turn in turns]
    starts[longer] += np.count_nonzero(at_start[:single])
    removed[longer] += single
    cuts = zip(parts, lengths, starts, removed, strict=True)
    return [part[start : length - (count - start)] for part, length, start, count in cuts], True


def build_splits(
    config: MaskedSentencesConfig, *, tokenizer: MaskingTokenizer, schema: Schema, rows: Rows, seed: int
) -> Splits:
    """Rows of masked sentences for the splits that a run requests; see `BlendBuilder.build`.

    Raises:
        UserError: a tokenizer without one of the special tokens, rows of fewer than 5 tokens.
    """
    demand_tokens(tokenizer, ("cls", "sep", "mask"), "masked sentences", config.full_words)
    length = schema["tokens"].positions()
    two = config.next_sentence
    make = partial(MaskedSentences, tokenizer=tokenizer, sequence_length=length, next_sentence=two)
    builder = MaskedBuilder(config, target=length - SPECIAL, sentences=2 if two else 1, seed=seed, make=make)
    return builder.build(rows)
