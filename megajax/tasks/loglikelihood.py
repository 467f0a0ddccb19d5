"""Log-likelihoods of continuations, each after its context."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from megajax.config.errors import UserError
from megajax.tokenizers.base import Tokenizer, start_token, with_prefix
from megajax.training.scoring import Figure, Scorer, Window


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
    truncated: bool
    """Whether the context lost tokens."""


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


def log_likelihoods(scorer: Scorer, requests: Sequence[Request]) -> list[LogLikelihood]:
    """In the order of the requests. Contexts that do not fit lose tokens at their beginning.

    Raises UserError for an empty continuation or one that is longer than a row.
    """
    windows = [_window(request, scorer.length) for request in requests]
    return [
        LogLikelihood(
            value=answer.log_probability,
            greedy=answer.right == window.counted,
            tokens=window.counted,
            truncated=len(window.tokens) < len(request.context) + len(request.continuation),
        )
        for request, window, answer in zip(requests, windows, scorer.answers(windows), strict=True)
    ]


def _window(request: Request, length: int) -> Window:
    """The last `length` + 1 tokens of a request."""
    counted = len(request.continuation)
    if not 0 < counted <= length:
        raise UserError(f"a continuation has {counted} tokens, the model scores 1 to {length}")
    tokens = np.concatenate([request.context, request.continuation]).astype(np.int32)
    return Window(tokens[-(length + 1) :], counted)


def truncated_contexts(count: int) -> dict[str, Figure]:
    """The figure of contexts that lost tokens, if there are any."""
    return {"truncated_contexts": Figure(count)} if count else {}


def demand_ids(tokens: np.ndarray, scorer: Scorer, what: str) -> None:
    """Raises UserError for an id of `tokens`, int [N], that the model does not have."""
    below = scorer.program.cfg.model.schema()["tokens"].below
    least, largest = int(tokens.min()), int(tokens.max())
    if least < 0 or (below is not None and largest >= below):
        ids = "0 or more" if below is None else f"0 to {below - 1}"
        raise UserError(
            f"{what} has token {least if least < 0 else largest}, the model's ids are {ids}: it was made with another "
            "tokenizer. Prepare it with the run's tokenizer."
        )
