"""Token ids written as numbers."""

from collections.abc import Sequence

import numpy as np

from megajax.config.errors import ConfigError, UserError
from megajax.tokenizers.base import before_last_blank, outside_vocabulary
from megajax.tokenizers.config import NullTokenizerConfig


class NullTokenizer:
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
        self.identity = f"null:{config.vocabulary_size}"

    def encode(self, text: str) -> np.ndarray:
        """Ids, int32 [tokens]. Raises UserError for a word that is no id of the vocabulary."""
        return self.encode_bytes(text.encode("utf-8", errors="surrogatepass"))

    def encode_bytes(self, data: bytes) -> np.ndarray:
        """Ids, int32 [tokens]. Raises UserError for a word that is no id of the vocabulary."""
        words = data.split()
        for word in words:
            if not word.isdigit():
                shown = word[:40].decode("utf-8", errors="replace")
                raise UserError(
                    f"The null tokenizer reads numbers with blanks between them, found {shown!r}. "
                    "Choose another tokenizer for text."
                )
            if int(word) >= self.vocabulary_size:
                raise outside_vocabulary(int(word), self.vocabulary_size)
        return np.array(words, dtype="S").astype(np.int32) if words else np.zeros(0, np.int32)

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        numbers = np.asarray(ids, dtype=np.int64).tolist()
        for number in numbers:
            if not 0 <= number < self.vocabulary_size:
                raise outside_vocabulary(number, self.vocabulary_size)
        return " ".join(str(number) for number in numbers)

    def decode_bytes(self, ids: Sequence[int] | np.ndarray) -> bytes:
        return self.decode(ids).encode("ascii")

    def split_point(self, data: bytes) -> int:
        return before_last_blank(data)
