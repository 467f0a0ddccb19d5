"""Log-probabilities in the formats of OpenAI's two routes."""

from codecs import getincrementaldecoder
from collections.abc import Iterable, Sequence
from typing import Any

from megajax.inference.request import TokenScore
from megajax.tokenizers.base import Tokenizer

MIN_LOGPROB = -9999.0
"""Replaces minus infinity, which JSON cannot express."""


class TokenTexts:
    """Text and bytes of single tokens."""

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer, self._table = tokenizer, tokenizer.table

    def data(self, token: int) -> bytes:
        """Bytes of a token; those of its text if the tokenizer has no table of bytes."""
        if self._table is not None:
            return (self._table[token] if token < len(self._table) else None) or b""
        return self._tokenizer.decode([token]).encode("utf-8") if token < self._tokenizer.vocabulary_size else b""

    def text(self, token: int) -> str:
        """Text of a token; `bytes:` and hexadecimal escapes for incomplete characters, like OpenAI."""
        data = self.data(token)
        try:
            return data.decode("utf-8")
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{value:02x}" for value in data)

    def offsets(self, tokens: Iterable[int], start: int = 0) -> list[int]:
        """Number of complete characters before each token."""
        decoder, offsets, at = getincrementaldecoder("utf-8")("replace"), [], start
        for token in tokens:
            offsets.append(at)
            at += len(decoder.decode(self.data(token)))
        return offsets


def finite(logprob: float) -> float:
    """A log-probability as a number that JSON can express."""
    return max(logprob, MIN_LOGPROB)


def completion_scores(
    texts: TokenTexts, tokens: Sequence[int], scores: Sequence[TokenScore | None], offset: int
) -> dict[str, Any]:
    """`logprobs` of /v1/completions. None is the score of the first token of a text, which has no prediction.

    Each entry of top_logprobs includes the token itself; of tokens with the same text, it has the most likely one.
    """
    tops: list[dict[str, float] | None] = []
    for score in scores:
        if score is None:
            tops.append(None)
            continue
        top: dict[str, float] = {}
        for token, logprob in (*score.top, (score.token, score.logprob)):
            text = texts.text(token)
            top[text] = max(finite(logprob), top.get(text, MIN_LOGPROB))
        tops.append(top)
    return {
        "tokens": [texts.text(token) for token in tokens],
        "token_logprobs": [None if score is None else finite(score.logprob) for score in scores],
        "top_logprobs": tops,
        "text_offset": texts.offsets(tokens, offset),
    }


def chat_scores(texts: TokenTexts, scores: Sequence[TokenScore]) -> dict[str, Any]:
    """`logprobs` of /v1/chat/completions."""

    def entry(token: int, logprob: float) -> dict[str, Any]:
        data = texts.data(token)
        return {"token": texts.text(token), "logprob": finite(logprob), "bytes": list(data)}

    content = [
        entry(score.token, score.logprob) | {"top_logprobs": [entry(token, logprob) for token, logprob in score.top]}
        for score in scores
    ]
    return {"content": content, "refusal": None}
