"""Bytes as tokens."""

from collections.abc import Sequence

import numpy as np

from megajax.tokenizers.base import Tokenizer, join_tokens, spans_of_bytes
from megajax.tokenizers.config import ByteTokenizerConfig

EOD = 256
TABLE = (*(bytes((value,)) for value in range(EOD)), b"")
"""Bytes of each id; the end of a document has none."""


class ByteTokenizer(Tokenizer):
    """Ids 0 to 255 are byte values, 256 ends a document. Exact for any bytes; a lone surrogate is three bytes."""

    def __init__(self, config: ByteTokenizerConfig):
        self.vocabulary_size = len(TABLE)
        self.eod = EOD
        self.pad = None
        self.specials = {}
        self.table = TABLE
        self.identity = f"byte:{self.vocabulary_size}"

    def encode_bytes(self, data: bytes) -> np.ndarray:
        return np.frombuffer(data, np.uint8).astype(np.int32)

    def encode_spans(self, text: str) -> tuple[np.ndarray, np.ndarray]:
        ids = self.encode(text)
        return ids, spans_of_bytes(text, [1] * len(ids))

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        return join_tokens(ids, TABLE).decode("utf-8", errors="replace")

    def split_point(self, data: bytes) -> int:
        return len(data)
