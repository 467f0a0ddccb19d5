"""Sums over the tokens of answers in packed rows, which may be cut over the mesh axis `context`.

B rows, S positions on this device, G groups of answers in a row, K kinds of answers in a group, such as the chosen and
the rejected answer of a pair.
"""

from functools import cached_property

import jax
import jax.numpy as jnp
from jax import Array, lax

from megajax.mesh.mesh import manual_axes


@jax.custom_vjp
def over_context(x: Array) -> Array:
    """The sum over the devices that hold parts of the same rows; so is its cotangent."""
    return lax.psum(x, "context") if manual_axes().get("context", 1) > 1 else x


over_context.defvjp(lambda x: (over_context(x), None), lambda _, dy: (over_context(dy),))


class AnswerTokens:
    """The answers of a microbatch.

    Attributes:
        numbers: int32 [B, S]: 0 where the label belongs to no answer, else 1 + K * group + kind.
        inside: bool [B, S]: whether the label belongs to an answer.
    """

    def __init__(self, numbers: Array, kinds: int):
        self.numbers, self.inside, self._kinds = numbers, numbers > 0, kinds
        self._parts = manual_axes().get("context", 1)
        # An answer follows a prompt of at least one token.
        self._groups = max(1, numbers.shape[1] * self._parts // 2)

    def sums(self, x: Array) -> list[Array]:
        """Float32 [B, S] -> for each kind the sums over the tokens of answers [B, G]."""

        def of_row(x: Array, numbers: Array) -> Array:
            return jnp.zeros(1 + self._groups * self._kinds, x.dtype).at[numbers].add(x)

        totals = over_context(jax.vmap(of_row)(x, self.numbers)[:, 1:])
        return [*jnp.moveaxis(totals.reshape(len(x), self._groups, self._kinds), -1, 0)]

    def spread(self, *kinds: Array) -> Array:
        """For each kind a number of each answer [B, G] -> the numbers at the answers' tokens [B, S], 0 elsewhere."""
        values = jnp.stack(kinds, axis=-1).reshape(len(kinds[0]), -1)
        return jnp.take_along_axis(jnp.pad(values, ((0, 0), (1, 0))), self.numbers, axis=1)

    @cached_property
    def tokens(self) -> list[Array]:
        """For each kind the tokens of answers, float32 [B, G]; 0 for answers that a group lacks."""
        return self.sums(self.inside.astype(jnp.float32))

    def first_positions(self, positions: Array) -> Array:
        """int32 [B, S] -> the position of the first token of each token's answer [B, S]; 0 outside answers."""
        size, last = 1 + self._groups * self._kinds, jnp.iinfo(jnp.int32).max

        def of_row(positions: Array, numbers: Array) -> Array:
            return jnp.full(size, last, jnp.int32).at[numbers].min(positions)

        first = jax.vmap(of_row)(positions, self.numbers)
        first = lax.pmin(first, "context") if self._parts > 1 else first
        return jnp.where(self.inside, jnp.take_along_axis(first, self.numbers, axis=1), 0)

    def total(self, of_answers: Array) -> Array:
        """Numbers of answers of any shape -> this device's part of their sum []; parts are added up over `context`."""
        return jnp.sum(of_answers) / self._parts

    def token_total(self, x: Array) -> Array:
        """Numbers of tokens [B, S] -> this device's part of their sum over answers []."""
        return jnp.sum(jnp.where(self.inside, x, 0))


def mean_of(total: Array, count: Array) -> Array:
    """total / count, 0 where count is 0; differentiable."""
    return jnp.where(count > 0, total / jnp.maximum(count, 1), 0)
