"""Tokenizers that Hugging Face saves as tokenizer.json."""

import hashlib
import os
from collections.abc import Sequence

import numpy as np

from megajax.config.errors import UserError
from megajax.config.missing import require
from megajax.tokenizers.base import Tokenizer, check_ids, read_file
from megajax.tokenizers.config import HuggingFaceTokenizerConfig

EOD_NAMES = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<｜end▁of▁sentence｜>", "[EOS]", "<EOD>", "<eod>")
"""Names under which vocabularies hold the end of a document, in the order in which they are looked for."""
PAD_NAMES = ("<pad>", "[PAD]", "<|pad|>", "<|finetune_right_pad_id|>", "<|endofpad|>")
"""Names of padding tokens, likewise."""


class HuggingFaceTokenizer(Tokenizer):
    """A tokenizer.json as it is, without the truncation, padding and added tokens that the file may ask for.

    Bytes that are no UTF-8 become U+FFFD before they are tokenised, and whether text survives a round trip is up to the
    file's normalizer and decoder.

    Raises:
        UserError: a file that is missing or not a tokenizer.json, no token for the end of a document, or the extra
            `tokenizers` not installed.
    """

    def __init__(self, config: HuggingFaceTokenizerConfig):
        tokenizers = require("tokenizers", "The Hugging Face tokenizer")
        path = os.path.join(config.path, "tokenizer.json") if os.path.isdir(config.path) else config.path
        data = read_file(path, "tokenizer.json")
        try:
            self._engine = tokenizers.Tokenizer.from_str(data.decode("utf-8"))
        # The package raises bare Exceptions, whatever is wrong with the file.
        except Exception as error:
            raise UserError(f"{path}: not a tokenizer.json that this version of tokenizers reads: {error}.") from error
        self._engine.no_truncation()
        self._engine.no_padding()
        self._engine.encode_special_tokens = not config.special_tokens_in_text
        vocabulary = self._engine.get_vocab(with_added_tokens=True)
        self.vocabulary_size = max(vocabulary.values(), default=-1) + 1
        names = EOD_NAMES if config.eod is None else (config.eod,)
        eod = next((vocabulary[name] for name in names if name in vocabulary), None)
        if eod is None:
            wanted = "none of the usual tokens" if config.eod is None else "no token"
            what = f"{wanted} {', '.join(names)} to end a document. Name one of this vocabulary as `eod`."
            raise UserError(f"{path}: {what}")
        self.eod: int = eod
        self.pad = next((vocabulary[name] for name in PAD_NAMES if name in vocabulary), None)
        special = "" if config.special_tokens_in_text else ":plain"
        self.identity = f"huggingface:{hashlib.sha256(data).hexdigest()[:16]}:eod={self.eod}{special}"

    def encode_bytes(self, data: bytes) -> np.ndarray:
        text = data.decode("utf-8", errors="replace")
        encoding = self._engine.encode_batch_fast([text], add_special_tokens=False)[0]
        return np.array(encoding.ids, np.int32)

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        return self._engine.decode(check_ids(ids, self.vocabulary_size), skip_special_tokens=False)
