"""GPT-2's byte-level byte-pair encoding, from its two files.

Radford et al. 2019, "Language Models are Unsupervised Multitask Learners", section 2.2. A pattern first cuts the text
into pretokens; within each, the adjacent pair with the lowest merge rank is joined until no merge is left.
"""

import hashlib
import re
from collections.abc import Iterator

import numpy as np

from megajax.config.errors import UserError
from megajax.config.optional_packages import require
from megajax.config.read_limits import parse_json
from megajax.tokenizers.base import BytePairTokenizer, before_last_blank, read_file
from megajax.tokenizers.config import GPT2TokenizerConfig

PRETOKEN = r"'(?:s|t|re|ve|m|ll|d)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"
"""Contractions; then letters, digits or other signs with at most one space before them; then the remaining blanks: a
run of blanks without its last one if something follows. Possessive where backtracking can't help, which is faster."""

RUN = 1 << 15
"""With runs of blanks of twice this many characters or more, the stack of the pattern's engine may overflow."""
BLANKS = re.compile("[\t-\r \x85\xa0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000]{1000,}")
"""A long run of characters that the pattern's `\\s` (Unicode White_Space) matches; narrower than Python's `\\s`."""


def printable_bytes() -> dict[str, int]:
    """Character that stands for a byte in GPT-2's files -> the byte.

    Visible characters of Latin-1 stand for themselves; the 68 other bytes, in order, are U+0100 and up.
    """
    visible = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    hidden = [value for value in range(256) if value not in visible]
    return {chr(value): value for value in visible} | {chr(0x100 + place): value for place, value in enumerate(hidden)}


class GPT2Tokenizer(BytePairTokenizer):
    """Ids equal to those of Hugging Face's byte-level BPE with the same files, at several times its speed.

    Any bytes survive a round trip: invalid UTF-8 ends the pretoken before it and becomes a token per byte. Special
    tokens that appear in the text are plain text, so no document can end itself.

    Raises:
        UserError: a missing or malformed file, a vocabulary without one of the 256 bytes or without `eod`, or the extra
            `tokenizers` not installed.
    """

    def __init__(self, config: GPT2TokenizerConfig):
        tiktoken = require("tiktoken", "The GPT-2 tokenizer")
        files = read_file(config.vocabulary, "GPT-2 vocabulary"), read_file(config.merges, "list of GPT-2 merges")
        vocabulary = _read_vocabulary(config.vocabulary, files[0])
        tokens = _ranked_tokens(config, vocabulary, files[1])
        if config.eod not in vocabulary:
            raise UserError(f"{config.vocabulary}: no token {config.eod!r}; set `eod` to the one that ends a document.")
        self.eod = vocabulary[config.eod]
        self.pad = None
        self.specials = {"eos": self.eod}
        self.vocabulary_size = max(vocabulary.values()) + 1
        digest = hashlib.sha256(b"".join(hashlib.sha256(file).digest() for file in files)).hexdigest()
        self.identity = f"gpt2:{digest[:16]}:eod={self.eod}"
        self._vocabulary = vocabulary
        self._ids = np.array([number for _, number in tokens], np.int32)
        table: list[bytes | None] = [None] * self.vocabulary_size
        for piece, number in [*((token.encode("utf-8"), number) for token, number in vocabulary.items()), *tokens]:
            table[number] = piece
        self.table = table
        self.byte_ids = np.zeros(256, np.int32)
        for piece, number in tokens[:256]:
            self.byte_ids[piece[0]] = number
        ranks = {piece: rank for rank, (piece, _) in enumerate(tokens)}
        self._engine = tiktoken.Encoding(
            self.identity, pat_str=PRETOKEN, mergeable_ranks=ranks, special_tokens={}, explicit_n_vocab=len(ranks)
        )

    def encode_text(self, text: str) -> np.ndarray:
        pieces = [self._engine.encode_to_numpy(piece, disallowed_special=()) for piece in _split_long_blanks(text)]
        return self._ids[np.concatenate(pieces) if len(pieces) > 1 else pieces[0]]

    def token_id(self, token: str) -> int | None:
        return self._vocabulary.get(token)

    def split_point(self, data: bytes) -> int:
        """No pretoken has a blank after another character, so each change to a blank is a border."""
        return before_last_blank(data)


def _read_vocabulary(path: str, data: bytes) -> dict[str, int]:
    try:
        vocabulary = parse_json(data.decode("utf-8"))
    except ValueError as error:
        raise UserError(f"{path}: this GPT-2 vocabulary is not JSON: {error}.") from error
    if not isinstance(vocabulary, dict) or not all(isinstance(number, int) for number in vocabulary.values()):
        raise UserError(f"{path}: a GPT-2 vocabulary maps each token to its id; this JSON does not.")
    tokens: dict[int, str] = {}
    for token, number in vocabulary.items():
        if tokens.setdefault(number, token) != token or number < 0:
            problem = f"{token!r} is negative" if number < 0 else f"{tokens[number]!r} is also that of {token!r}"
            raise UserError(f"{path}: the id {number} of {problem}. Give each token its own id, from 0 up.")
    return vocabulary


def _ranked_tokens(config: GPT2TokenizerConfig, vocabulary: dict[str, int], merges: bytes) -> list[tuple[bytes, int]]:
    """Bytes and id of every token of the encoding in order of rank: the 256 bytes, then the results of the merges."""
    byte_of = printable_bytes()
    for character, value in byte_of.items():
        if character not in vocabulary:
            problem = f"no token {character!r} for byte 0x{value:02x}; a byte-level vocabulary has all 256."
            raise UserError(f"{config.vocabulary}: {problem}")
    ranked = {
        bytes((byte_of[character],)): vocabulary[character] for character in sorted(byte_of, key=vocabulary.__getitem__)
    }
    try:
        lines = merges.decode("utf-8").split("\n")
    except UnicodeDecodeError as error:
        raise UserError(f"{config.merges}: this list of merges is not UTF-8: {error}.") from error
    for number, line in enumerate(lines, start=1):
        if not line.strip() or (number == 1 and line.startswith("#version")):
            continue
        pair = line.rstrip("\r").split(" ")
        token = "".join(pair)
        if len(pair) != 2 or token not in vocabulary or not byte_of.keys() >= set(token):
            expected = f"two tokens that form a token of {config.vocabulary}"
            raise UserError(f"{config.merges}, line {number}: {line[:60]!r} is not {expected}. Are these files a pair?")
        ranked.setdefault(bytes(byte_of[character] for character in token), vocabulary[token])
    return list(ranked.items())


def _split_long_blanks(text: str) -> Iterator[str]:
    """Pieces of the text, with each very long run of blanks as a separate piece; they tokenize as the whole text does.

    In the pattern, such a run is one pretoken without its last blank, which belongs to the following text, if any.
    """
    start = 0
    if any(text[place : place + RUN].isspace() for place in range(0, len(text) - RUN, RUN)):
        for run in BLANKS.finditer(text):
            end = run.end() if run.end() == len(text) else run.end() - 1
            yield text[start : run.start()]
            yield text[run.start() : end]
            start = end
    yield text[start:]
