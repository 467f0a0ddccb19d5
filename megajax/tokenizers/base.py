"""What every tokenizer offers, and the reading of the files behind them."""

import re
from collections.abc import Sequence
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
        identity: short text that is equal for equal tokenizers wherever their files lie: for the keys of caches.
    """

    vocabulary_size: int
    eod: int
    pad: int | None
    identity: str

    def encode(self, text: str) -> np.ndarray:
        """Ids of the text, int32 [tokens], without added ones such as `eod`. Half surrogates become three bytes."""
        return self.encode_bytes(text.encode("utf-8", errors="surrogatepass"))

    def encode_bytes(self, data: bytes) -> np.ndarray:
        """Ids of UTF-8 bytes, int32 [tokens]; what becomes of bytes that are not UTF-8 is said by each tokenizer."""
        ...

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """Text of the ids, U+FFFD for bytes that are not UTF-8. Raises UserError for an id outside the vocabulary."""
        ...

    def split_point(self, data: bytes) -> int:
        """Last place p known to be safe to cut at, 0 where none is known.

        Safe: the ids of `data` are those of `data[:p]` followed by those of `data[p:]`, whatever comes after `data`.
        Lets a document of any size be tokenised piece by piece.
        """
        return 0


_LAST_BLANK = re.compile(rb"(?s:.*)[!-~](?=[ \n])")


def before_last_blank(data: bytes) -> int:
    """Last place in `data` between a visible ASCII character and a space or newline; 0 without one."""
    for size in (1 << 10, len(data)):
        start = max(0, len(data) - size)
        blank = _LAST_BLANK.match(data, start)
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


def join_tokens(ids: Sequence[int] | np.ndarray, table: Sequence[bytes | None]) -> bytes:
    """Bytes of ids by a table [vocabulary] of the bytes of each. Raises UserError for an id the table lacks."""
    pieces = [(number, table[number]) for number in check_ids(ids, len(table))]
    if unknown := [number for number, piece in pieces if piece is None]:
        raise UserError(f"Token id {unknown[0]} is not in the vocabulary, which has gaps.")
    return b"".join(piece for _, piece in pieces if piece is not None)
