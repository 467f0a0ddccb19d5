"""The recurrences of Mamba-2 and Mamba: loops in float64, lax.scan, and matmuls over chunks."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from recurrences import check_gradients, check_isolation

from megajax.kernels.ssm.chunks import runs_of
from megajax.kernels.ssm.selective_scan import SelectiveScan, selective_scan
from megajax.kernels.ssm.ssd import Scan, causal_conv, ssd, ssd_reference, ssd_step

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


def test_steps_of_one_position_equal_the_recurrence():
    arrays = inputs(6)
    y, last = jax.jit(partial(scanned, ids=None, of=ssd, chunk=16))(arrays)
    state, step = arrays["state"], jax.jit(ssd_step)
    for t in range(6):
        x, dt, b, c = (arrays[name][:, t] for name in ("x", "dt", "b", "c"))
        row, state = step(state, x, dt, arrays["a"], b, c, arrays["skip"])
        np.testing.assert_allclose(row, y[:, t], rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(state, last, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
def test_rows_continue_from_a_state():
    """Two halves equal the whole row, also where a document continues in the second half and ends there."""
    arrays, ids = inputs(40), np.array([[1] * 30 + [2] * 10, [1] * 5 + [2] * 35], np.int32)
    by_chunks = jax.jit(partial(scanned, of=ssd, chunk=16))
    expected, last = by_chunks(arrays, ids)
    halves, state = [], arrays["state"]
    for part in (slice(0, 20), slice(20, 40)):
        piece = {name: arrays[name][:, part] for name in ("x", "dt", "b", "c")}
        y, state = by_chunks(arrays | piece | {"state": state}, ids[:, part])
        halves.append(y)
    np.testing.assert_allclose(np.concatenate(halves, axis=1), expected, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(state, last, rtol=1e-5, atol=1e-5)


def test_convolution_sees_only_its_own_document():
    rng = np.random.default_rng(0)
    x, kernel, bias = (rng.normal(size=shape).astype(np.float32) for shape in ((2, 12, 3), (4, 3), (3,)))
    before = rng.normal(size=(2, 3, 3)).astype(np.float32)
    ids = np.array([[1] * 5 + [2] * 7, [1] * 2 + [2] * 1 + [1] * 9], np.int32)
    runs = np.asarray(runs_of(jnp.asarray(ids)))
    expected = np.zeros((2, 12, 3)) + bias
    for row, t, back in np.ndindex(2, 12, 4):
        at = t - back
        if at >= 0 and runs[row, at] == runs[row, t]:
            expected[row, t] += kernel[3 - back] * x[row, at]
        elif at < 0 and runs[row, t] == 0:
            expected[row, t] += kernel[3 - back] * before[row, at]
    actual = jax.jit(causal_conv)(x, kernel, bias, runs, before)
    np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-6)


MAMBA1_ROWS, MAMBA1_LENGTH, CHANNELS, MAMBA1_STATES = 2, 23, 5, 3
MAMBA1_IDS = np.array([[1] * 9 + [2] * 14, [1] * 9 + [2] * 10 + [1] * 4], np.int32)


def mamba1_inputs(seed: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    values = {
        "x": rng.normal(size=(MAMBA1_ROWS, MAMBA1_LENGTH, CHANNELS)),
        "dt": np.exp(rng.uniform(-7, 1, (MAMBA1_ROWS, MAMBA1_LENGTH, CHANNELS))),
        "a": -rng.uniform(1, 9, (CHANNELS, MAMBA1_STATES)),
        "b": rng.normal(size=(MAMBA1_ROWS, MAMBA1_LENGTH, MAMBA1_STATES)),
        "c": rng.normal(size=(MAMBA1_ROWS, MAMBA1_LENGTH, MAMBA1_STATES)),
        "skip": rng.normal(size=CHANNELS),
        "state": rng.normal(size=(MAMBA1_ROWS, CHANNELS, MAMBA1_STATES)),
    }
    return {name: value.astype(np.float32) for name, value in values.items()}


@jax.jit
def mamba1_results(arrays, ids):
    """y and the last state; gradients of sin(y) with respect to mamba1_inputs that have positions."""
    moving = {name: arrays[name] for name in ("x", "dt", "b", "c")}

    def loss(moving):
        y, state = selective_scan(SelectiveScan(**arrays | moving, runs=runs_of(ids)), 8)
        return jnp.sum(jnp.sin(y)), {"y": y, "state": state}

    grads, out = jax.grad(loss, has_aux=True)(moving)
    return out | grads


def test_mamba1_matches_a_float64_loop():
    arrays = mamba1_inputs(0)
    x, dt, a, b, c, skip, state = (arrays[name].astype(np.float64) for name in arrays)
    y = np.zeros(x.shape)
    for row, t in np.ndindex(MAMBA1_ROWS, MAMBA1_LENGTH):
        if t and MAMBA1_IDS[row, t] != MAMBA1_IDS[row, t - 1]:
            state[row] = 0
        state[row] = np.exp(dt[row, t, :, None] * a) * state[row] + np.outer(dt[row, t] * x[row, t], b[row, t])
        y[row, t] = state[row] @ c[row, t] + skip * x[row, t]
    actual = mamba1_results(arrays, MAMBA1_IDS)
    np.testing.assert_allclose(actual["y"], y, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(actual["state"], state, rtol=1e-5, atol=1e-5)


def test_a_document_of_mamba1_is_bitwise_independent():
    arrays, other_arrays = mamba1_inputs(0), mamba1_inputs(1)
    changed = {
        name: np.where((MAMBA1_IDS == 2).reshape(*MAMBA1_IDS.shape, 1), arrays[name], other_arrays[name])
        for name in ("x", "dt", "b", "c")
    }
    original = mamba1_results(arrays, MAMBA1_IDS)
    another = mamba1_results(arrays | changed | {"state": other_arrays["state"]}, MAMBA1_IDS)
    for name in ("y", "x", "dt", "b", "c"):
        np.testing.assert_array_equal(original[name][MAMBA1_IDS == 2], another[name][MAMBA1_IDS == 2], err_msg=name)
        assert np.any(original[name][MAMBA1_IDS == 1] != another[name][MAMBA1_IDS == 1])
