"""Functions written for the compiler: LayerNorm's gradient, gelu, gradients of tables."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from megajax.layers.embedding import embed
from megajax.layers.mlp.module import ACTIVATIONS
from megajax.layers.norm.config import LayerNormConfig
from megajax.layers.param import LayerSettings, bind
from megajax.mesh.config import ParallelConfig
from megajax.mesh.layout import Layout
from megajax.mesh.sharding_rules import Plan

RNG = np.random.default_rng(7)
HIDDEN = 48
SETTINGS = LayerSettings(layout=Layout(Plan.of(ParallelConfig())), hidden=HIDDEN, std=0.02, output_std=0.02)


@pytest.mark.parametrize(("shape", "zero_centred"), [((2, 5, HIDDEN), True), ((2, 3, 4, HIDDEN), False)])
def test_the_gradient_of_layer_norm_equals_that_of_its_formula(shape, zero_centred) -> None:
    module = LayerNormConfig(epsilon=1e-3, zero_centred=zero_centred).build(SETTINGS)
    x, dy = (jnp.asarray(RNG.normal(1, 2, shape), jnp.float32) for _ in range(2))
    weights = {name: jnp.asarray(RNG.normal(1, 0.3, HIDDEN), jnp.float32) for name in ("gain", "bias")}

    def formula(x, weights):
        scaled = (x - x.mean(-1, keepdims=True)) / jnp.sqrt(x.var(-1, keepdims=True) + 1e-3)
        gain, bias = (jnp.broadcast_to(weights[name], x.shape) for name in ("gain", "bias"))
        return scaled * (gain + zero_centred) + bias

    def results(function):
        y, pullback = jax.vjp(function, x, weights)
        return y, pullback(dy)

    actual, reference = (
        jax.jit(partial(results, function))() for function in (lambda x, weights: bind(module, weights)(x), formula)
    )
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5), actual, reference)


def test_gradients_of_layer_norm_have_the_dtypes_of_their_inputs() -> None:
    """A float32 residual stream, with weights in bfloat16 in use."""
    module = LayerNormConfig().build(SETTINGS)
    weights = {name: jnp.ones(HIDDEN, jnp.bfloat16) for name in ("gain", "bias")}
    y, pullback = jax.vjp(lambda x, weights: bind(module, weights)(x), jnp.ones((2, 3, HIDDEN), jnp.float32), weights)
    dx, dweights = pullback(jnp.ones_like(y))
    assert y.dtype == dweights["gain"].dtype == dweights["bias"].dtype == jnp.bfloat16
    assert dx.dtype == jnp.float32


def test_layer_norm_saves_only_its_input() -> None:
    module = LayerNormConfig().build(SETTINGS)
    x = jnp.ones((2, 3, HIDDEN), jnp.bfloat16)
    _, pullback = jax.vjp(module, x)
    saved = [leaf for leaf in jax.tree.leaves(pullback) if leaf.size >= x.size]
    assert [leaf.dtype for leaf in saved] == [jnp.bfloat16]


def test_gelu_by_a_sigmoid() -> None:
    x = jnp.linspace(-30, 30, 4001)
    wide = np.asarray(x, np.float64)
    inner, inner_slope = 0.044715 * wide**3 + wide, 3 * 0.044715 * wide**2 + 1
    half = 0.5 + 0.5 * np.tanh(np.sqrt(2 / np.pi) * inner)
    gelu = ACTIVATIONS["gelu_tanh"]
    np.testing.assert_allclose(gelu(x), wide * half, rtol=1e-5, atol=1e-6)
    slope = half + wide * half * (1 - half) * 2 * np.sqrt(2 / np.pi) * inner_slope
    np.testing.assert_allclose(jax.vmap(jax.grad(gelu))(x), slope, rtol=1e-5, atol=1e-6)
    # In bfloat16 it is off by half a unit in the last place, which exceeds 2^-9 of the value only near 0.
    rough = x.astype(jnp.bfloat16)
    np.testing.assert_allclose(gelu(rough).astype(jnp.float32), gelu(rough.astype(jnp.float32)), rtol=2**-8, atol=0)


def test_bfloat16_tables_sum_their_gradients_in_float32():
    """512 ones and one 1: bfloat16 cannot count beyond 256."""
    layout = Layout(Plan.of(ParallelConfig()))
    table = jnp.zeros((4, 1), jnp.bfloat16)
    tokens = jnp.zeros((1, 512), jnp.int32)
    gradient = jax.grad(lambda table: jnp.sum(embed(layout, table, tokens)).astype(jnp.float32))(table)
    assert gradient.dtype == jnp.bfloat16
    assert float(gradient[0, 0]) == 512
