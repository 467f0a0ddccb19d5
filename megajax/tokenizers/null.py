"""Token ids written as numbers."""

from collections.abc import Sequence

import numpy as np

from megajax.config.errors import ConfigError, UserError
from megajax.tokenizers.base import Tokenizer, before_last_blank, check_ids
from megajax.tokenizers.config import NullTokenizerConfig


class NullTokenizer(Tokenizer):
    """The text "17 4 511" is tokens 17, 4 and 511; the last id of the vocabulary ends a document.

    Raises:
        ConfigError: a vocabulary without any id.
    """

    def __init__(self, config: NullTokenizerConfig):
        if problems := config.problems():
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
