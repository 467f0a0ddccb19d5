"""The weight of a batch's labels is taken from its rows, without the loss."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np

from megajax.training.gradients.position_weights import counted_positions, labels_weight

ROWS = {"tokens": jnp.ones((2, 4), jnp.int32), "loss_mask": jnp.array([[0.5, 0, 0.25, 0], [0, 0, 0, 1]])}
TABLE = {"table": jnp.ones((5, 3))}


@jax.custom_vjp
def together(x: jax.Array, weights: jax.Array) -> tuple[jax.Array, jax.Array]:
    """A call in which the tracer can't tell what depends on what."""
    return jnp.sum(x), jnp.sum(weights)


together.defvjp(lambda x, weights: (together(x, weights), None), lambda _, dy: (None, None))


def weight(head) -> tuple[float, int]:
    """The weight, and the number of multiplications of matrices in its computation."""
    section = SimpleNamespace(
        context=lambda rows: None,
        embed=lambda shared, rows: shared["table"][rows["tokens"]],
        enter=lambda shared, x, ctx, memory: x,
        leave=None,
    )
    parts = SimpleNamespace(sections=[section], head=head)
    traced = jax.make_jaxpr(lambda rows: labels_weight(parts, TABLE)(rows))(ROWS)
    return float(labels_weight(parts, TABLE)(ROWS)), str(traced).count("dot_general")


def test_the_loss_is_not_computed():
    def head(shared, x, rows, scale=1.0):
        jax.debug.print("{}", x)  # an effect, but no part of the weight
        total = jnp.sum((x @ shared["table"].T) ** 2)
        return total, (total, jnp.sum(rows["loss_mask"]), {})

    assert weight(head) == (1.75, 0)


def test_where_the_tracer_cannot_tell_the_output_is_zeros():
    def head(shared, x, rows, scale=1.0):
        total, count = together(x @ shared["table"].T, rows["loss_mask"])
        return total, (total, count, {})

    assert weight(head)[0] == 1.75


def test_padding_is_not_counted():
    positions, padding = jnp.zeros((2, 4), jnp.int32), jnp.asarray(np.arange(4) >= np.array([[3], [2]]))
    for marked, count in ((None, 8), (padding, 5)):
        ctx = SimpleNamespace(positions=positions, padding=marked)
        np.testing.assert_array_equal(counted_positions(lambda rows, ctx=ctx: ctx)(ROWS), count)
