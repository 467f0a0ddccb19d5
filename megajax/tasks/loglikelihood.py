"""Log-likelihoods of continuations, each after its context."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from megajax.config.errors import UserError
from megajax.tokenizers.base import Tokenizer, start_token, with_prefix
from megajax.training.scoring import Scorer, Window


class Request(NamedTuple):
    """Token ids, int32 [C] and [N], neither empty."""

    context: np.ndarray
    continuation: np.ndarray


class LogLikelihood(NamedTuple):
    """What a model says of a continuation."""

    value: float
    """Its log-probability, in nats."""
    greedy: bool
    """Whether each of its tokens is the likeliest one."""
    tokens: int


def encode_pair(tokenizer: Tokenizer, context: str, continuation: str) -> Request:
    """The ids of both texts, as lm-eval cuts them apart.

    The texts are encoded together, so that a token may begin with the blank before it; blanks at the end of the context
    belong to the continuation. The tokenizer's prefix comes first; without a context, `start_token` alone.
    """
    kept = context.rstrip()
    if not kept:
        whole = tokenizer.encode(context + continuation)
        return Request(np.array([start_token(tokenizer)], np.int32), whole)
    whole, before = with_prefix(tokenizer, context + continuation), with_prefix(tokenizer, kept)
    return Request(whole[: len(before)], whole[len(before) :])


class LogLikelihoods:
    """Log-likelihoods of requests by one model, and of which of them the context was longer than it reads."""

    def __init__(self, scorer: Scorer):
        self._scorer, self.truncated = scorer, list[bool]()

    def __call__(self, requests: Sequence[Request]) -> list[LogLikelihood]:
        """In the order of the requests. Contexts that do not fit lose tokens at their beginning.

        Raises UserError for an empty continuation or one that is longer than a row.
        """
        asked = [self.window(request) for request in requests]
        self.truncated = [
            len(window.tokens) < len(request.context) + len(request.continuation)
            for window, request in zip(asked, requests, strict=True)
        ]
        return [
            LogLikelihood(answer.log_probability, answer.right == window.counted, window.counted)
            for window, answer in zip(asked, self._scorer.answers(asked), strict=True)
        ]

    def window(self, request: Request) -> Window:
        """The window of a request: its last `length` + 1 tokens."""
        counted, length = len(request.continuation), self._scorer.length
        if not 0 < counted <= length:
            raise UserError(f"a continuation has {counted} tokens, the model scores 1 to {length}")
        tokens = np.concatenate([request.context, request.continuation]).astype(np.int32)
        return Window(tokens[-(length + 1) :], counted)
