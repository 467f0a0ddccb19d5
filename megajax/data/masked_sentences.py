"""Rows for BERT: runs of sentences in two parts, with masked words."""

import zlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Protocol

import numpy as np

from megajax.batch import Schema
from megajax.config.errors import UserError
from megajax.data.blend import BlendBuilder
from megajax.data.cache import load_or_build
from megajax.data.config import MaskedSentencesConfig
from megajax.data.gpt import ORDER_SAMPLE
from megajax.data.indexed import IndexedTokens
from megajax.data.masked_index import MaskedRequest, build_masked_index
from megajax.data.masking import Masking, NgramMasking, SampleGenerators
from megajax.data.splits import Rows, Splits

MASKED = 0.8
"""Share of the chosen tokens that become the mask token; half of the others become a random one."""


class MaskingTokenizer(Protocol):
    """The attributes of a tokenizer that masked data needs."""

    vocabulary_size: int
    cls: int
    """Begins a row."""
    sep: int
    """Ends each part of a row."""
    mask: int
    pad: int
    continues: np.ndarray
    """bool [vocabulary]: the token continues the word before it, as WordPiece's ## pieces do."""
    identity: str


def demand_tokens(tokenizer: object, names: Sequence[str], what: str) -> None:
    """Raises UserError for a tokenizer without one of these tokens, or without knowledge of words."""
    missing = [name for name in names if getattr(tokenizer, name, None) is None]
    if missing or getattr(tokenizer, "continues", None) is None:
        lacks = " and ".join(f"no {name} token" for name in missing) or "does not tell words from pieces of words"
        raise UserError(
            f"{what} need the tokens {', '.join(names)}; the tokenizer {getattr(tokenizer, 'identity', '')} has "
            f"{lacks}. Choose the WordPiece tokenizer, with a vocabulary that has them."
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class SentenceOptions:
    """Length, parts and masks of rows."""

    sequence_length: int
    """S, tokens of a row, the special ones included."""
    next_sentence: bool
    """Two parts, exchanged in half of the rows."""
    masking: Masking
    seed: int
    """Row i has a generator of its own with seed + i."""


class MaskedSentences:
    """Row i of a split as a dict of arrays, a pure function of i: [CLS] part A [SEP] part B [SEP], then padding.

    The arrays have length S but for the last two:

        tokens: int32, masked; padding is the pad token.
        labels: int32, the original token where `loss_mask` is 1, else 0.
        loss_mask: float32, 1 for the tokens chosen by the masking, whatever replaced them.
        segment_ids: int32, 1 for tokens, 0 for padding.
        token_types: int32, 1 in part B, else 0.
        is_random: int32, 1 if the parts are exchanged.
        truncated: int32, 1 if the sentences were longer than the row's target.

    Args:
        tokens: a sequence for each sentence.
        index: [n, 3], see `build_masked_index`.
        options: length, parts, masks.
        tokenizer: special tokens and words.
        passes: number of epochs over the split's documents.

    Raises:
        UserError: tokens stored as floating-point numbers; on reading, a token outside the vocabulary.
    """

    def __init__(
        self,
        tokens: IndexedTokens,
        index: np.ndarray,
        options: SentenceOptions,
        *,
        tokenizer: MaskingTokenizer,
        passes: int = 1,
    ):
        self.tokens, self.index, self.options, self.passes = tokens, index, options, passes
        self.text = SentenceText(tokens, tokenizer.vocabulary_size)
        self.sequence_length = options.sequence_length
        self._tokenizer, self._generators = tokenizer, SampleGenerators(options.seed)
        special = (tokenizer.cls, tokenizer.sep)
        self._ngrams = NgramMasking(options.masking, np.asarray(tokenizer.continues, bool), special)

    def order(self) -> str:
        """Identifier of the order of the rows."""
        return sample_order(self.index)

    def __len__(self) -> int:
        return len(self.index)

    def __getitem__(self, row: int) -> dict[str, np.ndarray]:
        if not 0 <= row < len(self):
            raise IndexError(f"row {row} of a dataset of {len(self)} rows")
        first, last, target = self.index[row].tolist()
        generator = self._generators.of(row)
        parts, is_random = self._parts(first, last, generator)
        parts, truncated = truncate(parts, target, generator)
        cls, sep = [self._tokenizer.cls], [self._tokenizer.sep]
        pieces = [cls, parts[0], sep, parts[1], sep] if len(parts[1]) else [cls, parts[0], sep]
        text = np.concatenate(pieces).astype(np.int32)
        length, part_b = len(text), len(parts[0]) + 2
        names = ("labels", "segment_ids", "token_types")
        arrays: dict[str, np.ndarray] = {name: np.zeros(self.sequence_length, np.int32) for name in names}
        arrays["tokens"] = np.full(self.sequence_length, self._tokenizer.pad, np.int32)
        arrays["loss_mask"] = np.zeros(self.sequence_length, np.float32)
        chosen, replaced = self._replacements(text, target, generator)
        arrays["labels"][chosen] = text[chosen]
        arrays["loss_mask"][chosen] = 1
        text[chosen] = replaced
        arrays["tokens"][:length] = text
        arrays["segment_ids"][:length] = 1
        arrays["token_types"][part_b:length] = 1
        arrays |= {"is_random": np.array(is_random, np.int32), "truncated": np.array(truncated, np.int32)}
        for values in arrays.values():
            values.setflags(write=False)
        return arrays

    def _parts(self, first: int, last: int, generator: np.random.RandomState) -> tuple[list[np.ndarray], bool]:
        """The sentences [first, last) as parts A and B, and whether B comes before A in the text."""
        if not self.options.next_sentence:
            return [self.text.read(first, last), np.zeros(0, np.int32)], False
        cut = first + (int(generator.randint(1, last - first)) if last - first > 2 else 1)
        parts = [self.text.read(first, cut), self.text.read(cut, last)]
        is_random = generator.random_sample() < 0.5
        return parts[::-1] if is_random else parts, is_random

    def _replacements(
        self, text: np.ndarray, target: int, generator: np.random.RandomState
    ) -> tuple[list[int], list[int]]:
        """Positions of the chosen tokens and what they become: the mask token, a random one, or themselves."""
        draw, mask, size = generator.random_sample, self._tokenizer.mask, self._tokenizer.vocabulary_size
        chosen, replaced = [], []
        for span in self._ngrams.spans(text, target, generator):
            chosen += span
            for position in span:
                if draw() < MASKED:
                    replaced.append(mask)
                elif draw() >= 0.5:
                    replaced.append(int(generator.randint(0, size)))
                else:
                    replaced.append(int(text[position]))
        return chosen, replaced


def truncate(parts: list[np.ndarray], target: int, generator: np.random.RandomState) -> tuple[list[np.ndarray], bool]:
    """Both parts with `target` tokens in total, and whether any had to go.

    One token at a time goes from the longer part, of equal ones from the second, at its start or its end by chance.
    """
    lengths = len(parts[0]), len(parts[1])
    excess = sum(lengths) - target
    if excess <= 0:
        return parts, False
    at_start = generator.random_sample(excess) < 0.5
    difference = abs(lengths[0] - lengths[1])
    # From the longer part until both are equal; from then on the second and the first take turns.
    of_first = np.arange(excess) - difference & 1 == 1
    of_first[:difference] = lengths[0] > lengths[1]
    cut = []
    for part, of_part in zip(parts, (of_first, ~of_first), strict=True):
        start = int(np.count_nonzero(at_start & of_part))
        cut.append(part[start : len(part) - (int(np.count_nonzero(of_part)) - start)])
    return cut, True


class SentenceText:
    """Tokens of consecutive sentences of a token file.

    Raises:
        UserError: tokens stored as floating-point numbers; on reading, a token outside the vocabulary.
    """

    def __init__(self, tokens: IndexedTokens, vocabulary_size: int):
        if tokens.dtype.kind not in "iu":
            raise UserError(f"{tokens.prefix}: stored as {tokens.dtype.name}, but tokens must be integers.")
        self._tokens, self._vocabulary_size = tokens, vocabulary_size

    def read(self, first: int, last: int) -> np.ndarray:
        """Tokens of sentences [first, last), which lie back to back."""
        file, size = self._tokens, self._tokens.dtype.itemsize
        stop = int(file.offsets[last - 1]) // size + int(file.lengths[last - 1])
        text = file.tokens[int(file.offsets[first]) // size : stop]
        if len(text) and (text.max() >= self._vocabulary_size or text.min() < 0):
            wrong = int(text[np.argmax((text >= self._vocabulary_size) | (text < 0))])
            raise UserError(
                f"{file.prefix}: token {wrong} in document {file.document_of(first)} (sentences {first} to {last - 1}) "
                f"lies outside the vocabulary of {self._vocabulary_size}. The file was written with another tokenizer: "
                "use that one, or preprocess again."
            )
        return text


def sample_order(index: np.ndarray) -> str:
    """Identifier of the order of samples."""
    return f"{zlib.crc32(np.ascontiguousarray(index[:ORDER_SAMPLE]).tobytes()):08x}"


class SentencesBuilder(BlendBuilder[MaskedSentences]):
    """Rows of masked sentences; splits are shares of the documents."""

    def __init__(self, config: MaskedSentencesConfig, *, tokenizer: MaskingTokenizer, sequence_length: int, seed: int):
        super().__init__(config, seed=seed)
        self.config, self.tokenizer = config, tokenizer
        masking = Masking(
            probability=config.mask_probability,
            largest=config.largest_ngram,
            full_words=config.full_words,
            geometric=config.geometric,
            longer=config.longer_ngrams,
        )
        self.options = SentenceOptions(
            sequence_length=sequence_length, next_sentence=config.next_sentence, masking=masking, seed=self.seed
        )

    def units(self, tokens: IndexedTokens) -> int:
        return tokens.documents

    def dataset(
        self, tokens: IndexedTokens, identity: str, split: str, bounds: tuple[int, int], rows: int | None
    ) -> MaskedSentences:
        request = MaskedRequest(
            first=bounds[0],
            last=bounds[1],
            rows=rows,
            target=self.options.sequence_length - 3,  # [CLS] and two [SEP]
            sentences=2 if self.config.next_sentence else 1,
            short_probability=self.config.short_probability,
            seed=self.seed,
        )
        index, passes = cached_index(self, tokens, identity, split, request)
        return MaskedSentences(tokens, index, self.options, tokenizer=self.tokenizer, passes=passes)


def cached_index(
    builder: BlendBuilder, tokens: IndexedTokens, identity: str, split: str, request: MaskedRequest
) -> tuple[np.ndarray, int]:
    """The sample map and the number of passes over the documents, from the cache if it has them."""
    name = f"{tokens.prefix}, split {split}"

    def build() -> dict[str, np.ndarray]:
        samples, passes = build_masked_index(tokens.lengths, tokens.document_table, request, name)
        return {"samples": samples, "passes": np.array([passes])}

    description = {"kind": "masked", "data": identity, **asdict(request)}
    arrays = load_or_build(builder.folder, description, build)
    return arrays["samples"], int(arrays["passes"][0])


def build_splits(
    config: MaskedSentencesConfig, *, tokenizer: MaskingTokenizer, schema: Schema, rows: Rows, seed: int
) -> Splits:
    """Rows of masked sentences for the splits that a run requests; see `BlendBuilder.configured`.

    Raises:
        UserError: a tokenizer without one of the special tokens.
    """
    demand_tokens(tokenizer, ("cls", "sep", "mask", "pad"), "masked sentences")
    length = schema["tokens"].positions()
    if length < 5:
        raise UserError(f"rows of {length} tokens cannot hold two words and three special tokens: set at least 5.")
    builder = SentencesBuilder(config, tokenizer=tokenizer, sequence_length=length, seed=seed)
    return builder.configured(config, rows)
