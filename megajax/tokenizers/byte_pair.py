"""Byte-pair encodings of the tiktoken library."""

import re
from collections.abc import Sequence

import numpy as np

from megajax.tokenizers.base import Tokenizer, join_tokens, spans_of_bytes

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

    def encode_spans(self, text: str) -> tuple[np.ndarray, np.ndarray]:
        ids = self.encode(text)
        return ids, spans_of_bytes(text, [len(self.table[number] or b"") for number in ids.tolist()])

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        return join_tokens(ids, self.table).decode("utf-8", errors="replace")
