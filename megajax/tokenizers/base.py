"""What every tokenizer offers, and the reading of the files behind them."""

import re
from collections.abc import Mapping, Sequence
from itertools import count, takewhile
from pathlib import Path
from typing import Protocol

import numpy as np

from megajax.config.errors import UserError


class Tokenizer(Protocol):
    """Text to ids and back.

    Attributes:
        vocabulary_size: one more than the largest id that `encode` or `eod` can give.
        eod: id that ends a document.
        pad: id for padding, None where the vocabulary has none.
        specials: ids by role, for the roles that the vocabulary has: bos, eos, cls, sep, mask, image, or one of your
            own.
        sentinels: ids of <extra_id_0>, <extra_id_1>, …, which stand for blanks in T5's texts.
        prefix: ids that the tokenizer by default puts before a text that a model reads, such as the beginning of a
            sequence; `encode` leaves them out.
        table: bytes of each id, None for an id without a token, where a text is its tokens' bytes one after another, as
            UTF-8; empty where text is made of ids in another way.
        continues: bool [vocabulary], the token continues the word before it; None: words are not known.
        identity: short text that is equal for equal tokenizers wherever their files lie: for the keys of caches.
    """

    vocabulary_size: int
    eod: int
    pad: int | None
    specials: Mapping[str, int]
    identity: str
    sentinels: Sequence[int] = ()
    prefix: Sequence[int] = ()
    table: Sequence[bytes | None] = ()
    continues: np.ndarray | None = None

    def token_id(self, token: str) -> int | None:
        """Id of a token by its name in the vocabulary; None for one that is not there."""
        return None

    def controls(self) -> Mapping[str, int]:
        """Special tokens that `encode` makes of their names in the text -> their ids."""
        return {}

    def plain(self) -> "Tokenizer":
        """This tokenizer with names of special tokens in the text encoded as ordinary text: for text of strangers."""
        return self

    def encode(self, text: str) -> np.ndarray:
        """Ids of the text, int32 [tokens], without added ones such as `eod`. Half surrogates become three bytes."""
        return self.encode_bytes(text.encode("utf-8", errors="surrogatepass"))

    def encode_bytes(self, data: bytes) -> np.ndarray:
        """Ids of UTF-8 bytes, int32 [tokens]; what becomes of bytes that are not UTF-8 is said by each tokenizer."""
        ...

    def encode_spans(self, text: str) -> tuple[np.ndarray, np.ndarray]:
        """Ids of the text, int32 [tokens], and what characters of it each stands for, int64 [tokens, 2]: first, end.

        By default the words between white space are tokenised one by one, and a token has the span of its word.
        """
        words = [match.span() for match in re.finditer(r"\s*\S+", text)]
        ids = [self.encode(text[first:end]) for first, end in words]
        spans = [(first + len(text[first:end]) - len(text[first:end].lstrip()), end) for first, end in words]
        counts = [len(each) for each in ids]
        joined = np.concatenate([np.zeros(0, np.int32), *ids])
        return joined, np.repeat(np.array(spans, np.int64).reshape(-1, 2), counts, axis=0)

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """Text of the ids, U+FFFD for bytes that are not UTF-8. Raises UserError for an id outside the vocabulary."""
        ...

    def split_point(self, data: bytes) -> int:
        """Last place p known to be safe to cut at, 0 where none is known.

        Safe: the ids of `data` are those of `data[:p]` followed by those of `data[p:]`, whatever comes after `data`.
        Lets a document of any size be tokenised piece by piece.
        """
        return 0


END_NAMES = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<｜end▁of▁sentence｜>", "[EOS]", "<EOD>", "<eod>")
"""Names under which vocabularies hold the end of a document, in the order in which they are looked for."""
USUAL_NAMES: Mapping[str, tuple[str, ...]] = {
    "bos": ("<s>", "<bos>", "[BOS]", "<|begin_of_text|>", "<｜begin▁of▁sentence｜>", "<BOS>"),
    "eos": END_NAMES,
    "cls": ("[CLS]", "<cls>", "<CLS>"),
    "sep": ("[SEP]", "<sep>", "<SEP>"),
    "mask": ("[MASK]", "<mask>", "<MASK>"),
    "pad": ("<pad>", "[PAD]", "<|pad|>", "<|finetune_right_pad_id|>", "<|endofpad|>", "<PAD>"),
    "image": ("<image>", "<|image|>"),
}
"""Names of special tokens by role, likewise."""


def usual_specials(vocabulary: Mapping[str, int]) -> dict[str, int]:
    """Ids of the roles of USUAL_NAMES that a vocabulary has, `pad` among them."""
    roles = USUAL_NAMES.items()
    ids_by_role = {role: [vocabulary[name] for name in names if name in vocabulary] for role, names in roles}
    return {role: ids[0] for role, ids in ids_by_role.items() if ids}


def sentinel_name(number: int) -> str:
    """Name of a token that stands for a blank."""
    return f"<extra_id_{number}>"


def sentinels_of(vocabulary: Mapping[str, int]) -> tuple[int, ...]:
    """Ids of <extra_id_0>, <extra_id_1>, … as far as a vocabulary has them."""
    return tuple(vocabulary[name] for name in takewhile(vocabulary.__contains__, map(sentinel_name, count())))


def before_last_blank(data: bytes, ends: bytes = b" \n") -> int:
    """Last place in `data` between a visible ASCII character and a blank, one of `ends`; 0 without one."""
    last = re.compile(rb"(?s:.*)[!-~](?=[" + ends + rb"])")
    for size in (1 << 10, len(data)):
        start = max(0, len(data) - size)
        blank = last.match(data, start)
        if blank:
            return blank.end()
    return 0


def read_file(path: str, what: str) -> bytes:
    """Content of a tokenizer's file. Raises UserError that names the file and `what` it should be."""
    try:
        return Path(path).read_bytes()
    except OSError as error:
        text = f"{path}: cannot read this {what}: {error.strerror or error}."
        raise UserError(f"{text} Set the path in the tokenizer's settings.") from error


def end_of_document(vocabulary: Mapping[str, int], named: str | None, path: str) -> int:
    """Id of the token `named`, or of the first usual one (None). Raises UserError for a vocabulary without it."""
    names = END_NAMES if named is None else (named,)
    token = next((vocabulary[name] for name in names if name in vocabulary), None)
    if token is None:
        wanted = "none of the usual tokens" if named is None else "no token"
        raise UserError(f"{path}: {wanted} {', '.join(names)} to end a document. Name one of this vocabulary as `eod`.")
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


def spans_of_bytes(text: str, sizes: Sequence[int]) -> np.ndarray:
    """Tokens that are so many bytes of the text (UTF-8) each -> their characters, int64 [tokens, 2]: first, end.

    A character of several tokens belongs to each of them.
    """
    lengths = [len(each.encode("utf-8", errors="surrogatepass")) for each in text]
    starts = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])
    ends = np.cumsum(np.asarray(sizes, np.int64), dtype=np.int64)
    first = np.searchsorted(starts, ends - np.asarray(sizes, np.int64), side="right") - 1
    return np.stack([first, np.searchsorted(starts, ends, side="left")], axis=1).reshape(-1, 2)


def join_tokens(ids: Sequence[int] | np.ndarray, table: Sequence[bytes | None]) -> bytes:
    """Bytes of ids by a table [vocabulary] of the bytes of each. Raises UserError for an id the table lacks."""
    pieces = [(number, table[number]) for number in check_ids(ids, len(table))]
    if unknown := [number for number, piece in pieces if piece is None]:
        raise UserError(f"Token id {unknown[0]} is not in the vocabulary, which has gaps.")
    return b"".join(piece for _, piece in pieces if piece is not None)


def with_prefix(tokenizer: Tokenizer, text: str) -> np.ndarray:
    """Ids of a text after the tokenizer's prefix, int32 [N]; the prefix once where the text begins with it."""
    ids, prefix = tokenizer.encode(text), np.array(tokenizer.prefix, np.int32)
    return ids if np.array_equal(ids[: len(prefix)], prefix) else np.concatenate([prefix, ids])


def start_token(tokenizer: Tokenizer) -> int:
    """What a text without a context is scored after, as in lm-eval: the beginning of a sequence, else `eod`."""
    return int(next(iter(tokenizer.prefix), tokenizer.specials.get("bos", tokenizer.eod)))
