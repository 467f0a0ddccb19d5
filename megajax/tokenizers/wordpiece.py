"""BERT's WordPiece, from its vocab.txt."""

import hashlib
from collections.abc import Sequence

import numpy as np

from megajax.config.errors import UserError
from megajax.config.missing import require
from megajax.tokenizers.base import Tokenizer, before_last_blank, check_ids, read_file
from megajax.tokenizers.config import WordPieceTokenizerConfig

SPECIAL = {"pad": "[PAD]", "unknown": "[UNK]", "cls": "[CLS]", "sep": "[SEP]", "mask": "[MASK]"}
"""Tokens that a vocabulary must have."""
CONTINUATION = "##"
"""Pieces with this prefix continue the word before them."""


class WordPieceTokenizer(Tokenizer):
    """WordPiece (Devlin et al. 2019): words and marks, each cut into the longest pieces of the vocabulary.

    As in Megatron-LM, [BOS], [EOS] and `extra_ids` sentinels follow the tokens of the file unless it has them. Bytes
    that are no UTF-8 are dropped. `decode` joins pieces, puts a space between words, and cannot restore case.

    Attributes:
        cls, sep, mask, bos, eos: special tokens; `eod` is `eos`.
        sentinels: int32 [extra_ids], <extra_id_0>, <extra_id_1>, …
        continues: bool [vocabulary], the pieces that continue a word.

    Raises:
        UserError: a file that is missing or not a vocabulary, or lacks a special token; the extra `tokenizers` not
            installed.
    """

    def __init__(self, config: WordPieceTokenizerConfig):
        tokenizers = require("tokenizers", "The WordPiece tokenizer")
        data = read_file(config.vocabulary, "WordPiece vocabulary")
        self._tokens = _read_vocabulary(config.vocabulary, data)
        ids = {token: number for number, token in enumerate(self._tokens)}
        absent = [token for token in SPECIAL.values() if token not in ids]
        if absent:
            raise UserError(
                f"{config.vocabulary}: no token {', '.join(absent)}. A WordPiece vocabulary has one token in each "
                f"line, {', '.join(SPECIAL.values())} among them."
            )
        self.pad, self.cls, self.sep, self.mask = (ids[SPECIAL[name]] for name in ("pad", "cls", "sep", "mask"))
        sentinels = [f"<extra_id_{number}>" for number in range(config.extra_ids)]
        for token in ("[BOS]", "[EOS]", *sentinels):
            if ids.setdefault(token, len(ids)) == len(self._tokens):
                self._tokens.append(token)
        self.bos, self.eos = ids["[BOS]"], ids["[EOS]"]
        self.eod = self.eos
        self.sentinels = np.array([ids[token] for token in sentinels], np.int32)
        self.vocabulary_size = len(self._tokens)
        self.continues = np.array([token.startswith(CONTINUATION) for token in self._tokens])
        # Special tokens written out in the text are plain text: only the words of the vocabulary are given.
        self._engine = tokenizers.Tokenizer(tokenizers.models.WordPiece(ids, unk_token=SPECIAL["unknown"]))
        self._engine.normalizer = tokenizers.normalizers.BertNormalizer(lowercase=config.lower)
        self._engine.pre_tokenizer = tokenizers.pre_tokenizers.BertPreTokenizer()
        self._engine.decoder = tokenizers.decoders.WordPiece(prefix=CONTINUATION, cleanup=False)
        case = "lower" if config.lower else "cased"
        self.identity = f"wordpiece:{hashlib.sha256(data).hexdigest()[:16]}:{case}:extra={config.extra_ids}"

    def encode_bytes(self, data: bytes) -> np.ndarray:
        text = data.decode("utf-8", errors="replace")
        encoding = self._engine.encode_batch_fast([text], add_special_tokens=False)[0]
        return np.array(encoding.ids, np.int32)

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        return self._engine.decode(check_ids(ids, self.vocabulary_size), skip_special_tokens=False)

    def split_point(self, data: bytes) -> int:
        """No word has a blank in it."""
        return before_last_blank(data)


def _read_vocabulary(path: str, data: bytes) -> list[str]:
    """Tokens by id: a line each."""
    try:
        lines = data.decode("utf-8").removesuffix("\n").split("\n")
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: this WordPiece vocabulary is not UTF-8: {error}.") from error
    numbers: dict[str, int] = {}
    for number, line in enumerate(lines, start=1):
        first = numbers.setdefault(line.rstrip("\r"), number)
        if first != number:
            raise UserError(f"{path}, line {number}: token {line[:60]!r} is in line {first}, too.")
    return list(numbers)
