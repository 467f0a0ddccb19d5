"""The token embedding and the vocabulary head, with gradients, on every layout against plain indexing."""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from megajax.kernels.cross_entropy import CROSS_ENTROPY
from megajax.layers.embedding import embed, vocabulary_loss, vocabulary_token_scores
from megajax.mesh.config import ParallelConfig
from megajax.mesh.layout import Layout
from megajax.mesh.mesh import build_mesh
from megajax.mesh.sharding_rules import Plan

ROWS, LENGTH, HIDDEN, PADDED, SIZE = 4, 6, 8, 32, 27


class Given(NamedTuple):
    table: np.ndarray
    head: np.ndarray
    tokens: np.ndarray
    labels: np.ndarray
    weights: np.ndarray
    dy: np.ndarray
    """A cotangent of the embedding's output."""


class Found(NamedTuple):
    embedded: jax.Array
    loss: jax.Array
    log_p: jax.Array
    likeliest: jax.Array
    dtable: jax.Array
    dhead: jax.Array


@pytest.fixture(scope="module")
def given() -> Given:
    rng = np.random.default_rng(0)
    table, head = rng.normal(size=(2, PADDED, HIDDEN)).astype(np.float32)
    # Few different tokens, so that many gradients meet in one row of the table.
    tokens = rng.choice([0, 3, 15, 16, 26], (ROWS, LENGTH)).astype(np.int32)
    labels = rng.integers(0, SIZE, (ROWS, LENGTH)).astype(np.int32)
    weights = (rng.random((ROWS, LENGTH)) < 0.7).astype(np.float32)
    return Given(table, head, tokens, labels, weights, rng.normal(size=(ROWS, LENGTH, HIDDEN)).astype(np.float32))


def on_layout(layout: Layout, given: Given) -> Found:
    def total(table, head):
        x = embed(layout, table, given.tokens)
        gathered = layout.act(x, "batch", "seq", "embed")
        loss = vocabulary_loss(layout, SIZE, 5, CROSS_ENTROPY, gathered, head, given.labels, given.weights).minimised
        scores = vocabulary_token_scores(layout, SIZE, 5, *map(jax.lax.stop_gradient, (gathered, head)), given.labels)
        return 0.5 * loss + jnp.sum(x * given.dy), (x, loss, *scores)

    (_, reported), gradients = jax.value_and_grad(total, (0, 1), has_aux=True)(given.table, given.head)
    return Found(*reported, *gradients)


def plain(given: Given) -> Found:
    def total(table, head):
        x = table[given.tokens]
        log_p = jax.nn.log_softmax(x @ head[:SIZE].T)
        label_log_p = jnp.take_along_axis(log_p, given.labels[..., None], -1)[..., 0]
        loss = -jnp.sum(label_log_p * given.weights)
        return 0.5 * loss + jnp.sum(x * given.dy), (x, loss, label_log_p, log_p.argmax(-1))

    (_, reported), gradients = jax.value_and_grad(total, (0, 1), has_aux=True)(given.table, given.head)
    return Found(*reported, *gradients)


@pytest.fixture(scope="module")
def expected(given) -> Found:
    with jax.default_matmul_precision("highest"):
        return jax.jit(plain)(given)


LAYOUTS = [
    ParallelConfig(data=1, tensor=2),
    ParallelConfig(data=2, tensor=2, sequence=True),
]


@pytest.mark.parametrize("parallel", LAYOUTS, ids=lambda p: f"data{p.data}-tensor{p.tensor}-sequence{p.sequence:d}")
def test_equal_to_plain_indexing_on_every_layout(given, expected, parallel):
    layout = Layout(Plan.of(parallel))
    with jax.set_mesh(build_mesh(parallel)), jax.default_matmul_precision("highest"):
        actual = jax.jit(partial(on_layout, layout))(given)
    np.testing.assert_array_equal(actual.embedded, expected.embedded)
    np.testing.assert_array_equal(actual.likeliest, expected.likeliest)
    for name in ("loss", "log_p", "dtable", "dhead"):
        np.testing.assert_allclose(getattr(actual, name), getattr(expected, name), rtol=1e-5, atol=1e-5, err_msg=name)
    assert not np.any(actual.dhead[SIZE:])


def test_equal_without_a_mesh_too(given, expected):
    actual = on_layout(Layout(Plan.of(ParallelConfig())), given)
    for array, reference in zip(actual, expected, strict=True):
        np.testing.assert_allclose(array, reference, rtol=1e-5, atol=1e-5)


def test_bfloat16_tables_sum_their_gradients_in_float32():
    """512 ones and one 1: bfloat16 cannot count beyond 256."""
    layout = Layout(Plan.of(ParallelConfig()))
    table = jnp.zeros((4, 1), jnp.bfloat16)
    tokens = jnp.zeros((1, 512), jnp.int32)
    gradient = jax.grad(lambda table: jnp.sum(embed(layout, table, tokens)).astype(jnp.float32))(table)
    assert gradient.dtype == jnp.bfloat16
    assert float(gradient[0, 0]) == 512
