"""Rows of two texts for an encoder and a decoder; for T5 a text with masked spans, and the tokens of the spans."""

from collections.abc import Sequence
from functools import partial
from itertools import chain
from typing import NamedTuple

import numpy as np

from megajax.batch import Schema
from megajax.config.errors import UserError
from megajax.data.masked.config import MaskedSpansConfig
from megajax.data.masked.samples import MaskedBuilder, MaskedSamples, MaskingTokenizer, SampleMap, demand_tokens
from megajax.data.rows.splits import Rows, Splits
from megajax.data.text.indexed_dataset import IndexedTokens

SPECIAL = 2
"""Unused positions of a row of the encoder, as in Megatron-LM."""


class TwoSidedSpecials(NamedTuple):
    """Special tokens of rows of two texts."""

    bos: int
    """The first input of the decoder."""
    eos: int
    """The last label of the decoder."""
    pad: int


def two_sided_specials(tokenizer: MaskingTokenizer) -> TwoSidedSpecials:
    """The special tokens of a tokenizer, which must have bos and eos."""
    return TwoSidedSpecials(tokenizer.specials["bos"], tokenizer.specials["eos"], tokenizer.pad)


def two_sided_row(
    encoder_ids: Sequence[int],
    decoder_ids: Sequence[int],
    lengths: tuple[int, int],
    special: TwoSidedSpecials,
    truncated: bool,
) -> dict[str, np.ndarray]:
    """The arrays of a row, read-only; texts are truncated to T and S.

        encoder_tokens: int32 [T], the encoder's text; padding is the pad token.
        encoder_segment_ids: int32 [T], 1 for tokens, 0 for padding.
        tokens: int32 [S], [BOS], then the decoder's text; padding is the pad token.
        labels: int32 [S], the token after each input, [EOS] after the last; padding is 0.
        loss_mask: float32 [S], 1 for tokens, 0 for padding.
        segment_ids: int32 [S], likewise.
        truncated: int32.

    lengths: (T, S).
    """
    encoder_ids, count = encoder_ids[: lengths[0]], min(len(decoder_ids) + 1, lengths[1])
    segments = _ones(count, lengths[1])
    arrays: dict[str, np.ndarray] = {
        "encoder_tokens": _padded(encoder_ids, lengths[0], special.pad),
        "encoder_segment_ids": _ones(len(encoder_ids), lengths[0]),
        "tokens": _padded([special.bos, *decoder_ids][:count], lengths[1], special.pad),
        "labels": _padded([*decoder_ids, special.eos][:count], lengths[1], 0),
        "loss_mask": segments.astype(np.float32),
        "segment_ids": segments,
        "truncated": np.array(truncated, np.int32),
    }
    for values in arrays.values():
        values.setflags(write=False)
    return arrays


def _ones(count: int, length: int) -> np.ndarray:
    """int32 [length]: `count` ones, then zeros."""
    array = np.zeros(length, np.int32)
    array[:count] = 1
    return array


def _padded(values: Sequence[int], length: int, padding: int) -> np.ndarray:
    """int32 [length]: the values, then padding."""
    array = np.full(length, padding, np.int32)
    array[: len(values)] = values
    return array


class MaskedSpans(MaskedSamples):
    """Row i of a split as a dict of arrays, a pure function of i.

    In the text, each masked span is replaced by a sentinel. The decoder writes each sentinel with the tokens of its
    span. The arrays are those of `two_sided_row`; `truncated`: the sentences were longer than the row's target.

    A row has no more spans than sentinels, and spans beyond S tokens are cut off; Megatron-LM fails on such rows.

    Args:
        encoder_length: T.
        sequence_length: S.
    """

    def __init__(
        self,
        tokens: IndexedTokens,
        samples: SampleMap,
        *,
        tokenizer: MaskingTokenizer,
        encoder_length: int,
        sequence_length: int,
    ):
        super().__init__(tokens, samples, tokenizer)
        self.encoder_length, self.sequence_length = encoder_length, sequence_length
        self._sentinels, self._special = list(tokenizer.sentinels), two_sided_specials(tokenizer)

    def __getitem__(self, row: int) -> dict[str, np.ndarray]:
        first, last, target, generator = self.sample(row)
        text = self.read(first, last)
        truncated, text = len(text) > target, text[:target]
        spans = sorted(self.ngrams.spans(text, target, generator))
        encoder_ids, decoder_ids = with_sentinels(text.tolist(), spans, self._sentinels)
        return two_sided_row(
            encoder_ids, decoder_ids, (self.encoder_length, self.sequence_length), self._special, truncated
        )


def with_sentinels(text: list[int], spans: list[list[int]], sentinels: list[int]) -> tuple[list[int], list[int]]:
    """(the text with a sentinel in place of each span, each sentinel followed by the tokens of its span).

    spans: positions of each span, in the order of the text; spans beyond the sentinels stay in the text.
    """
    encoder_ids, decoder_ids, rest = [], [], 0
    for span, sentinel in zip(spans, sentinels, strict=False):
        encoder_ids += [*text[rest : span[0]], sentinel]
        decoder_ids += chain([sentinel], (text[position] for position in span))
        rest = span[-1] + 1
    return encoder_ids + text[rest:], decoder_ids


def build_splits(
    config: MaskedSpansConfig, *, tokenizer: MaskingTokenizer, schema: Schema, rows: Rows, seed: int
) -> Splits:
    """Rows of text with masked spans for the splits that a run requests; see `BlendBuilder.build`.

    Raises:
        UserError: a tokenizer without one of the special tokens or without sentinels, rows of fewer than 4 tokens.
    """
    demand_tokens(tokenizer, ("bos", "eos"), "masked spans", config.full_words)
    if not len(tokenizer.sentinels):
        raise UserError(
            f"masked spans need sentinels, one for each span of a row; the tokenizer {tokenizer.identity} has none. "
            "Set tokenizer.extra_ids=100."
        )
    lengths = {"encoder_length": schema["encoder_tokens"].positions(), "sequence_length": schema["tokens"].positions()}
    make = partial(MaskedSpans, tokenizer=tokenizer, **lengths)
    target = lengths["encoder_length"] - SPECIAL
    return MaskedBuilder(config, target=target, sentences=1, seed=seed, make=make).build(rows)
