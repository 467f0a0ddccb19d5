"""Rows of two texts: the input of an encoder and the output of a decoder."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from megajax.data.masked.samples import MaskingTokenizer


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
