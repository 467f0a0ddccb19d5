"""Tokenizers of the `tokenizers` library, which Hugging Face saves as tokenizer.json."""

import hashlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import takewhile
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np

from megajax.config.errors import UserError
from megajax.config.optional_packages import require
from megajax.config.read_limits import parse_json
from megajax.tokenizers.base import (
    Tokenizer,
    check_ids,
    end_of_document,
    local_path,
    read_file,
    sentinels_of,
    spans_of_characters,
    stop_tokens,
    usual_specials,
)
from megajax.tokenizers.config import HuggingFaceTokenizerConfig
from megajax.tokenizers.gpt2 import printable_bytes


class LibraryTokenizer(Tokenizer):
    """A tokenizer of the `tokenizers` library. Invalid UTF-8 becomes U+FFFD."""

    engine: Any
    """The library's own `Tokenizer`."""

    def encode_bytes(self, data: bytes) -> np.ndarray:
        text = data.decode("utf-8", errors="replace")
        encoding = self.engine.encode_batch_fast([text], add_special_tokens=False)[0]
        return np.array(encoding.ids, np.int32)

    def encode_spans(self, text: str) -> tuple[np.ndarray, np.ndarray]:
        whole = text.encode("utf-8", errors="surrogatepass").decode("utf-8", errors="replace")
        encoding = self.engine.encode(whole, add_special_tokens=False)
        spans = np.array(encoding.offsets, np.int64).reshape(-1, 2)
        if len(whole) > len(text):  # each lone surrogate became three characters
            spans = spans_of_characters([3 if "\ud800" <= letter <= "\udfff" else 1 for letter in text], spans)
        return np.array(encoding.ids, np.int32), spans

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        return self.engine.decode(check_ids(ids, self.vocabulary_size), skip_special_tokens=False)

    def token_id(self, token: str) -> int | None:
        return self.engine.token_to_id(token)


class HuggingFaceTokenizer(LibraryTokenizer):
    """A tokenizer.json, without the truncation, padding and added tokens that the file may request.

    Invalid UTF-8 becomes U+FFFD before it is tokenized. Whether text survives a round trip depends on the file's
    normalizer and decoder. Words are known for WordPiece.

    Raises:
        UserError: a file that is missing or not a tokenizer.json, two tokens with one id, no token for the end of a
            document, or the extra `tokenizers` not installed.
    """

    def __init__(self, config: HuggingFaceTokenizerConfig):
        tokenizers = require("tokenizers", "The Hugging Face tokenizer")
        path = str(local_path(config.path))
        path = os.path.join(path, "tokenizer.json") if os.path.isdir(path) else path
        data = read_file(path, "tokenizer.json")
        try:
            self.engine = tokenizers.Tokenizer.from_str(data.decode("utf-8"))
        # The package raises bare Exceptions for all problems of the file.
        except Exception as error:
            raise UserError(f"{path}: not a tokenizer.json that this version of tokenizers reads: {error}.") from error
        demand_distinct_ids(path, data)
        self.engine.no_truncation()
        self.engine.no_padding()
        self.engine.encode_special_tokens = not config.special_tokens_in_text
        self._config = config
        vocabulary = self.engine.get_vocab(with_added_tokens=True)
        self.vocabulary_size = max(vocabulary.values(), default=-1) + 1
        self.eod = end_of_document(vocabulary, config.eod, path)
        self.specials = usual_specials(vocabulary)
        self.pad = self.specials.pop("pad", None)
        self.sentinels = sentinels_of(vocabulary)
        self.suffix = tuple(number for number, _ in takewhile(itemgetter(1), reversed(self._marks())))[::-1]
        self.prefix = self._prefix(os.path.join(os.path.dirname(path), "tokenizer_config.json"))
        # Post-processors may leave the blanks out of spans.
        self.engine.post_processor = tokenizers.processors.Sequence([])
        self.ends = {token for token in stop_tokens(Path(path).parent) if token < self.vocabulary_size}
        if isinstance(self.engine.decoder, tokenizers.decoders.ByteLevel):
            self.table = byte_level_table(vocabulary, self.vocabulary_size)
        if isinstance(self.engine.model, tokenizers.models.WordPiece):
            prefix = self.engine.model.continuing_subword_prefix
            self.continues = np.zeros(self.vocabulary_size, bool)
            self.continues[[number for token, number in vocabulary.items() if token.startswith(prefix)]] = True
        special = "" if config.special_tokens_in_text else ":plain"
        self.identity = f"huggingface:{hashlib.sha256(data).hexdigest()[:16]}:eod={self.eod}{special}"

    def controls(self) -> dict[str, int]:
        added = self.engine.get_added_tokens_decoder() if self._config.special_tokens_in_text else {}
        return {token.content: number for number, token in added.items() if token.special}

    def plain(self) -> Tokenizer:
        return HuggingFaceTokenizer(replace(self._config, special_tokens_in_text=False))

    def _marks(self) -> list[tuple[int, int]]:
        """Ids of a text with those that the post-processor of tokenizer.json adds, and whether it added them."""
        encoding = self.engine.encode("a")
        return list(zip(encoding.ids, encoding.special_tokens_mask, strict=True))

    def _prefix(self, path: str) -> tuple[int, ...]:
        """The prefix by `add_bos_token` of tokenizer_config.json, as in transformers, or else the ids that the
        post-processor of tokenizer.json puts before a text.

        Raises UserError for a file that is not a JSON object, or a bos_token that the vocabulary lacks.
        """
        settings: Any = {}
        if os.path.isfile(path):
            try:
                settings = parse_json(read_file(path, "tokenizer_config.json"), unique=False)
            except ValueError as error:
                raise UserError(f"{path}: not valid JSON: {error}.") from error
        if not isinstance(settings, dict):
            raise UserError(f"{path}: a JSON {type(settings).__name__}, not an object.")
        if settings.get("add_bos_token") is None:
            return tuple(number for number, _ in takewhile(itemgetter(1), self._marks()))
        name = settings.get("bos_token")
        name = name.get("content") if isinstance(name, dict) else name
        number = self.token_id(name) if isinstance(name, str) else self.specials.get("bos")
        if settings["add_bos_token"] and number is None:
            raise UserError(f"{path}: add_bos_token is set, and bos_token, {name!r}, is not in the vocabulary.")
        return (number,) if settings["add_bos_token"] and number is not None else ()


def demand_distinct_ids(path: str, data: bytes) -> None:
    """Raises UserError if two tokens of a tokenizer.json have the same id; the library would keep one of them."""
    try:
        content = parse_json(data.decode("utf-8"))
    except ValueError as error:
        raise UserError(f"{path}: {error}. Download the file again.") from error
    vocabulary = content["model"].get("vocab", {})
    pairs = list(vocabulary.items()) if isinstance(vocabulary, dict) else []
    pairs += [(token["content"], token["id"]) for token in content.get("added_tokens") or ()]
    tokens: dict[int, str] = {}
    for token, number in pairs:
        if tokens.setdefault(number, token) != token:
            raise UserError(
                f"{path}: the tokens {tokens[number]!r} and {token!r} both have the id {number}. Give each token an id "
                "of its own, the one that the model was trained with."
            )


def byte_level_table(vocabulary: Mapping[str, int], size: int) -> list[bytes | None]:
    """Bytes of each id below `size`: those that its characters stand for, or their UTF-8 for other tokens."""
    byte_of, table = printable_bytes(), list[bytes | None]([None] * size)
    for token, number in vocabulary.items():
        is_byte_level = byte_of.keys() >= set(token)
        table[number] = bytes(byte_of[character] for character in token) if is_byte_level else token.encode()
    return table
