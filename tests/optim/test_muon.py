"""Muon: which weights are matrices, how orthogonal the updates are, and the update against numpy."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from megajax.layers.param import Normal, ParamSpec, specs
from megajax.mesh.config import ParallelConfig
from megajax.mesh.layout import Layout
from megajax.mesh.sharding_rules import Plan
from megajax.models.presets.gpt import gpt2
from megajax.optim.config import MuonConfig
from megajax.optim.muon import POLYNOMIALS, Matrices, matrices, orthogonalise, scale
from megajax.optim.optimizer import constant_rates


def spec(path: str, shape: tuple[int, ...], axes: tuple[str | None, ...], role: str = "weight") -> ParamSpec:
    layers = tuple(range(shape[0])) if axes[0] == "layer" else ()
    return ParamSpec(path, shape, axes, Normal(0.02), role, path, layers)


DECLARED = {
    "query": spec("query", (3, 8, 2, 3), ("layer", "embed", "heads", "head_dim")),
    "output": spec("output", (3, 2, 3, 8), ("layer", "heads", "head_dim", "embed")),
    "down": spec("down", (3, 12, 8), ("layer", "mlp", "embed")),
    "tokens": spec("tokens", (5, 8), ("vocab", "embed")),
    "gain": spec("gain", (3, 8), ("layer", "embed"), "gain"),
}


@pytest.mark.parametrize(
    ("shape", "axes", "expected", "size"),
    [
        ((3, 8, 2, 4), ("layer", "embed", "heads", "head_dim"), Matrices(1, 1), (8, 8)),
        ((3, 8, 2, 3), ("layer", "embed", "kv_heads", "head_dim"), Matrices(1, 1), (8, 6)),
        ((3, 8, 1, 4), ("layer", "embed", "kv_heads_copied", "head_dim"), Matrices(1, 1), (8, 4)),
        ((3, 2, 4, 8), ("layer", "heads", "head_dim", "embed"), Matrices(1, 2), (8, 8)),
        ((3, 8, 12), ("layer", "embed", "mlp"), Matrices(1, 1), (8, 12)),
        ((3, 4, 8, 12), ("layer", "expert", "embed", "mlp"), Matrices(2, 1), (8, 12)),
        ((3, 8, 4), ("layer", "embed", "expert"), Matrices(1, 1), (8, 4)),
        ((3, 8), ("layer", "mlp"), None, None),
        ((3, 8, 4, 5), ("layer", "embed", "mlp", "state"), None, None),
        ((9, 8), ("vocab", "embed"), None, None),
        ((9, 8), (None, "embed"), None, None),
    ],
)
def test_matrices_of_weights(shape, axes, expected, size):
    view = matrices(spec("w", shape, axes))
    assert view == expected
    if view is not None:
        assert view.size(shape) == size


def test_the_matrices_of_a_model_s_stack_are_orthogonalised():
    declared = specs(nnx.eval_shape(lambda: gpt2("debug").build(Layout(Plan.of(ParallelConfig())))))
    optimizer = MuonConfig().build(declared)
    state = jax.eval_shape(lambda: optimizer.init({p: jnp.zeros(s.shape) for p, s in declared.items()}))
    mixer, mlp = ("query", "key", "value", "output"), ("up", "down")
    names = {f"mixer.{name}" for name in mixer} | {f"mlp.{name}" for name in mlp}
    assert set(state["momentum"]) == {f"stack.blocks.0.{name}" for name in names}
    assert set(state["first_moment"]) == set(state["second_moment"]) == set(declared) - set(state["momentum"])


@pytest.mark.parametrize("shape", [(16, 64), (64, 16)])
@pytest.mark.parametrize(
    ("settings", "low", "high"),
    [
        ({}, 0.6, 1.2),
        ({"coefficients": "simple"}, 0.5, 1.25),
        ({"coefficients": "polar_express", "iterations": 8}, 0.99, 1.01),
        ({"dtype": "bfloat16"}, 0.6, 1.25),
    ],
)
def test_singular_values_come_near_one(shape, settings, low, high):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(2, *shape)).astype(np.float32) * np.array([1e-6, 1e3], np.float32)[:, None, None]
    orthogonal = np.asarray(orthogonalise(jnp.asarray(x), MuonConfig(**settings)))
    assert orthogonal.dtype == np.float32
    for before, after in zip(x, orthogonal, strict=True):
        u, values, vt = np.linalg.svd(before.astype(np.float64), full_matrices=False)
        # The iteration is an odd polynomial of the singular values: only those that are not tiny get near 1.
        core = u.T @ after @ vt.T
        significant = values > 0.02 * np.linalg.norm(values)
        assert significant.sum() >= 14
        assert low < np.diag(core)[significant].min() and np.diag(core)[significant].max() < high
        np.testing.assert_allclose(core - np.diag(np.diag(core)), 0, atol=0.03 if "dtype" in settings else 1e-3)


def test_the_transposed_matrix_has_the_transposed_update():
    x = jnp.asarray(np.random.default_rng(1).normal(size=(8, 8)).astype(np.float32))
    cfg = MuonConfig()
    np.testing.assert_allclose(orthogonalise(x, cfg, tall=True), orthogonalise(x, cfg, tall=False), atol=2e-5)
    np.testing.assert_array_equal(orthogonalise(jnp.zeros((4, 6)), cfg), 0)


def test_scales():
    assert scale(MuonConfig(), 16, 64) == 8
    assert scale(MuonConfig(), 64, 16) == 8
    assert scale(MuonConfig(extra_scale=0.2), 16, 64) == pytest.approx(1.6)
    assert [scale(MuonConfig(scale="shape_scaling"), *size) for size in ((16, 64), (64, 16))] == [2, 1]
    assert [scale(MuonConfig(scale="unit_rms_norm"), *size) for size in ((16, 64), (64, 16))] == [2, 0.5]


@pytest.mark.parametrize("nesterov", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_three_updates_equal_those_of_numpy(nesterov):
    rng, cfg = np.random.default_rng(2), MuonConfig(nesterov=nesterov, weight_decay=0.1, momentum=0.9)
    params = {path: rng.normal(size=s.shape).astype(np.float32) for path, s in DECLARED.items()}
    gradients = [{path: rng.normal(size=s.shape).astype(np.float32) for path, s in DECLARED.items()} for _ in range(3)]
    optimizer = cfg.build(DECLARED)
    update = jax.jit(partial(optimizer.update, rates=constant_rates(0.01, 0.1)))
    weights, state = params, optimizer.init(params)
    for grads in gradients:
        weights, state = update(grads, state, weights)
    for path, shape in {"query": (8, 6), "output": (6, 8), "down": (12, 8)}.items():
        for layer in range(3):
            p, m = params[path][layer].astype(np.float64), 0.0
            for grads in gradients:
                g = grads[path][layer].astype(np.float64)
                m = 0.9 * m + 0.1 * g
                x = (0.9 * m + 0.1 * g if nesterov else m).reshape(shape)
                x = x / np.linalg.norm(x)
                for a, b, c in POLYNOMIALS["quintic"]:
                    gram = x @ x.T
                    x = a * x + b * gram @ x + c * gram @ gram @ x
                p = p * (1 - 0.01 * 0.1) - 0.01 * max(shape) ** 0.5 * x.reshape(p.shape)
            np.testing.assert_allclose(weights[path][layer], p, rtol=2e-6, atol=2e-6, err_msg=f"{path} {layer}")
    assert set(state["first_moment"]) == {"tokens", "gain"}
