"""Tokenizers without a file: bytes as tokens, and numbers in the text as tokens."""

from collections.abc import Sequence

import numpy as np

from megajax.config.compose import problems_of
from megajax.config.errors import ConfigError, UserError
from megajax.tokenizers.base import Tokenizer, before_last_blank, check_ids, join_tokens
from megajax.tokenizers.config import ByteTokenizerConfig, NullTokenizerConfig

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

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        return join_tokens(ids, TABLE).decode("utf-8", errors="replace")

    def split_point(self, data: bytes) -> int:
        return len(data)


class NullTokenizer(Tokenizer):
    """The text "17 4 511" is tokens 17, 4 and 511; the last id of the vocabulary ends a document.

    Raises:
        ConfigError: a vocabulary without any id.
    """

    def __init__(self, config: NullTokenizerConfig):
        if problems := problems_of(config):
            raise ConfigError(problems)
        self.vocabulary_size = config.vocabulary_size
        self.eod = config.vocabulary_size - 1
        self.pad = None
        self.specials = {}
        self.identity = f"null:{config.vocabulary_size}"

    def encode_bytes(self, data: bytes) -> np.ndarray:
        """Ids, int32 [tokens]. Raises UserError for a word that is not an id of the vocabulary."""
        numbers = []
        for word in data.split():
            if not word.isdigit():
                excerpt = word[:40].decode("utf-8", errors="replace")
                message = f"The null tokenizer reads numbers with blanks between them, got {excerpt!r}."
                raise UserError(f"{message} Choose another tokenizer for text.")
            numbers.append(min(int(word), 2**62))  # numbers that overflow int64 are outside the vocabulary, too
        return np.array(check_ids(numbers, self.vocabulary_size), np.int32)

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        return " ".join(map(str, check_ids(ids, self.vocabulary_size)))

    def split_point(self, data: bytes) -> int:
        return before_last_blank(data)
