"""Byte-pair encodings in files of ranks."""

import base64
import hashlib
from copy import copy

import numpy as np

from megajax.config.compose import problems_of
from megajax.config.errors import ConfigError, UserError
from megajax.config.optional_packages import require
from megajax.config.read_limits import parse_json
from megajax.tokenizers.base import (
    BytePairTokenizer,
    Tokenizer,
    before_last_blank,
    end_of_document,
    read_file,
    sentinels_of,
    usual_specials,
)
from megajax.tokenizers.config import TiktokenTokenizerConfig

PATTERNS = {
    "v1": r"[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+",
    "v2": r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|"
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|"
    r"\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
}
"""Megatron-LM's patterns. A blank always begins its pretoken, except line ends after other signs."""


class TiktokenTokenizer(BytePairTokenizer):
    """Ids equal to those of Megatron-LM's TikTokenizer: special tokens, then the file's tokens in order of rank.

    Raises:
        ConfigError: settings that contradict each other.
        UserError: a file that is missing or damaged or has fewer tokens than the settings request, an invalid pattern,
            no token for the end of a document, or the extra `tokenizers` not installed.
    """

    def __init__(self, config: TiktokenTokenizerConfig):
        if problems := problems_of(config):
            raise ConfigError(problems)
        tiktoken = require("tiktoken", "The tiktoken tokenizer")
        data, first = read_file(config.path, "file of ranks"), config.special_ids
        tokens = _read_tokens(config.path, data)
        if config.vocabulary_size is not None and config.vocabulary_size - first > len(tokens):
            has = f"{len(tokens)} tokens and {first} special ids make {len(tokens) + first}"
            message = f"{has}, tokenizer.vocabulary_size is {config.vocabulary_size}"
            raise UserError(f"{config.path}: {message}. Lower it, or leave it out.")
        tokens = tokens[: None if config.vocabulary_size is None else config.vocabulary_size - first]
        names = [*config.special_tokens, *(f"<SPECIAL_{n}>" for n in range(len(config.special_tokens), first))]
        self._special = {name: number for number, name in enumerate(names)}
        self.vocabulary_size = first + len(tokens)
        self.eod = end_of_document(self._special, config.eod, config.path)
        self.specials = usual_specials(self._special)
        self.pad = self.specials.pop("pad", None)
        self.sentinels = sentinels_of(self._special)
        ranks = {token: rank for rank, token in enumerate(tokens, start=first)}
        self.table = [*(name.encode() for name in names), *tokens]
        self.byte_ids = np.array([ranks[bytes((value,))] for value in range(256)], np.int32)
        self._split = config.pattern in PATTERNS
        settings = (config.pattern, names, len(tokens), self.eod, config.special_tokens_in_text)
        digests = hashlib.sha256(data).hexdigest(), hashlib.sha256(repr(settings).encode()).hexdigest()
        self.identity = f"tiktoken:{digests[0][:16]}:{digests[1][:8]}"
        pattern = PATTERNS.get(config.pattern, config.pattern)
        try:
            self._engine = tiktoken.Encoding(
                self.identity, pat_str=pattern, mergeable_ranks=ranks, special_tokens=self._special
            )
        except ValueError as error:
            raise UserError(
                f"tokenizer.pattern {config.pattern!r} is not a pattern: {error}. Give v1 or v2."
            ) from error
        self._allowed = self._engine.special_tokens_set if config.special_tokens_in_text else set()

    def encode_text(self, text: str) -> np.ndarray:
        """Ids, int32 [tokens], of text without surrogates.

        Raises:
            UserError: text that the pattern's engine cannot cut, such as a run of a million blanks.
        """
        try:
            ids = self._engine.encode_to_numpy(text, allowed_special=self._allowed, disallowed_special=())
        except ValueError as error:
            raise UserError(f"tiktoken cannot cut this text of {len(text):,} characters: {error}.") from error
        return ids.astype(np.int32)

    def token_id(self, token: str) -> int | None:
        return self._special.get(token)

    def controls(self) -> dict[str, int]:
        return {name: self._special[name] for name in self._allowed}

    def plain(self) -> Tokenizer:
        twin = copy(self)
        twin._allowed = set()
        return twin

    def split_point(self, data: bytes) -> int:
        """Before a blank other than a line end, which belongs to the signs before it. Unknown for custom patterns."""
        return before_last_blank(data, blanks=b" ") if self._split else 0


def _read_tokens(path: str, data: bytes) -> list[bytes]:
    """Tokens in order of rank.

    Raises:
        UserError: names the file and the entry that is wrong.
    """
    try:
        if data.lstrip().startswith(b"["):
            raw_entries = [(entry["token_bytes"], entry["rank"]) for entry in parse_json(data)]
        else:
            raw_entries = [line.split() for line in data.splitlines() if line.strip()]
        entries = [(base64.b64decode(token, validate=True), int(rank)) for token, rank in raw_entries]
    except (ValueError, KeyError, TypeError) as error:
        kinds = "a JSON list of rank and token_bytes, or lines with a token in base64 and its rank"
        raise UserError(f"{path}: not a file of ranks, which is {kinds}: {type(error).__name__}: {error}.") from error
    for place, (_, rank) in enumerate(entries):
        if rank != place:
            raise UserError(f"{path}: entry {place} has rank {rank}: the ranks go from 0 on without gaps.")
    tokens = [token for token, _ in entries]
    if len(set(tokens)) < len(tokens):
        raise UserError(f"{path}: duplicate tokens; the file is damaged.")
    if missing := sorted({bytes((value,)) for value in range(256)}.difference(tokens[:256])):
        raise UserError(f"{path}: byte 0x{missing[0].hex()} is not among the first 256 tokens; the file is damaged.")
    return tokens
