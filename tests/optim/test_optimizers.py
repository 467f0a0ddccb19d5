"""SGD and Lion against their definitions in float64, and properties of all optimizers."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from megajax.layers.param import ONES, ZEROS, Normal, ParamSpec
from megajax.optim.config import AdamWConfig, LionConfig, MuonConfig, SGDConfig
from megajax.optim.optimizer import constant_rates, zeros

DECLARED = {
    "stack.matrix": ParamSpec(
        "stack.matrix", (2, 3, 4), ("layer", "embed", "mlp"), Normal(0.02), "weight", "m", (0, 1)
    ),
    "tokens": ParamSpec("tokens", (5, 3), ("vocab", "embed"), Normal(0.02), "weight", "tokens", ()),
    "gain": ParamSpec("gain", (3,), ("embed",), ONES, "gain", "gain", ()),
    "bias": ParamSpec("bias", (3,), ("embed",), ZEROS, "bias", "bias", ()),
}


def random(rng: np.random.Generator, scale: float = 1.0) -> dict[str, np.ndarray]:
    return {path: (rng.normal(size=spec.shape) * scale).astype(np.float32) for path, spec in DECLARED.items()}


def run(cfg, params, gradients, lr):
    """(weights, state) after one update for each gradient."""
    optimizer = cfg.build(DECLARED)
    update = jax.jit(lambda g, s, p: optimizer.update(g, s, p, rates=constant_rates(lr, cfg.weight_decay)))
    weights, state = {path: jnp.asarray(p) for path, p in params.items()}, optimizer.init(params)
    for grads in gradients:
        weights, state = update(grads, state, weights)
    return weights, state


def test_momentum():
    rng, cfg = np.random.default_rng(0), SGDConfig(momentum=0.9, weight_decay=0.1)
    params, gradients = random(rng), [random(rng) for _ in range(5)]
    weights, state = run(cfg, params, gradients, 0.01)
    for path, p in params.items():
        p, momentum = p.astype(np.float64), 0.0
        for grads in gradients:
            momentum = 0.9 * momentum + grads[path] + (0.1 * p if path in ("stack.matrix", "tokens") else 0)
            p = p - 0.01 * momentum
        np.testing.assert_allclose(weights[path], p, rtol=1e-6, atol=1e-6, err_msg=path)
        np.testing.assert_allclose(state["momentum"][path], momentum, rtol=1e-5, atol=1e-5, err_msg=path)


def test_lion():
    rng, cfg = np.random.default_rng(1), LionConfig(beta1=0.9, beta2=0.99, weight_decay=0.3)
    params, gradients = random(rng), [random(rng) for _ in range(5)]
    weights, _ = run(cfg, params, gradients, 0.01)
    for path, p in params.items():
        p, m = p.astype(np.float64), 0.0
        for grads in gradients:
            p = p * (1 - 0.01 * (0.3 if path in ("stack.matrix", "tokens") else 0))
            p = p - 0.01 * np.sign(0.9 * m + 0.1 * grads[path])
            m = 0.99 * m + 0.01 * grads[path]
        np.testing.assert_allclose(weights[path], p, rtol=1e-6, atol=1e-6, err_msg=path)


@pytest.mark.parametrize("cfg", [AdamWConfig(), LionConfig(beta1=0.9, beta2=0.999)], ids=["AdamW", "Lion"])
def test_an_update_rounds_each_weight_once(cfg):
    """Thirty updates against float64.

    p * (1 - lr * decay) - lr * direction would round twice, and so would 1 - lr * decay, which is the same for all
    weights: a drift of 4e-7 towards 0, and three times the error.
    """
    rng, lr, decay = np.random.default_rng(8), np.float32(1e-3), np.float32(0.1)
    start = rng.normal(size=(64, 64)).astype(np.float32)
    gradients = rng.normal(size=(30, 64, 64)).astype(np.float32)
    optimizer = cfg.build({"tokens": replace(DECLARED["tokens"], shape=start.shape)})
    update = jax.jit(lambda g, s, p: optimizer.update(g, s, p, rates=constant_rates(lr, decay)))
    weights, state = {"tokens": jnp.asarray(start)}, optimizer.init({"tokens": start})
    p, m, v = start.astype(np.float64), 0.0, 0.0
    for t, g in enumerate(gradients, start=1):
        weights, state = update({"tokens": g}, state, weights)
        g = g.astype(np.float64)
        if isinstance(cfg, LionConfig):
            direction, m = np.sign(0.9 * m + 0.1 * g), 0.999 * m + 0.001 * g
        else:
            m, v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g * g
            direction = m / (1 - 0.9**t) / (np.sqrt(v / (1 - 0.999**t)) + 1e-8)
        p = p - float(lr) * (direction + float(decay) * p)
    off = np.asarray(weights["tokens"], np.float64) - p
    assert np.linalg.norm(off) < 2.5e-7 * np.linalg.norm(p)
    assert abs(np.mean(off * np.sign(p))) < 5e-8


@pytest.mark.parametrize(
    "cfg",
    [AdamWConfig(beta2=0.95), pytest.param(MuonConfig(beta2=0.95), marks=pytest.mark.slow)],
    ids=lambda cfg: cfg.name(),
)
def test_moments_in_bfloat16_are_stored_so_and_computed_in_float32(cfg):
    rng = np.random.default_rng(3)
    params, gradients = random(rng), [random(rng) for _ in range(4)]
    exact, long_state = run(cfg, params, gradients, 0.01)
    weights, state = run(replace(cfg, moments="bfloat16"), params, gradients, 0.01)
    for name, part in state.items():
        if name == "count":
            assert int(part) == 4
            continue
        for path, moment in part.items():
            assert moment.dtype == jnp.bfloat16
            assert long_state[name][path].dtype == jnp.float32
            expected = np.asarray(long_state[name][path])
            np.testing.assert_allclose(
                moment.astype(jnp.float32), expected, rtol=0.02, atol=0.02 * np.abs(expected).max()
            )
    for path, p in exact.items():
        assert weights[path].dtype == jnp.float32
        # Newton-Schulz on a matrix this small rotates small singular values by more.
        assert float(jnp.abs(weights[path] - p).max()) < 0.04


def test_zeros_and_the_norm_are_reported_if_requested():
    params = random(np.random.default_rng(4))
    grads = {path: np.where(np.arange(p.size).reshape(p.shape) % 3 == 0, 0, p) for path, p in params.items()}
    optimizer = AdamWConfig(log_zeros=True, log_parameter_norm=True).build(DECLARED)
    measures = optimizer.measures(grads, params)
    assert float(measures["num_zeros"]) == sum(int((g == 0).sum()) for g in grads.values())
    exact = np.sqrt(sum((p.astype(np.float64) ** 2).sum() for p in params.values()))
    np.testing.assert_allclose(measures["parameter_norm"], exact, rtol=1e-6)
    assert AdamWConfig().build(DECLARED).measures(grads, params) == {}


def test_zeros_of_padding_rows_do_not_count():
    spec = ParamSpec("w", (3, 2, 2), ("layer", "embed", "mlp"), Normal(0.02), "weight", "w", (0, 1, -1))
    grads = {"w": np.concatenate([np.array([[[0, 1], [1, 1]]] * 2), np.zeros((1, 2, 2))]).astype(np.float32)}
    assert float(zeros(grads, {"w": spec})) == 2
