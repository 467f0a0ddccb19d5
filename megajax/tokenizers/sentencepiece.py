"""SentencePiece models."""

import hashlib
import re
from collections.abc import Callable, Sequence
from copy import copy
from typing import Any

import numpy as np

from megajax.config.errors import UserError
from megajax.config.optional_packages import require
from megajax.tokenizers.base import (
    Tokenizer,
    character_spans,
    check_ids,
    end_of_document,
    read_file,
    sentinel_name,
    usual_specials,
)
from megajax.tokenizers.config import SentencePieceTokenizerConfig

SPACE = "▁"
"""Prefix of pieces that begin a word."""
type Pieces = Callable[[bytes], tuple[list[int], list[tuple[int, int]]]]


def engine_of(path: str, data: bytes) -> Any:
    """The library's processor of a model. Raises UserError for a damaged file or without the library."""
    sentencepiece = require("sentencepiece", "The SentencePiece tokenizer")
    try:
        engine = sentencepiece.SentencePieceProcessor(model_proto=data)
    except (RuntimeError, ValueError) as error:
        raise UserError(f"{path}: not a SentencePiece model: {error}.") from error
    if not len(engine):
        raise UserError(f"{path}: not a SentencePiece model: it has no pieces.")
    return engine


class SentencePieceTokenizer(Tokenizer):
    """A SentencePiece model (Kudo and Richardson 2018) as the library runs it, with optional special tokens.

    With special tokens, text is cut at them as in Megatron-LM's legacy mode: each part is encoded by itself, and a
    space alone between two of them is dropped; `decode` puts spaces around them. Invalid UTF-8 becomes,
    depending on the model, U+FFFD, its bytes, or the unknown token. No split point is known: models may join words, and
    most put a space before a text.

    Raises:
        UserError: a file that is missing or not a model, no token for the end of a document, or the extra `tokenizers`
            not installed.
    """

    def __init__(self, config: SentencePieceTokenizerConfig):
        data = read_file(config.path, "SentencePiece model")
        self._engine = engine_of(config.path, data)
        size = len(self._engine)
        self._ids = {self._engine.id_to_piece(number): number for number in range(size)}
        sentinels = [sentinel_name(number) for number in range(config.extra_ids)]
        added = list(dict.fromkeys((*config.special_tokens, *sentinels)))
        for token in added:
            if token not in self._ids:
                self._ids[token], size = size, size + 1
        self._added = {token.encode(): self._ids[token] for token in added}
        self._names = {self._ids[token]: token for token in added}
        self._cuts = re.compile(b"(" + b"|".join(map(re.escape, self._added)) + b")") if added else None
        self.vocabulary_size = size
        model_ids = {"bos": self._engine.bos_id(), "eos": self._engine.eos_id(), "pad": self._engine.pad_id()}
        self.specials = usual_specials(self._ids) | {role: number for role, number in model_ids.items() if number >= 0}
        self.pad = self.specials.pop("pad", None)
        end = self.specials.get("eos") if config.eod is None else None
        self.eod = end_of_document(self._ids, config.eod, config.path) if end is None else end
        self.sentinels = tuple(self._ids[token] for token in sentinels)
        self.continues = np.array([self._continues(number) for number in range(self.vocabulary_size)])
        self._first = [self.specials["bos"]] if config.prepend_bos and "bos" in self.specials else []
        if config.prepend_bos and not self._first:
            raise UserError(f"{config.path}: no token begins a sentence; set tokenizer.prepend_bos=false.")
        digest, rest = hashlib.sha256(data).hexdigest(), repr((added, self._first))
        self.identity = f"sentencepiece:{digest[:16]}:eod={self.eod}:{hashlib.sha256(rest.encode()).hexdigest()[:8]}"

    def _continues(self, number: int) -> bool:
        """Whether a token is an ordinary piece that does not begin a word."""
        engine = self._engine
        if number >= len(engine) or number in self._names or engine.is_control(number) or engine.is_unknown(number):
            return False
        return not engine.id_to_piece(number).startswith(SPACE)

    def encode_bytes(self, data: bytes) -> np.ndarray:
        return np.array(self._encode(data, lambda part: (self._engine.encode(part), []))[0], np.int32)

    def encode_spans(self, text: str) -> tuple[np.ndarray, np.ndarray]:
        """Needs sentencepiece 0.2.3."""

        def pieces(part: bytes) -> tuple[list[int], list[tuple[int, int]]]:
            encoded = self._engine.encode(part, return_type="offset_mapping")
            return encoded["ids"], encoded["offsets"]

        ids, byte_spans = self._encode(text.encode("utf-8", errors="surrogatepass"), pieces)
        return np.array(ids, np.int32), character_spans(text, np.array(byte_spans, np.int64).reshape(-1, 2))

    def _encode(self, data: bytes, pieces: Pieces) -> tuple[list[int], list[tuple[int, int]]]:
        """Ids of a text and their spans in bytes, from a function that has them of ordinary text."""
        parts, start = [data] if self._cuts is None else self._cuts.split(data), 0
        ids, spans = list(self._first), [(0, 0)] * len(self._first)
        for place, part in enumerate(parts):
            more, more_spans = ([self._added[part]], [(0, len(part))]) if place % 2 else pieces(part)
            # Megatron-LM drops a lone space between two added tokens.
            is_between = place % 2 == 0 < place < len(parts) - 1
            drops = is_between and more[:1] == [self._engine.piece_to_id(SPACE)]
            ids += more[drops:]
            spans += [(start + first, start + end) for first, end in more_spans[drops:]]
            start += len(part)
        return ids, spans

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        numbers = check_ids(ids, self.vocabulary_size)
        if not self._names:
            return self._engine.decode(numbers)
        text, run = "", []
        for number in numbers:
            if number in self._names:
                text += f"{self._engine.decode(run)} {self._names[number]} "
                run = []
            else:
                run.append(number)
        return (text + self._engine.decode(run)).strip()

    def token_id(self, token: str) -> int | None:
        return self._ids.get(token)

    def controls(self) -> dict[str, int]:
        return {token.decode(): number for token, number in self._added.items()} if self._cuts else {}

    def after_special(self) -> Tokenizer:
        twin = copy(self)
        twin._first = []
        return twin

    def plain(self) -> Tokenizer:
        twin = copy(self)
        twin._cuts = None
        return twin
