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
    """The log-likelihood of a continuation."""

    value: float
    """Log-probability of the continuation, in nats."""
    greedy: bool
    """Whether each of its tokens is the most likely one."""
    tokens: int
    truncated: bool
    """Whether the context lost tokens."""


def encode_pair(tokenizer: Tokenizer, context: str, continuation: str) -> Request:
    """The ids of both texts, split as in lm-eval.

    The texts are encoded together, so that a token may include the space before a word; spaces at the end of the
    context belong to the continuation. The tokenizer's prefix comes first; an empty context becomes `start_token`.
    """
    stripped = context.rstrip()
    if not stripped:
        tokens = tokenizer.encode(context + continuation)
        return Request(np.array([start_token(tokenizer)], np.int32), tokens)
    tokens, prefix = with_prefix(tokenizer, context + continuation), with_prefix(tokenizer, stripped)
    return Request(tokens[: len(prefix)], tokens[len(prefix) :])


def log_likelihoods(scorer: Scorer, requests: Sequence[Request]) -> list[LogLikelihood]:
    """The log-likelihoods in the order of the requests. Contexts that do not fit are truncated at their beginning.

    Raises UserError for a continuation that is empty or longer than a row.
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
    count = len(request.continuation)
    if not 0 < count <= length:
        raise UserError(f"a continuation has {count} tokens, but the model scores 1 to {length}")
    tokens = np.concatenate([request.context, request.continuation]).astype(np.int32)
    return Window(tokens[-(length + 1) :], count)


def truncated_contexts(count: int) -> dict[str, Figure]:
    """The figure of contexts that lost tokens, if there are any."""
    return {"truncated_contexts": Figure(count)} if count else {}


def demand_ids(tokens: np.ndarray, scorer: Scorer, owner: str) -> None:
    """Raises UserError for an id of `tokens`, int [N], that the model does not have."""
    below = scorer.program.cfg.model.schema()["tokens"].below
    least, largest = int(tokens.min()), int(tokens.max())
    if least < 0 or (below is not None and largest >= below):
        ids = "0 or more" if below is None else f"0 to {below - 1}"
        raise UserError(
            f"{owner} has token {least if least < 0 else largest}, but the model's ids are {ids}: it comes from "
            "another tokenizer. Prepare it with the run's tokenizer."
        )
