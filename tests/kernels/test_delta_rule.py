"""The gated delta rule: a loop in float64, the recurrence, and matmuls over chunks."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from recurrences import check_gradients, check_isolation

from megajax.kernels.ssm.chunks import runs_of
from megajax.kernels.ssm.gated_delta import (
    DeltaRule,
    gated_delta,
    gated_delta_reference,
    gated_delta_transition,
    unit_lower_inverse,
)

ROWS, HEADS, GROUPS, KEYS, SIZE = 2, 4, 2, 6, 5
DIFFERENTIATED = ("q", "k", "v", "g", "beta", "state")
MOVING = DIFFERENTIATED[:5]


def inputs(length: int, *, repeated: bool = False) -> dict[str, np.ndarray]:
    """Some decays are exp(-20). repeated: one key, and corrections of up to twice the error."""
    rng = np.random.default_rng(length)
    k = rng.normal(size=(ROWS, 1 if repeated else length, GROUPS, KEYS))
    k = np.broadcast_to(k / np.linalg.norm(k, axis=-1, keepdims=True), (ROWS, length, GROUPS, KEYS))
    g = -rng.exponential(0.01 if repeated else 0.3, size=(ROWS, length, HEADS))
    values = {
        "q": rng.normal(size=k.shape),
        "k": k,
        "v": rng.normal(size=(ROWS, length, HEADS, SIZE)),
        "g": np.where(rng.random(g.shape) < 0.05, -20.0, g),
        "beta": rng.uniform(0, 2 if repeated else 1, size=g.shape),
        "state": rng.normal(size=(ROWS, HEADS, KEYS, SIZE)),
    }
    return {name: value.astype(np.float32) for name, value in values.items()}


def segments(length: int) -> np.ndarray:
    """Three documents a row, and a repeated id: a new document all the same."""
    first, second = length // 5, length // 2 + 3
    return np.array([[1] * first + [2] * (second - first) + [1] * (length - second)] * ROWS, np.int32)


def looped(arrays: dict[str, np.ndarray], ids: np.ndarray | None) -> tuple[np.ndarray, np.ndarray]:
    """One position of one head after another, in float64."""
    q, k, v, g, beta, state = (arrays[name].astype(np.float64) for name in DIFFERENTIATED)
    y, share = np.zeros(v.shape), HEADS // GROUPS
    for row, t, n in np.ndindex(*v.shape[:3]):
        if ids is not None and t and ids[row, t] != ids[row, t - 1]:
            state[row, n] = 0
        key = k[row, t, n // share]
        decayed = np.exp(g[row, t, n])[..., None] * state[row, n]
        state[row, n] = decayed + beta[row, t, n] * np.outer(key, v[row, t, n] - key @ decayed)
        y[row, t, n] = q[row, t, n // share] @ state[row, n] / KEYS**0.5
    return y, state


def ruled(arrays, ids, of, **options):
    return of(DeltaRule(**arrays, runs=None if ids is None else runs_of(jnp.asarray(ids))), **options)


@pytest.mark.parametrize(
    ("length", "chunk", "isolated", "repeated"),
    [
        (1, 64, False, False),
        (70, 32, True, True),
        pytest.param(75, 64, False, False, marks=pytest.mark.slow),
    ],
)
def test_chunks_and_recurrence_match_a_float64_loop(length, chunk, isolated, repeated):
    arrays, ids = inputs(length, repeated=repeated), segments(length) if isolated else None
    expected = looped(arrays, ids)
    for of, options in ((gated_delta_reference, {}), (gated_delta, {"chunk": chunk})):
        y, state = jax.jit(partial(ruled, of=of, **options))(arrays, ids)
        np.testing.assert_allclose(y, expected[0], rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(state, expected[1], rtol=1e-5, atol=1e-5)


def test_decays_by_channel_match_a_float64_loop():
    """Gradients are those of the recurrence, and equal decays of all channels are one number."""
    length = 50
    arrays, ids = inputs(length), segments(length)
    equal = {**arrays, "g": np.repeat(arrays["g"][..., None], KEYS, axis=-1)}
    varied = {**arrays, "g": equal["g"] * np.random.default_rng(0).uniform(0, 2, size=KEYS).astype(np.float32)}
    expected = looped(varied, ids)

    @partial(jax.jit, static_argnums=0)
    def run(of, arrays):
        def loss(arrays):
            y, state = ruled(arrays, ids, of)
            return jnp.sum(jnp.sin(y)) + jnp.sum(jnp.cos(state)), (y, state)

        return jax.value_and_grad(loss, has_aux=True)(arrays)

    chunks = partial(gated_delta, chunk=48)
    (_, found), gradients = run(chunks, varied)
    for actual, wanted in zip(found, expected, strict=True):
        np.testing.assert_allclose(actual, wanted, rtol=1e-5, atol=1e-5)
    _, recurrent = run(gated_delta_reference, varied)
    for name, gradient in gradients.items():
        np.testing.assert_allclose(gradient, recurrent[name], rtol=1e-5, atol=1e-5, err_msg=name)
    one = jax.jit(partial(ruled, of=chunks))(arrays, ids)[0]
    np.testing.assert_allclose(run(chunks, equal)[0][1][0], one, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
def test_gradients_of_chunks_equal_those_of_the_recurrence():
    run = partial(ruled, ids=segments(70))
    chunks, recurrence = partial(run, of=gated_delta, chunk=32), partial(run, of=gated_delta_reference)
    check_gradients(inputs(70, repeated=True), "v", chunks, recurrence)


def test_a_document_is_bitwise_independent_of_its_neighbours():
    def run(arrays, ids):
        return ruled(arrays, ids, gated_delta, chunk=32)[0]

    check_isolation(inputs(70), MOVING, run, {"k": 1, "beta": 1})


def test_a_row_transforms_the_state_before_it():
    """The first row is one document; the second one starts another, which forgets the state."""
    arrays, ids = inputs(40), np.array([[1] * 40, [1] * 30 + [2] * 10], np.int32)
    transition, added = jax.jit(partial(ruled, of=gated_delta_transition, chunk=16))(arrays, ids)
    last = np.einsum("bnkl,bnlv->bnkv", transition, arrays["state"]) + added
    np.testing.assert_allclose(last, looped(arrays, ids)[1], rtol=1e-5, atol=1e-5)
    assert np.all(transition[1] == 0) and np.any(transition[0] != 0)


def test_inverses_of_triangles():
    """One matrix has ones below the diagonal, whose powers grow to 1e8."""
    rng, size = np.random.default_rng(0), 32
    below = np.stack([np.ones((size, size)), rng.normal(0, 0.3, (size, size))])
    below = np.tril(below, -1).astype(np.float32)
    expected = np.linalg.inv(below.astype(np.float64) + np.eye(size))
    weights = rng.normal(size=below.shape).astype(np.float32)
    inverse, pull = jax.vjp(unit_lower_inverse, below)
    np.testing.assert_allclose(inverse, expected, rtol=1e-5, atol=1e-5)
    transposed = expected.swapaxes(1, 2)
    (gradient,) = pull(weights)
    np.testing.assert_allclose(gradient, -np.tril(transposed @ weights @ transposed, -1), rtol=1e-5, atol=1e-4)
