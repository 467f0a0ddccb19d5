"""AdamW against its definition in float64, and which weights are decayed and clipped."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from megajax.config.errors import UserError
from megajax.layers.param import ONES, ZEROS, Normal, ParamSpec
from megajax.optim.config import AdamWConfig
from megajax.optim.optimizer import clip_factor, constant_rates, global_norm, weight_so_far

pytestmark = pytest.mark.smoke

DECLARED = {
    "matrix": ParamSpec("matrix", (3, 4), ("embed", "mlp"), Normal(0.02), "weight", "matrix", ()),
    "gain": ParamSpec("gain", (4,), ("embed",), ONES, "gain", "gain", ()),
    "bias": ParamSpec("bias", (4,), ("embed",), ZEROS, "bias", "bias", ()),
}
BIT = float(np.finfo(np.float32).eps)
CONFIG = AdamWConfig(beta1=0.9, beta2=0.95, epsilon=1e-8, weight_decay=0.1)


def in_float64(params: dict, gradients: list[dict], rates: list[float], cfg: AdamWConfig) -> dict:
    """Loshchilov and Hutter 2019, algorithm 2, with the decay scaled by the learning rate."""
    out = {}
    for path, p in params.items():
        p = p.astype(np.float64)
        m, v = np.zeros_like(p), np.zeros_like(p)
        for t, (grads, lr) in enumerate(zip(gradients, rates, strict=True), start=1):
            g = grads[path].astype(np.float64)
            m = cfg.beta1 * m + (1 - cfg.beta1) * g
            v = cfg.beta2 * v + (1 - cfg.beta2) * g * g
            direction = (m / (1 - cfg.beta1**t)) / (np.sqrt(v / (1 - cfg.beta2**t)) + cfg.epsilon)
            p = p - lr * direction - (lr * cfg.weight_decay * p if path == "matrix" else 0)
        out[path] = p
    return out


def random(rng: np.random.Generator, scale: float = 1.0) -> dict[str, np.ndarray]:
    return {path: (rng.normal(size=spec.shape) * scale).astype(np.float32) for path, spec in DECLARED.items()}


@pytest.mark.parametrize("cfg", [CONFIG, AdamWConfig()], ids=["beta2=0.95", "beta2=0.999"])
def test_ten_updates_equal_those_in_float64(cfg):
    rng = np.random.default_rng(0)
    params, rates = random(rng), [1e-2 * (1 + n) / 3 for n in range(10)]
    # Gradients from large to below epsilon.
    gradients = [random(rng, 10.0 ** rng.integers(-9, 2)) for _ in rates]
    optimizer = cfg.build(DECLARED)
    update = jax.jit(lambda g, s, p, lr: optimizer.update(g, s, p, rates=constant_rates(lr, cfg.weight_decay)))
    weights, state = {path: jnp.asarray(p) for path, p in params.items()}, optimizer.init(params)
    for grads, lr in zip(gradients, rates, strict=True):
        weights, state = update(grads, state, weights, jnp.float32(lr))
    assert int(state["count"]) == 10
    for path, exact in in_float64(params, gradients, rates, cfg).items():
        np.testing.assert_allclose(weights[path], exact, rtol=1e-5, atol=1e-6, err_msg=path)
        assert np.abs(exact - params[path]).max() > 0.01, path


def test_bias_corrections_are_exact_from_the_first_step():
    """1 - beta^t computed in float32 would be off by 6e-5 at the first step with beta2=0.999."""
    for beta in (0.9, 0.95, 0.999, 0.9999):
        for step in (1, 2, 3, 10, 1000, 100_000):
            share = float(jax.jit(lambda t, beta=beta: weight_so_far(beta, t))(jnp.float32(step)))
            assert share == pytest.approx(-np.expm1(step * np.log(beta)), rel=2 * BIT), (beta, step)
    assert float(weight_so_far(0.0, jnp.float32(1))) == 1


def test_coupled_decay_passes_through_the_moments():
    rng, cfg = np.random.default_rng(6), AdamWConfig(beta2=0.95, weight_decay=0.1, decoupled=False)
    params, rates = random(rng), [1e-2] * 4
    gradients = [random(rng) for _ in rates]
    optimizer = cfg.build(DECLARED)
    weights, state = params, optimizer.init(params)
    exact = {path: p.astype(np.float64) for path, p in params.items()}
    m, v = ({path: np.zeros_like(p) for path, p in exact.items()} for _ in range(2))
    for t, grads in enumerate(gradients, start=1):
        weights, state = optimizer.update(grads, state, weights, rates=constant_rates(1e-2, 0.1))
        for path, p in exact.items():
            g = grads[path] + (0.1 * p if path == "matrix" else 0)
            m[path], v[path] = 0.9 * m[path] + 0.1 * g, 0.95 * v[path] + 0.05 * g * g
            exact[path] = p - 1e-2 * (m[path] / (1 - 0.9**t)) / (np.sqrt(v[path] / (1 - 0.95**t)) + 1e-8)
    for path, p in exact.items():
        np.testing.assert_allclose(weights[path], p, rtol=1e-6, atol=1e-6)


def test_moments_start_at_zero_in_the_shapes_of_the_weights():
    state = CONFIG.build(DECLARED).init(random(np.random.default_rng(2)))
    assert set(state) == {"count", "first_moment", "second_moment"}
    for name in ("first_moment", "second_moment"):
        assert {path: moment.shape for path, moment in state[name].items()} == {p: s.shape for p, s in DECLARED.items()}
        assert all(moment.dtype == jnp.float32 and not moment.any() for moment in state[name].values())


def test_undeclared_weights_are_refused():
    optimizer, params = CONFIG.build(DECLARED), random(np.random.default_rng(3))
    del params["gain"]
    with pytest.raises(UserError, match="gain"):
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
