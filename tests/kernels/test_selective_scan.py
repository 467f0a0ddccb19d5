"""The recurrence of Mamba against a loop in float64; documents are isolated to the bit."""

import jax
import jax.numpy as jnp
import numpy as np

from megajax.kernels.ssm.selective_scan import SelectiveScan, selective_scan
from megajax.kernels.ssm.ssd import runs_of

ROWS, LENGTH, CHANNELS, STATES = 2, 23, 5, 3
IDS = np.array([[1] * 9 + [2] * 14, [1] * 9 + [2] * 10 + [1] * 4], np.int32)


def inputs(seed: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    values = {
        "x": rng.normal(size=(ROWS, LENGTH, CHANNELS)),
        "dt": np.exp(rng.uniform(-7, 1, (ROWS, LENGTH, CHANNELS))),
        "a": -rng.uniform(1, 9, (CHANNELS, STATES)),
        "b": rng.normal(size=(ROWS, LENGTH, STATES)),
        "c": rng.normal(size=(ROWS, LENGTH, STATES)),
        "skip": rng.normal(size=CHANNELS),
        "state": rng.normal(size=(ROWS, CHANNELS, STATES)),
    }
    return {name: value.astype(np.float32) for name, value in values.items()}


@jax.jit
def results(arrays, ids):
    """y and the last state; gradients of sin(y) with respect to inputs that have positions."""
    moving = {name: arrays[name] for name in ("x", "dt", "b", "c")}

    def loss(moving):
        y, state = selective_scan(SelectiveScan(**arrays | moving, runs=runs_of(ids)), 8)
        return jnp.sum(jnp.sin(y)), {"y": y, "state": state}

    grads, out = jax.grad(loss, has_aux=True)(moving)
    return out | grads


def test_matches_a_float64_loop():
    arrays = inputs(0)
    x, dt, a, b, c, skip, state = (arrays[name].astype(np.float64) for name in arrays)
    y = np.zeros(x.shape)
    for row, t in np.ndindex(ROWS, LENGTH):
        if t and IDS[row, t] != IDS[row, t - 1]:
            state[row] = 0
        state[row] = np.exp(dt[row, t, :, None] * a) * state[row] + np.outer(dt[row, t] * x[row, t], b[row, t])
        y[row, t] = state[row] @ c[row, t] + skip * x[row, t]
    actual = results(arrays, IDS)
    np.testing.assert_allclose(actual["y"], y, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(actual["state"], state, rtol=1e-5, atol=1e-5)


def test_a_document_is_bitwise_independent_of_its_neighbours():
    arrays, other_arrays = inputs(0), inputs(1)
    changed = {
        name: np.where((IDS == 2).reshape(*IDS.shape, 1), arrays[name], other_arrays[name])
        for name in ("x", "dt", "b", "c")
    }
    original, another = results(arrays, IDS), results(arrays | changed | {"state": other_arrays["state"]}, IDS)
    for name in ("y", "x", "dt", "b", "c"):
        np.testing.assert_array_equal(original[name][IDS == 2], another[name][IDS == 2], err_msg=name)
        assert np.any(original[name][IDS == 1] != another[name][IDS == 1])
