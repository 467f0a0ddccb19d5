"""AdamW, SGD and Lion against their definitions in float64, decay, clipping, and properties of all optimizers."""

from collections.abc import Callable
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from user_errors import user_error

from megajax.layers.param import ONES, ZEROS, Normal, ParamSpec
from megajax.optim.config import AdamWConfig, LionConfig, MuonConfig, SGDConfig
from megajax.optim.optimizer import clip_factor, constant_rates, global_norm, weight_so_far, zeros

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


BIT = float(np.finfo(np.float32).eps)
DECAYED = ("stack.matrix", "tokens")


def run(cfg, params, gradients, rates):
    """(weights, state) after one update for each gradient and rate."""
    optimizer = cfg.build(DECLARED)
    update = jax.jit(lambda g, s, p, lr: optimizer.update(g, s, p, rates=constant_rates(lr, cfg.weight_decay)))
    weights, state = {path: jnp.asarray(p) for path, p in params.items()}, optimizer.init(params)
    for grads, lr in zip(gradients, rates, strict=True):
        weights, state = update(grads, state, weights, jnp.float32(lr))
    return weights, state


def adam(p, m, v, g, t, lr, decay, cfg):
    """Loshchilov and Hutter 2019, algorithm 2, with the decay scaled by the learning rate."""
    coupled = 0 if cfg.decoupled else decay
    g = g + coupled * p
    m, v = cfg.beta1 * m + (1 - cfg.beta1) * g, cfg.beta2 * v + (1 - cfg.beta2) * g * g
    direction = (m / (1 - cfg.beta1**t)) / (np.sqrt(v / (1 - cfg.beta2**t)) + cfg.epsilon)
    return p - lr * (direction + (decay - coupled) * p), m, v


def momentum(p, m, v, g, t, lr, decay, cfg):
    m = cfg.momentum * m + g + decay * p
    return p - lr * m, m, v


def lion(p, m, v, g, t, lr, decay, cfg):
    p = p * (1 - lr * decay) - lr * np.sign(cfg.beta1 * m + (1 - cfg.beta1) * g)
    return p, cfg.beta2 * m + (1 - cfg.beta2) * g, v


@pytest.mark.smoke
@pytest.mark.parametrize(
    ("cfg", "step"),
    [
        (AdamWConfig(beta1=0.9, beta2=0.95, epsilon=1e-8, weight_decay=0.1), adam),
        (AdamWConfig(), adam),
        (AdamWConfig(beta2=0.95, weight_decay=0.1, decoupled=False), adam),
        (SGDConfig(momentum=0.9, weight_decay=0.1), momentum),
        (LionConfig(beta1=0.9, beta2=0.99, weight_decay=0.3), lion),
    ],
    ids=["AdamW, beta2=0.95", "AdamW, beta2=0.999", "AdamW, coupled decay", "momentum", "Lion"],
)
def test_ten_updates_equal_those_in_float64(cfg, step: Callable) -> None:
    rng = np.random.default_rng(0)
    params, rates = random(rng), [1e-2 * (1 + n) / 3 for n in range(10)]
    # For AdamW, gradients from large to below epsilon.
    gradients = [random(rng, 10.0 ** rng.integers(-9, 2) if step is adam else 1.0) for _ in rates]
    weights, state = run(cfg, params, gradients, rates)
    assert int(state.get("count", 10)) == 10
    for path, start in params.items():
        p, m, v = start.astype(np.float64), 0.0, 0.0
        for t, (grads, lr) in enumerate(zip(gradients, rates, strict=True), start=1):
            decay = cfg.weight_decay if path in DECAYED else 0.0
            p, m, v = step(p, m, v, grads[path].astype(np.float64), t, lr, decay, cfg)
        rtol = 1e-5 if step is adam and cfg.decoupled else 1e-6
        np.testing.assert_allclose(weights[path], p, rtol=rtol, atol=1e-6, err_msg=path)
        assert np.abs(p - start).max() > 0.01, path
        if step is momentum:
            np.testing.assert_allclose(state["momentum"][path], m, rtol=1e-5, atol=1e-5, err_msg=path)


def test_bias_corrections_are_exact_from_the_first_step():
    """1 - beta^t computed in float32 would be off by 6e-5 at the first step with beta2=0.999."""
    for beta in (0.9, 0.95, 0.999, 0.9999):
        for step in (1, 2, 3, 10, 1000, 100_000):
            share = float(jax.jit(lambda t, beta=beta: weight_so_far(beta, t))(jnp.float32(step)))
            assert share == pytest.approx(-np.expm1(step * np.log(beta)), rel=2 * BIT), (beta, step)
    assert float(weight_so_far(0.0, jnp.float32(1))) == 1


def test_undeclared_weights_are_refused():
    optimizer, params = AdamWConfig().build(DECLARED), random(np.random.default_rng(3))
    del params["gain"]
    with user_error():
        optimizer.update(params, optimizer.init(params), params, rates=constant_rates(0.1))


def test_clipping_scales_the_global_norm_down_to_the_limit():
    grads = random(np.random.default_rng(4))
    exact = np.sqrt(sum((g.astype(np.float64) ** 2).sum() for g in grads.values()))
    norm = global_norm(grads)
    np.testing.assert_allclose(norm, exact, rtol=1e-6)
    clipped = {path: g * clip_factor(norm, 0.5) for path, g in grads.items()}
    np.testing.assert_allclose(global_norm(clipped), 0.5, rtol=1e-5)
    assert float(clip_factor(norm, 100.0)) == 1
    assert float(clip_factor(norm, None)) == 1
    assert float(clip_factor(jnp.float32(0), 1.0)) == 1


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
    exact, long_state = run(cfg, params, gradients, [0.01] * 4)
    weights, state = run(replace(cfg, moments="bfloat16"), params, gradients, [0.01] * 4)
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
