"""Comparison of two versions of a model on a text, for example before and after quantization."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import exp

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from megajax.config.errors import UserError
from megajax.inference.layerwise import LayerByLayer
from megajax.tokenizers.base import Tokenizer


@dataclass(frozen=True, kw_only=True, slots=True)
class Difference:
    """Difference between a model and a version derived from it, over the tokens of a text."""

    tokens: int
    """Number of predicted tokens."""
    largest_logit_difference: float
    mean_logit_difference: float
    """Mean magnitude over tokens and vocabulary."""
    kl_divergence: float
    """Mean of KL(before || after) over tokens, in nats."""
    same_likeliest: float
    """Share of tokens for which both have the same most likely next token."""
    loss_before: float
    """Mean negative log-likelihood of the text's tokens, in nats."""
    loss_after: float

    @property
    def perplexity_before(self) -> float:
        return exp(self.loss_before)

    @property
    def perplexity_after(self) -> float:
        return exp(self.loss_after)


def text_rows(tokenizer: Tokenizer, text: str, *, length: int, most: int) -> np.ndarray:
    """The first tokens of a text as rows int32 [B, S] of at most `length`, and at most `most` tokens in all.

    Raises UserError for a text of fewer than two tokens.
    """
    tokens = np.asarray(tokenizer.encode(text[: 16 * most]), np.int32)[:most]
    length = min(length, len(tokens))
    if length < 2:
        raise UserError(f"a text of {len(tokens)} tokens is too short: give a few thousand tokens")
    rows = len(tokens) // length
    return tokens[: rows * length].reshape(rows, length)


def compare(before: LayerByLayer, after: LayerByLayer, tokens: np.ndarray, *, rows: int) -> Difference:
    """tokens: int32 [B, S]; every token but the first of each row is predicted. rows: rows of a forward pass."""
    states = [model.states(tokens, rows=rows) for model in (before, after)]
    sums: list[Sequence[Array]] = []
    for place, (x, y) in enumerate(zip(*states, strict=True)):
        part = tokens[place * rows : (place + 1) * rows]
        for row in range(len(part)):  # logits of one row at a time
            row_slice = slice(row, row + 1)
            sums.append(_sums(before.logits(x[row_slice]), after.logits(y[row_slice]), jnp.asarray(part[row_slice])))
    largest, *totals = (np.asarray(values, np.float64) for values in zip(*sums, strict=True))
    count = tokens.shape[0] * (tokens.shape[1] - 1)
    mean, kl, agreements, first, second = (float(values.sum() / count) for values in totals)
    return Difference(
        tokens=count,
        largest_logit_difference=float(largest.max()),
        mean_logit_difference=mean,
        kl_divergence=kl,
        same_likeliest=agreements,
        loss_before=first,
        loss_after=second,
    )


@jax.jit
def _sums(before: Array, after: Array, tokens: Array) -> tuple[Array, ...]:
    """Sums of the differences of logits [B, S, V], over all but the last position."""
    before, after, labels = before[:, :-1], after[:, :-1], tokens[:, 1:, None]
    distance, (p, q) = jnp.abs(before - after), (jax.nn.log_softmax(values) for values in (before, after))
    return (
        distance.max(),
        distance.mean(-1).sum(),
        (jnp.exp(p) * (p - q)).sum(),
        (before.argmax(-1) == after.argmax(-1)).sum(),
        *(-jnp.take_along_axis(values, labels, -1).sum() for values in (p, q)),
    )
