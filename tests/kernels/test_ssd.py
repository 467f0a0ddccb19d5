"""The recurrences of Mamba-2 and Mamba: loops in float64, lax.scan, and matmuls over chunks."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from recurrences import check_gradients, check_isolation

from megajax.kernels.ssm.chunks import runs_of
from megajax.kernels.ssm.selective_scan import SelectiveScan, selective_scan
from megajax.kernels.ssm.ssd import Scan, ssd, ssd_reference

ROWS, HEADS, SIZE, GROUPS, STATES = 2, 4, 3, 2, 5
DIFFERENTIATED = ("x", "dt", "a", "b", "c", "skip", "state")


def inputs(length: int, *, steepest: float = 16.0) -> dict[str, np.ndarray]:
    """steepest: of the rates of decay; steps are between 0.001 and 0.1, some of them 5."""
    rng = np.random.default_rng(length)
    dt = np.exp(rng.uniform(np.log(1e-3), np.log(0.1), (ROWS, length, HEADS)))
    values = {
        "x": rng.normal(size=(ROWS, length, HEADS, SIZE)),
        "dt": np.where(rng.random(dt.shape) < 0.05, 5.0, dt),
        "a": -np.linspace(1, steepest, HEADS),
        "b": rng.normal(size=(ROWS, length, GROUPS, STATES)),
        "c": rng.normal(size=(ROWS, length, GROUPS, STATES)),
        "skip": rng.normal(size=HEADS),
        "state": rng.normal(size=(ROWS, HEADS, SIZE, STATES)),
    }
    return {name: value.astype(np.float32) for name, value in values.items()}


def segments(length: int) -> np.ndarray:
    """Three documents a row, and a repeated id: a new document all the same."""
    rng = np.random.default_rng(length + 1)
    rows = []
    for _ in range(ROWS):
        first, second = sorted(rng.choice(np.arange(1, length), 2, replace=False))
        rows.append([1] * first + [2] * (second - first) + [1] * (length - second))
    return np.array(rows, np.int32)


def looped(arrays: dict[str, np.ndarray], ids: np.ndarray | None) -> tuple[np.ndarray, np.ndarray]:
    """One position of one head after another, in float64."""
    x, dt, a, b, c, skip, state = (arrays[name].astype(np.float64) for name in DIFFERENTIATED)
    y, share = np.zeros(x.shape), HEADS // GROUPS
    for row, t, n in np.ndindex(*x.shape[:3]):
        if ids is not None and t and ids[row, t] != ids[row, t - 1]:
            state[row, n] = 0
        update = dt[row, t, n] * np.outer(x[row, t, n], b[row, t, n // share])
        state[row, n] = np.exp(dt[row, t, n] * a[n]) * state[row, n] + update
        y[row, t, n] = state[row, n] @ c[row, t, n // share] + skip[n] * x[row, t, n]
    return y, state


def scanned(arrays, ids, of, **options):
    runs = None if ids is None else runs_of(jnp.asarray(ids))
    return of(Scan(**arrays, runs=runs), **options)


@pytest.mark.parametrize(("length", "chunk", "isolated"), [(1, 64, False), (24, 8, False), (70, 32, True)])
def test_chunks_and_recurrence_match_a_float64_loop(length, chunk, isolated):
    arrays, ids = inputs(length), segments(length) if isolated else None
    expected = looped(arrays, ids)
    for of, options in ((ssd_reference, {}), (ssd, {"chunk": chunk})):
        y, state = jax.jit(partial(scanned, of=of, **options))(arrays, ids)
        np.testing.assert_allclose(y, expected[0], rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(state, expected[1], rtol=1e-5, atol=1e-5)


def test_gradients_of_chunks_equal_those_of_the_recurrence():
    run = partial(scanned, ids=segments(70))
    check_gradients(inputs(70), "x", partial(run, of=ssd, chunk=32), partial(run, of=ssd_reference))


def test_large_decays_cost_no_accuracy():
    """Differences of cumulative sums would be off by 1e-3 here: sums up to 1e4, with small differences."""
    arrays = inputs(64, steepest=500.0)
    y, _ = jax.jit(partial(scanned, ids=None, of=ssd, chunk=64))(arrays)
    np.testing.assert_allclose(y, looped(arrays, None)[0], rtol=1e-5, atol=1e-5)


def test_a_document_is_bitwise_independent_of_its_neighbours():
    def run(arrays, ids):
        return scanned(arrays, ids, ssd, chunk=32)[0]

    check_isolation(inputs(70), ("x", "dt", "b", "c"), run, {})


def test_mamba1_matches_a_float64_loop():
    rng, (rows, length, channels, states) = np.random.default_rng(0), (2, 23, 5, 3)
    ids = np.array([[1] * 9 + [2] * 14, [1] * 9 + [2] * 10 + [1] * 4], np.int32)
    arrays = {
        "x": rng.normal(size=(rows, length, channels)),
        "dt": np.exp(rng.uniform(-7, 1, (rows, length, channels))),
        "a": -rng.uniform(1, 9, (channels, states)),
        **{name: rng.normal(size=(rows, length, states)) for name in "bc"},
        "skip": rng.normal(size=channels),
        "state": rng.normal(size=(rows, channels, states)),
    }
    arrays = {name: value.astype(np.float32) for name, value in arrays.items()}
    actual = jax.jit(lambda arrays: selective_scan(SelectiveScan(**arrays, runs=runs_of(ids)), 8))(arrays)
    x, dt, a, b, c, skip, state = (arrays[name].astype(np.float64) for name in arrays)
    y = np.zeros(x.shape)
    for row, t in np.ndindex(rows, length):
        if t and ids[row, t] != ids[row, t - 1]:
            state[row] = 0
        state[row] = np.exp(dt[row, t, :, None] * a) * state[row] + np.outer(dt[row, t] * x[row, t], b[row, t])
        y[row, t] = state[row] @ c[row, t] + skip * x[row, t]
    for value, expected in zip(actual, (y, state), strict=True):
        np.testing.assert_allclose(value, expected, rtol=1e-5, atol=1e-5)
