"""What holds for the recurrences of state-space models and of the delta rule."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

type Arrays = dict[str, np.ndarray]


def check_gradients(arrays: Arrays, outputs: str, chunks: Callable, recurrence: Callable) -> None:
    """chunks, recurrence: arrays -> outputs, of the shape of the array `outputs`, and the last state."""
    rng = np.random.default_rng(3)
    weights = [rng.normal(size=arrays[name].shape).astype(np.float32) for name in (outputs, "state")]

    def gradients(of: Callable) -> Arrays:
        def loss(arrays: Arrays) -> jax.Array:
            return sum(jnp.sum(weight * out) for weight, out in zip(weights, of(arrays), strict=True))

        return jax.jit(jax.grad(loss))(arrays)

    actual = gradients(chunks)
    for name, expected in gradients(recurrence).items():
        atol = 1e-5 * np.abs(expected).max()
        np.testing.assert_allclose(actual[name], expected, rtol=1e-5, atol=atol, err_msg=name)


def check_isolation(arrays: Arrays, moving: tuple[str, ...], run: Callable, times: dict[str, int]) -> None:
    """Positions 20 to 44 of 70 are a document, whose values and gradients no bit of the others' changes.

    run: (arrays, ids) -> outputs. moving: arrays with positions, which change by factors of `times`, else of 100.
    """
    document = slice(20, 45)
    ids = np.array([[1] * 20 + [2] * 25 + [3] * 25] * 2, np.int32)
    other_ids = np.array([[5] * 7 + [6] * 13 + [2] * 25 + [9] * 3 + [1] * 22] * 2, np.int32)
    altered = dict(arrays)
    for name in moving:
        changed = np.flip(arrays[name], axis=1) * times.get(name, 100)
        altered[name] = np.where(other_ids.reshape(*ids.shape, *[1] * (changed.ndim - 2)) == 2, arrays[name], changed)

    @jax.jit
    def results(arrays: Arrays, ids: np.ndarray) -> Arrays:
        def loss(differentiated: Arrays) -> tuple[jax.Array, jax.Array]:
            y = run(arrays | differentiated, ids)
            return jnp.sum(jnp.sin(y)), y

        grads, y = jax.grad(loss, has_aux=True)({name: arrays[name] for name in moving})
        return grads | {"y": y}

    original, another = results(arrays, ids), results(altered, other_ids)
    for name, value in original.items():
        np.testing.assert_array_equal(value[:, document], another[name][:, document], err_msg=name)
        assert np.any(value[:, :20] != another[name][:, :20])
