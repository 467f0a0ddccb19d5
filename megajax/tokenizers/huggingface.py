"""Tokenizers of the `tokenizers` library, as the files of a model's folder describe them."""

import hashlib
from collections.abc import Collection, Mapping, Sequence
from copy import copy
from itertools import takewhile
from operator import itemgetter
from typing import Any

import numpy as np

from megajax.config.optional_packages import require
from megajax.tokenizers.base import (
    LEAD,
    Tokenizer,
    check_ids,
    end_of_document,
    local_path,
    sentinels_of,
    spans_of_characters,
    usual_specials,
)
from megajax.tokenizers.config import HuggingFaceTokenizerConfig
from megajax.tokenizers.folder import FolderTokens
from megajax.tokenizers.folder_engine import engine_of
from megajax.tokenizers.gpt2 import printable_bytes


class LibraryTokenizer(Tokenizer):
    """A tokenizer of the `tokenizers` library. Invalid UTF-8 becomes U+FFFD."""

    engine: Any
    """The library's own `Tokenizer`."""
    _lead = ""
    _without_lead: "LibraryTokenizer"
    """For texts that contain LEAD."""

    def encode_bytes(self, data: bytes) -> np.ndarray:
        text = data.decode("utf-8", errors="replace")
        if self._lead and LEAD in text:
            return self._without_lead.encode_bytes(data)
        encoding = self.engine.encode_batch_fast([self._lead + text], add_special_tokens=False)[0]
        return np.array(encoding.ids[len(self._lead) :], np.int32)

    def encode_spans(self, text: str) -> tuple[np.ndarray, np.ndarray]:
        whole = text.encode("utf-8", errors="surrogatepass").decode("utf-8", errors="replace")
        if (lead := self._lead) and LEAD in text:
            return self._without_lead.encode_spans(text)
        encoding = self.engine.encode(lead + whole, add_special_tokens=False)
        spans = np.array(encoding.offsets[len(lead) :], np.int64).reshape(-1, 2) - len(lead)
        if len(whole) > len(text):  # each lone surrogate became three characters
            spans = spans_of_characters([3 if "\ud800" <= letter <= "\udfff" else 1 for letter in text], spans)
        return np.array(encoding.ids[len(lead) :], np.int32), spans

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        return self.engine.decode(check_ids(ids, self.vocabulary_size), skip_special_tokens=False)

    def token_id(self, token: str) -> int | None:
        return self.engine.token_to_id(token)

    def after_special(self) -> Tokenizer:
        """Only Metaspace with the scheme `first` treats the beginning of a text specially."""
        splits = self.engine.pre_tokenizer
        if self._lead or splits is None or b'"prepend_scheme":"first"' not in splits.__getstate__():
            return self
        library = require("tokenizers", "The Hugging Face tokenizer")
        twin = self._twin()
        twin.engine.add_tokens([library.AddedToken(LEAD, normalized=False)])
        twin._lead, twin._without_lead = LEAD, self
        return twin

    def _twin(self) -> "LibraryTokenizer":
        """A copy with an engine of its own."""
        twin = copy(self)
        twin.engine = type(self.engine).from_str(self.engine.to_str())
        twin.engine.encode_special_tokens = self.engine.encode_special_tokens
        return twin


class HuggingFaceTokenizer(LibraryTokenizer):
    """The tokenizer of a model's folder, without truncation, padding, and the tokens that are added around a text.

    Invalid UTF-8 becomes U+FFFD before it is tokenized. Whether text survives a round trip depends on the file's
    normalizer and decoder. Words are known for WordPiece.

    Raises:
        UserError: a file that is missing, damaged or not read exactly, two tokens with one id, no token for the end of
            a document, or the extra `tokenizers` not installed.
    """

    def __init__(self, config: HuggingFaceTokenizerConfig):
        tokens, library = folder_of(config), require("tokenizers", "The Hugging Face tokenizer")
        self.engine = engine_of(tokens)
        vocabulary = self.engine.get_vocab(with_added_tokens=True)
        self._added = {token.content: number for number, token in self.engine.get_added_tokens_decoder().items()}
        self._splits = not config.special_tokens_in_text
        self.vocabulary_size = max(vocabulary.values(), default=-1) + 1
        self.eod = end_of_document(vocabulary, config.eod, str(tokens.vocabulary))
        roles = {name.removesuffix("_token"): vocabulary.get(text) for name, text in tokens.names.items()}
        named = {role: number for role, number in roles.items() if number is not None and role not in ("eos", "unk")}
        self.specials = usual_specials(vocabulary) | named
        self.pad = self.specials.pop("pad", None)
        self.sentinels = sentinels_of(vocabulary)
        marks = self._marks()
        self.prefix = tuple(number for number, _ in takewhile(itemgetter(1), marks))
        self.suffix = tuple(number for number, _ in takewhile(itemgetter(1), reversed(marks)))[::-1]
        self.engine.encode_special_tokens = self._splits
        # Post-processors may leave the blanks out of spans.
        self.engine.post_processor = library.processors.Sequence([])
        self.ends = {token for token in (*tokens.ends, *config.ends) if token < self.vocabulary_size}
        if isinstance(self.engine.decoder, library.decoders.ByteLevel):
            self.table = byte_level_table(vocabulary, self._added, self.vocabulary_size)
        if isinstance(self.engine.model, library.models.WordPiece):
            prefix = self.engine.model.continuing_subword_prefix
            self.continues = np.zeros(self.vocabulary_size, bool)
            self.continues[[number for token, number in vocabulary.items() if token.startswith(prefix)]] = True
        special = "" if config.special_tokens_in_text else ":plain"
        digest = hashlib.sha256(self.engine.to_str().encode()).hexdigest()
        self.identity = f"huggingface:{digest[:16]}:eod={self.eod}{special}"

    def controls(self) -> dict[str, int]:
        added = {} if self._splits else self.engine.get_added_tokens_decoder()
        return {token.content: number for number, token in added.items() if token.special}

    def plain(self) -> Tokenizer:
        twin: Any = self._twin()
        twin.engine.encode_special_tokens = twin._splits = True
        return twin

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """The library takes the characters of added tokens for bytes."""
        if not self.table:
            return super().decode(ids)
        pieces = [self.table[number] or b"" for number in check_ids(ids, self.vocabulary_size)]
        return b"".join(pieces).decode("utf-8", errors="replace")

    def _marks(self) -> list[tuple[int, int]]:
        """Ids of a text with those that the post-processor adds, and whether it added them."""
        encoding = self.engine.encode("a")
        return list(zip(encoding.ids, encoding.special_tokens_mask, strict=True))


def folder_of(config: HuggingFaceTokenizerConfig) -> FolderTokens:
    """The tokens of the folder whose file a config names."""
    path = local_path(config.path)
    return FolderTokens(path, config.kind) if path.is_dir() else FolderTokens(path.parent, config.kind, path)


def byte_level_table(vocabulary: Mapping[str, int], added: Collection[str], size: int) -> list[bytes | None]:
    """Bytes of each id below `size`: those that its characters stand for, or their UTF-8 for added tokens."""
    byte_of, table = printable_bytes(), list[bytes | None]([None] * size)
    for token, number in vocabulary.items():
        is_byte_level = token not in added and byte_of.keys() >= set(token)
        table[number] = bytes(byte_of[character] for character in token) if is_byte_level else token.encode()
    return table
