"""Functions written for the compiler: LayerNorm's gradient, gelu, biases, arrays saved by elementwise parts."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from megajax.layers.attention.module import _add_head_bias
from megajax.layers.context import Context
from megajax.layers.mlp.config import DenseMLPConfig, FeedForward, GatedMLPConfig
from megajax.layers.mlp.module import ACTIVATIONS
from megajax.layers.norm.config import LayerNormConfig, RMSNormConfig
from megajax.layers.param import LayerSettings, bind, specs
from megajax.mesh.config import ParallelConfig
from megajax.mesh.layout import Layout
from megajax.mesh.sharding_rules import Plan

RNG = np.random.default_rng(7)
HIDDEN = 48
SETTINGS = LayerSettings(layout=Layout(Plan.of(ParallelConfig())), hidden=HIDDEN, std=0.02, output_std=0.02)


@pytest.mark.parametrize("shape", [(2, 5, HIDDEN), (2, 3, 4, HIDDEN)])
@pytest.mark.parametrize("zero_centred", [False, True])
def test_the_gradient_of_layer_norm_equals_that_of_its_formula(shape, zero_centred) -> None:
    module = LayerNormConfig(epsilon=1e-3, zero_centred=zero_centred).build(SETTINGS)
    x, dy = (jnp.asarray(RNG.normal(1, 2, shape), jnp.float32) for _ in range(2))
    weights = {name: jnp.asarray(RNG.normal(1, 0.3, HIDDEN), jnp.float32) for name in ("gain", "bias")}

    def formula(x, weights):
        scaled = (x - x.mean(-1, keepdims=True)) / jnp.sqrt(x.var(-1, keepdims=True) + 1e-3)
        gain, bias = (jnp.broadcast_to(weights[name], x.shape) for name in ("gain", "bias"))
        return scaled * (gain + zero_centred) + bias

    actual, pullback = jax.vjp(lambda x, weights: bind(module, weights)(x), x, weights)
    reference, exact = jax.vjp(formula, x, weights)
    np.testing.assert_allclose(actual, reference, rtol=1e-5, atol=1e-5)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5), pullback(dy), exact(dy))


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


@pytest.mark.parametrize(
    "layer",
    [
        DenseMLPConfig(ffn=64, activation="gelu_tanh", bias=True),
        GatedMLPConfig(ffn=64),
        RMSNormConfig(),
        LayerNormConfig(),
    ],
    ids=["dense", "gated", "rms", "layer"],
)
def test_layers_save_their_inputs_and_the_results_of_matmuls(layer) -> None:
    """Where nothing is recomputed by name: no results of single elementwise operations."""
    module = layer.build(SETTINGS)
    half = {path: jnp.zeros(spec.shape, jnp.bfloat16) for path, spec in specs(module).items()}
    x = jnp.ones((4, 32, HIDDEN), jnp.bfloat16)
    context = (Context(jnp.zeros((4, 32), jnp.int32), jnp.arange(32)),) if isinstance(layer, FeedForward) else ()
    _, pullback = jax.vjp(lambda x: bind(module, half)(x, *context), x)
    saved = [leaf for leaf in jax.tree.leaves(pullback) if leaf.ndim == 3 and leaf.shape[:2] == x.shape[:2]]
    large = [leaf for leaf in saved if leaf.shape[2] > 1]
    assert {leaf.dtype for leaf in large} <= {jnp.dtype(jnp.bfloat16)}
    # x; of an MLP also up, or gate and up, and their product, which the gradient of the last matrix needs.
    assert len(large) <= 4


def test_biases_are_added_head_by_head() -> None:
    x, bias = RNG.normal(size=(2, 3, 4, 5)), RNG.normal(size=(4, 5))
    np.testing.assert_allclose(_add_head_bias(jnp.asarray(x), jnp.asarray(bias)), x + bias, rtol=1e-6)
