"""The content of a SentencePiece model: pieces, scores, and how text is normalized.

The file is a protocol buffer (https://github.com/google/sentencepiece, sentencepiece_model.proto). Only the few fields
that a conversion needs are read.
"""

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from megajax.config.errors import UserError

UNIGRAM, BPE = 1, 2
NORMAL, UNKNOWN, CONTROL, DEFINED, UNUSED, BYTE = range(1, 7)
"""Kinds of pieces."""


class Piece(NamedTuple):
    """An entry of the vocabulary."""

    text: str
    score: float
    kind: int

    @property
    def is_normal(self) -> bool:
        return self.kind == NORMAL

    @property
    def is_text(self) -> bool:
        """Whether a text may contain the piece as such."""
        return self.kind in (NORMAL, DEFINED)

    @property
    def is_unknown(self) -> bool:
        return self.kind == UNKNOWN

    @property
    def is_control(self) -> bool:
        return self.kind == CONTROL


@dataclass(frozen=True)
class SentencePieceModel:
    """A SentencePiece model."""

    pieces: list[Piece]
    kind: int
    byte_fallback: bool
    blank_ends_piece: bool
    """Blanks belong to the word before them."""
    charsmap: bytes
    """Compiled map of characters; empty: characters stay as they are."""
    add_prefix: bool
    """A text begins with an added blank."""
    remove_spaces: bool
    """Blanks around a text and repeated ones are removed."""
    escape: bool
    """Blanks are written as the sign of SentencePiece."""

    @property
    def is_unigram(self) -> bool:
        return self.kind == UNIGRAM

    def defined(self) -> list[str]:
        """Pieces that the user defined, which are recognized in every text."""
        return [piece.text for piece in self.pieces if piece.kind == DEFINED]

    def unsupported(self) -> str | None:
        """Why the model has no equivalent; None if it has one."""
        if self.kind not in (UNIGRAM, BPE):
            return f"model_type={self.kind} of SentencePiece"
        return "blanks that end a piece or are not escaped" if self.blank_ends_piece or not self.escape else None


def parsed(data: bytes) -> SentencePieceModel:
    """A model's content. Raises UserError for a file that is damaged."""
    try:
        fields = [*_fields(data)]
        trainer, normalizer = (
            dict(_fields(b"".join(value for number, value in fields if number == wanted))) for wanted in (2, 3)
        )
        pieces = [_piece(value) for number, value in fields if number == 1]
        return SentencePieceModel(
            pieces=pieces,
            kind=trainer.get(3, UNIGRAM),
            byte_fallback=bool(trainer.get(35, 0)),
            blank_ends_piece=bool(trainer.get(24, 0)),
            charsmap=normalizer.get(2, b""),
            add_prefix=bool(normalizer.get(3, 1)),
            remove_spaces=bool(normalizer.get(4, 1)),
            escape=bool(normalizer.get(5, 1)),
        )
    except (IndexError, KeyError, TypeError, ValueError, struct.error) as error:
        raise UserError(f"not a SentencePiece model: {error}") from error


def _piece(data: bytes) -> Piece:
    fields = dict(_fields(data))
    (score,) = struct.unpack("<f", fields.get(2, bytes(4)))
    return Piece(fields[1].decode(), score, fields.get(3, NORMAL))


def _fields(data: bytes) -> Iterator[tuple[int, Any]]:
    """Number and value of each field: whole numbers, or bytes."""
    place = 0
    while place < len(data):
        key, place = _number(data, place)
        kind = key & 7
        if kind == 0:
            value, place = _number(data, place)
            yield key >> 3, value
            continue
        if kind == 2:
            size, place = _number(data, place)
        elif kind in (1, 5):
            size = 8 if kind == 1 else 4
        else:
            raise ValueError(f"a field of kind {kind}")
        if place + size > len(data):
            raise ValueError("it is truncated")
        yield key >> 3, data[place : place + size]
        place += size


def _number(data: bytes, place: int) -> tuple[int, int]:
    """A whole number of variable length, and the place after it."""
    value = shift = 0
    while True:
        byte = data[place]
        value, shift, place = value | (byte & 127) << shift, shift + 7, place + 1
        if byte < 128:
            return value, place
        if shift > 63:
            raise ValueError("a number is too long")
