"""The interface of tokenizers, byte-pair encodings, and helpers to read their files."""

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import count, takewhile
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import ArrayLike

from megajax.config import read_limits
from megajax.config.errors import UserError
from megajax.config.paths_and_store_urls import store_url
from megajax.storage.local_copies import local_folder
from megajax.tokenizers.folder import LIMITS


class Tokenizer(Protocol):
    """Text to ids and back.

    Attributes:
        vocabulary_size: one more than the largest possible id of `encode` and `eod`.
        eod: id that ends a document.
        pad: id for padding; None if the vocabulary has none.
        specials: role -> id, for the roles in the vocabulary: bos, eos, cls, sep, mask, image, or your own.
        sentinels: ids of <extra_id_0>, <extra_id_1>, …, which replace masked spans in T5's texts.
        prefix: ids that by default precede a text that a model reads, such as the beginning of a sequence; `encode`
            does not add them.
        ends: ids that end an answer besides `eod`, as the model's files say.
        suffix: ids that by default follow a text that is embedded, such as the end of a sequence.
        table: bytes of each id, None for an id without a token, if a text is the concatenated bytes of its tokens, as
            UTF-8; empty for other decoders.
        continues: bool [vocabulary], whether the token continues the word before it; None: words are unknown.
        identity: short text, equal for equal tokenizers regardless of file paths; for the keys of caches.
    """

    vocabulary_size: int
    eod: int
    pad: int | None
    specials: Mapping[str, int]
    identity: str
    sentinels: Sequence[int] = ()
    prefix: Sequence[int] = ()
    suffix: Sequence[int] = ()
    ends: Collection[int] = ()
    table: Sequence[bytes | None] = ()
    continues: np.ndarray | None = None

    def token_id(self, token: str) -> int | None:
        """Id of a token by its name in the vocabulary; None if the vocabulary lacks it."""
        return None

    def controls(self) -> Mapping[str, int]:
        """Special tokens that `encode` recognizes by their names in the text -> their ids."""
        return {}

    def plain(self) -> "Tokenizer":
        """A tokenizer that encodes names of special tokens in the text as ordinary text, for untrusted text."""
        return self

    def after_special(self) -> "Tokenizer":
        """A tokenizer of texts that follow a special token: without what some put before the beginning of a text."""
        return self

    def encode(self, text: str) -> np.ndarray:
        """Ids of the text, int32 [tokens], without added ids such as `eod`. Lone surrogates become three bytes."""
        return self.encode_bytes(text.encode("utf-8", errors="surrogatepass"))

    def encode_bytes(self, data: bytes) -> np.ndarray:
        """Ids of UTF-8 bytes, int32 [tokens]; each tokenizer documents its treatment of invalid UTF-8."""
        ...

    def encode_spans(self, text: str) -> tuple[np.ndarray, np.ndarray]:
        """Ids of the text as by `encode`, int32 [tokens], and the span of characters of each, int64 [tokens, 2]: first,
        end.

        By default from the bytes of `table`; without one, words separated by white space are tokenized one by one, and
        a token has the span of its word.
        """
        if self.table:
            numbers = self.encode(text)
            sizes = np.array([len(self.table[number] or b"") for number in numbers.tolist()], np.int64)
            byte_spans = np.stack([np.cumsum(sizes) - sizes, np.cumsum(sizes)], axis=1)
            return numbers, character_spans(text, byte_spans)
        word_spans = [match.span() for match in re.finditer(r"\s*\S+", text)]
        ids = [self.encode(text[first:end]) for first, end in word_spans]
        spans = [(first + len(text[first:end]) - len(text[first:end].lstrip()), end) for first, end in word_spans]
        return join_spans([(0, part, np.tile(span, (len(part), 1))) for part, span in zip(ids, spans, strict=True)])

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """Text of the ids, with U+FFFD for invalid UTF-8. Raises UserError for an id outside the vocabulary."""
        ...

    def split_point(self, data: bytes) -> int:
        """Last position p at which it is safe to cut; 0 if none is known.

        Safe: the ids of `data` are those of `data[:p]` followed by those of `data[p:]`, whatever follows `data`. This
        allows documents of any size to be tokenized piece by piece.
        """
        return 0


def token_id(tokenizer: Tokenizer, token: str, setting: str) -> int:
    """The id of the token that a setting names. Raises UserError if the vocabulary does not have it."""
    number = tokenizer.token_id(token)
    if number is None:
        raise UserError(
            f"{setting}={token!r}: the tokenizer {tokenizer.identity} has no such token. Name one of its vocabulary, "
            "or use another tokenizer."
        )
    return number


END_NAMES = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<｜end▁of▁sentence｜>", "[EOS]", "<EOD>", "<eod>")
"""Usual names of the end-of-document token, in order of preference."""
USUAL_NAMES: Mapping[str, tuple[str, ...]] = {
    "bos": ("<s>", "<bos>", "[BOS]", "<|begin_of_text|>", "<｜begin▁of▁sentence｜>", "<BOS>"),
    "eos": END_NAMES,
    "cls": ("[CLS]", "<cls>", "<CLS>"),
    "sep": ("[SEP]", "<sep>", "<SEP>"),
    "mask": ("[MASK]", "<mask>", "<MASK>"),
    "pad": ("<pad>", "[PAD]", "<|pad|>", "<|finetune_right_pad_id|>", "<|endofpad|>", "<PAD>"),
    "image": ("<image>", "<|image|>"),
}
"""Role -> usual names of its special token, in order of preference."""


def usual_specials(vocabulary: Mapping[str, int]) -> dict[str, int]:
    """Role -> id for the roles of USUAL_NAMES in a vocabulary, including `pad`."""
    roles = USUAL_NAMES.items()
    ids_by_role = {role: [vocabulary[name] for name in names if name in vocabulary] for role, names in roles}
    return {role: ids[0] for role, ids in ids_by_role.items() if ids}


def sentinel_name(number: int) -> str:
    """Name of a sentinel."""
    return f"<extra_id_{number}>"


def sentinels_of(vocabulary: Mapping[str, int]) -> tuple[int, ...]:
    """Ids of <extra_id_0>, <extra_id_1>, … as far as a vocabulary has them."""
    return tuple(vocabulary[name] for name in takewhile(vocabulary.__contains__, map(sentinel_name, count())))


def before_last_blank(data: bytes, blanks: bytes = b" \n") -> int:
    """Last position in `data` between a visible ASCII character and one of `blanks`; 0 if there is none."""
    last = re.compile(rb"(?s:.*)[!-~](?=[" + blanks + rb"])")
    for size in (1 << 10, len(data)):
        start = max(0, len(data) - size)
        blank = last.match(data, start)
        if blank:
            return blank.end()
    return 0


LEAD = "\ufdd6"
"""A token in place of the special token before a text; Unicode reserves the character for internal use."""


def local_path(path: str) -> Path:
    """The path of a tokenizer's file or folder; of one in a store, that of a copy, with the files beside it.

    Raises UserError for no such object, and for a copy that can't be written.
    """
    if (url := store_url(path)) is None:
        return Path(path)
    folder, _, name = url.rpartition("/")
    return local_folder(folder) / name if "." in name else local_folder(url)


def read_file(path: str, kind: str) -> bytes:
    """Content of a tokenizer's file. Raises UserError that names the file and its expected `kind`."""
    try:
        return read_limits.read_file(local_path(path), LIMITS)
    except OSError as error:
        text = f"{path}: cannot read this {kind}: {error.strerror or error}."
        raise UserError(f"{text} Set the path in the tokenizer's settings.") from error


def end_of_document(vocabulary: Mapping[str, int], token_name: str | None, path: str) -> int:
    """Id of a token, or with None of the first of END_NAMES. Raises UserError if the vocabulary lacks it."""
    names = END_NAMES if token_name is None else (token_name,)
    token = next((vocabulary[name] for name in names if name in vocabulary), None)
    if token is None:
        missing = "none of the usual tokens" if token_name is None else "no token"
        raise UserError(
            f"{path}: {missing} {', '.join(names)} to end a document. Set `eod` to a token of the vocabulary."
        )
    return token


def check_ids(ids: Sequence[int] | np.ndarray, vocabulary_size: int) -> list[int]:
    """The ids as a list. Raises UserError for one outside the vocabulary."""
    numbers = np.asarray(ids, dtype=np.int64)
    outside = numbers[(numbers < 0) | (numbers >= vocabulary_size)]
    if outside.size:
        raise UserError(
            f"Token id {outside[0]} is outside the vocabulary: ids go from 0 to {vocabulary_size - 1}. "
            "Were these tokens made by another tokenizer?"
        )
    return numbers.tolist()


def character_spans(text: str, byte_spans: np.ndarray) -> np.ndarray:
    """Spans of characters from those of bytes of the text in UTF-8; see `spans_of_characters`."""
    if text.isascii():
        return byte_spans
    codes = np.frombuffer(text.encode("utf-32-le", errors="surrogatepass"), np.uint32)
    return spans_of_characters(np.searchsorted([1 << 7, 1 << 11, 1 << 16], codes, side="right") + 1, byte_spans)


def spans_of_characters(lengths: ArrayLike, spans: np.ndarray) -> np.ndarray:
    """Spans of characters, int64 [tokens, 2]: first, end, from spans of units such as bytes.

    A character that is divided among several tokens belongs to each of them.

    Args:
        lengths: units of each character, [characters].
        spans: int64 [tokens, 2]: first, end.
    """
    starts = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])
    first = np.searchsorted(starts, spans[:, 0], side="right") - 1
    return np.stack([first, np.searchsorted(starts, spans[:, 1], side="left")], axis=1)


def join_spans(parts: Iterable[tuple[int, np.ndarray, np.ndarray]]) -> tuple[np.ndarray, np.ndarray]:
    """(Ids, spans) of a text from those of its parts: where each begins, its ids, and its spans from there."""
    starts, ids, spans = zip((0, np.zeros(0, np.int32), np.zeros((0, 2), np.int64)), *parts, strict=True)
    return np.concatenate(ids), np.concatenate([part + start for start, part in zip(starts, spans, strict=True)])


def join_tokens(ids: Sequence[int] | np.ndarray, table: Sequence[bytes | None]) -> bytes:
    """Concatenated bytes of ids. table: bytes of each id. Raises UserError for an id that the table lacks."""
    pieces = [(number, table[number]) for number in check_ids(ids, len(table))]
    if unknown := [number for number, piece in pieces if piece is None]:
        raise UserError(f"Token id {unknown[0]} is not in the vocabulary, which has gaps.")
    return b"".join(piece for _, piece in pieces if piece is not None)


def with_prefix(tokenizer: Tokenizer, text: str) -> np.ndarray:
    """Ids of a text with the tokenizer's prefix, int32 [N], which is not added twice."""
    ids, prefix = tokenizer.encode(text), np.array(tokenizer.prefix, np.int32)
    return ids if np.array_equal(ids[: len(prefix)], prefix) else np.concatenate([prefix, ids])


def end_tokens_of(tokenizer: Tokenizer) -> frozenset[int]:
    """The tokens that end texts and answers: the end of a document, and those that the model's files name."""
    return frozenset({tokenizer.eod, tokenizer.specials.get("eos", tokenizer.eod), *tokenizer.ends})


def start_token(tokenizer: Tokenizer) -> int:
    """The token before a text without context, as in lm-eval: the beginning of a sequence, else `eod`."""
    return int(next(iter(tokenizer.prefix), tokenizer.specials.get("bos", tokenizer.eod)))


NOT_UTF8 = re.compile("([\udc80-\udcff]+)")
"""Invalid UTF-8, as decoded by `surrogateescape`."""


class BytePairTokenizer(Tokenizer):
    """A vocabulary with a token for each byte, so any bytes survive a round trip.

    Invalid UTF-8 ends the text before it and becomes a token per byte.
    """

    byte_ids: np.ndarray
    """int32 [256]: id of each byte."""

    def encode_text(self, text: str) -> np.ndarray:
        """Ids, int32 [tokens], of text without surrogates."""
        raise NotImplementedError

    def encode_bytes(self, data: bytes) -> np.ndarray:
        """Ids, int32 [tokens], of any bytes."""
        try:
            return self.encode_text(data.decode("utf-8"))
        except UnicodeDecodeError:
            pieces = NOT_UTF8.split(data.decode("utf-8", errors="surrogateescape"))
        ids = [
            self.byte_ids[np.frombuffer(piece.encode("utf-8", errors="surrogateescape"), np.uint8)]
            if place % 2
            else self.encode_text(piece)
            for place, piece in enumerate(pieces)
        ]
        return np.concatenate(ids)

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        return join_tokens(ids, self.table).decode("utf-8", errors="replace")
