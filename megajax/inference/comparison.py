"""How far the answers of two versions of a model are apart on a text, such as before and after quantization."""

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
    """Between a model and one that was made of it, over the tokens of a text."""

    tokens: int
    """Predicted ones."""
    largest_logit_difference: float
    mean_logit_difference: float
    """Of magnitudes, over tokens and vocabulary."""
    kl_divergence: float
    """Mean of KL(before || after) over tokens, in nats."""
    same_likeliest: float
    """Share of tokens whose likeliest next token is the same."""
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
        raise UserError(f"a text of {len(tokens)} tokens is too short: give one of a few thousand")
    rows = len(tokens) // length
    return tokens[: rows * length].reshape(rows, length)


def compare(before: LayerByLayer, after: LayerByLayer, tokens: np.ndarray, *, rows: int) -> Difference:
    """tokens: int32 [B, S]; every token but the first of each row is predicted. rows: rows of a forward pass."""
    states = [model.states(tokens, rows=rows) for model in (before, after)]
    sums: list[Sequence[Array]] = []
    for place, (x, y) in enumerate(zip(*states, strict=True)):
        part = tokens[place * rows : (place + 1) * rows]
        for row in range(len(part)):  # logits of one row at a time
            ends = slice(row, row + 1)
            sums.append(_sums(before.logits(x[ends]), after.logits(y[ends]), jnp.asarray(part[ends])))
    largest, *totals = (np.asarray(each, np.float64) for each in zip(*sums, strict=True))
    count = tokens.shape[0] * (tokens.shape[1] - 1)
    mean, kl, same, first, second = (float(each.sum() / count) for each in totals)
    return Difference(
        tokens=count,
        largest_logit_difference=float(largest.max()),
        mean_logit_difference=mean,
        kl_divergence=kl,
        same_likeliest=same,
        loss_before=first,
        loss_after=second,
    )


@jax.jit
def _sums(before: Array, after: Array, tokens: Array) -> tuple[Array, ...]:
    """Of logits [B, S, V] at all but the last position."""
    before, after, labels = before[:, :-1], after[:, :-1], tokens[:, 1:, None]
    distance, (p, q) = jnp.abs(before - after), (jax.nn.log_softmax(each) for each in (before, after))
    return (
        distance.max(),
        distance.mean(-1).sum(),
        (jnp.exp(p) * (p - q)).sum(),
        (before.argmax(-1) == after.argmax(-1)).sum(),
        *(-jnp.take_along_axis(each, labels, -1).sum() for each in (p, q)),
    )
