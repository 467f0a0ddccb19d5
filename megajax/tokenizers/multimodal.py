"""Tokens for images and other inputs, added to a tokenizer of text."""

import hashlib
import re
from collections.abc import Sequence
from copy import copy
from itertools import accumulate, groupby

import numpy as np

from megajax.config.compose import problems_of
from megajax.config.errors import ConfigError
from megajax.tokenizers.base import Tokenizer, check_ids, join_spans
from megajax.tokenizers.config import MultimodalTokenizerConfig


class MultimodalTokenizer(Tokenizer):
    """A tokenizer of text with special tokens, which follow its vocabulary unless they are in it.

    Text is cut at the tokens, and the parts between them are encoded separately. `specials` has the roles of the
    tokenizer of the text and those of the config.

    Raises:
        ConfigError: tokens that are empty, have blanks in them, or are given twice.
        UserError: of the text's tokenizer.
    """

    def __init__(self, config: MultimodalTokenizerConfig):
        if problems := problems_of(config):
            raise ConfigError(problems)
        self.base: Tokenizer = config.base.build()
        self.vocabulary_size, self.specials = self.base.vocabulary_size, dict(self.base.specials)
        self._names: dict[int, str] = {}
        for role, token in {"image": config.image, **config.added}.items():
            number = self.base.token_id(token)
            if number is None:
                number, self.vocabulary_size = self.vocabulary_size, self.vocabulary_size + 1
            self.specials[role], self._names[number] = number, token
        self.eod, self.pad = self.base.eod, self.base.pad
        self.prefix, self.suffix, self.ends = self.base.prefix, self.base.suffix, self.base.ends
        self.sentinels, self.continues = self.base.sentinels, self.base.continues
        if self.continues is not None:
            self.continues = np.append(self.continues, np.zeros(self.vocabulary_size - len(self.continues), bool))
        self._ids = {token.encode(): number for number, token in self._names.items()}
        self._after = self.base.after_special()
        # Longer tokens first, since a token may be a prefix of another. The text's tokenizer finds its own.
        cuts = sorted((name for name in self._ids if name.decode() not in self.base.controls()), key=len, reverse=True)
        self._cuts = re.compile(b"(" + (b"|".join(map(re.escape, cuts)) or b"(?!)") + b")")
        digest = hashlib.sha256(repr(sorted(self._ids.items())).encode()).hexdigest()
        self.identity = f"{self.base.identity}:multimodal={digest[:8]}"

    def encode_bytes(self, data: bytes) -> np.ndarray:
        parts = [
            np.array([self._ids[part]], np.int32)
            if place % 2
            else (self._after if place else self.base).encode_bytes(part)
            for place, part in enumerate(self._cuts.split(data))
            if part
        ]
        return np.concatenate(parts) if parts else np.zeros(0, np.int32)

    def encode_spans(self, text: str) -> tuple[np.ndarray, np.ndarray]:
        parts = [
            part.decode("utf-8", "surrogatepass") for part in self._cuts.split(text.encode("utf-8", "surrogatepass"))
        ]
        starts = accumulate(map(len, parts), initial=0)
        return join_spans(
            (start, np.array([self._ids[part.encode()]], np.int32), np.array([[0, len(part)]]))
            if place % 2
            else (start, *(self._after if place else self.base).encode_spans(part))
            for place, (start, part) in enumerate(zip(starts, parts, strict=False))
            if part
        )

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        runs = groupby(check_ids(ids, self.vocabulary_size), key=self._names.get)
        return "".join(self.base.decode(list(run)) if name is None else name * len(list(run)) for name, run in runs)

    def token_id(self, token: str) -> int | None:
        number = self._ids.get(token.encode())
        return self.base.token_id(token) if number is None else number

    def controls(self) -> dict[str, int]:
        return {**self.base.controls(), **{name: number for number, name in self._names.items()}}

    def after_special(self) -> Tokenizer:
        twin = copy(self)
        twin.base = self._after
        return twin

    def plain(self) -> Tokenizer:
        """The tokenizer of the text, whose ids are a subset of these."""
        return self.base.plain()

    def split_point(self, data: bytes) -> int:
        """The text tokenizer's split point, or an earlier one if a token may cross it."""
        place = self.base.split_point(data)
        longest = max(map(len, self._ids))
        for start in range(max(0, place - longest + 1), place):
            following = data[start : start + longest]
            if any(start + len(token) > place and token.startswith(following[: len(token)]) for token in self._ids):
                return self.split_point(data[:start])
        return place
