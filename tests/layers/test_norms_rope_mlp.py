"""Norms, rotary positions and feed-forward layers against their formulas in float64."""

from math import erf

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from megajax.layers.context import Context
from megajax.layers.mlp.config import DenseMLPConfig, GatedMLPConfig, XieluMLPConfig
from megajax.layers.norm.config import L2NormConfig, LayerNormConfig, RMSNormConfig
from megajax.layers.param import LayerSettings, bind, specs
from megajax.layers.position.config import Llama3ScalingConfig, RopeConfig, YarnScalingConfig
from megajax.mesh.config import ParallelConfig
from megajax.mesh.layout import Layout
from megajax.mesh.sharding_rules import Plan

pytestmark = pytest.mark.smoke

HIDDEN = 12
SETTINGS = LayerSettings(layout=Layout(Plan.of(ParallelConfig())), hidden=HIDDEN, std=0.02, output_std=0.01)
RNG = np.random.default_rng(0)
ANYWHERE = Context(jnp.zeros((2, 3), jnp.int32), jnp.arange(3))
"""The context that feed-forward layers are called with; these layers do not use it."""


def weighted(config, dtype=np.float32):
    """A module of random weights, biases and gains among them, and those weights."""
    module = config.build(SETTINGS)
    rng = np.random.default_rng(1)
    values = {path: rng.normal(size=spec.shape).astype(dtype) for path, spec in specs(module).items()}
    actual = {path: value.astype(np.float32) for path, value in values.items()}
    return bind(module, {path: jnp.asarray(value) for path, value in values.items()}), actual


def normalised(x: np.ndarray, weights: dict[str, np.ndarray], epsilon: float) -> np.ndarray:
    x = x.astype(np.float64)
    if "bias" in weights:
        x = x - x.mean(-1, keepdims=True)
    x = x / np.sqrt((x * x).mean(-1, keepdims=True) + epsilon)
    return x * weights.get("gain", 1) + weights.get("bias", 0)


@pytest.mark.parametrize(
    "config", [LayerNormConfig(epsilon=1e-3), RMSNormConfig(epsilon=1e-3), L2NormConfig(epsilon=1e-3)]
)
def test_norms(config):
    module, weights = weighted(config)
    x = RNG.normal(2, 0.1, (2, 3, HIDDEN)).astype(np.float32)
    np.testing.assert_allclose(module(x), normalised(x, weights, 1e-3), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("config", [LayerNormConfig, RMSNormConfig])
def test_a_zero_centred_gain_is_one_more_than_its_weight(config):
    module, weights = weighted(config(epsilon=1e-3, zero_centred=True))
    x = RNG.normal(2, 0.1, (2, 3, HIDDEN)).astype(np.float32)
    moved = weights | {"gain": weights["gain"] + 1}
    np.testing.assert_allclose(module(x), normalised(x, moved, 1e-3), rtol=1e-5, atol=1e-5)
    fresh = config(epsilon=1e-3, zero_centred=True).build(SETTINGS)
    assert not np.any(fresh.gain[...]) and specs(fresh)["gain"].init.value == 0


@pytest.mark.parametrize("config", [LayerNormConfig(), RMSNormConfig()])
def test_norms_of_bfloat16_are_computed_in_float32(config):
    """Around 100, bfloat16 numbers are 0.5 apart: a mean or a variance rounded to it would be far off."""
    module, weights = weighted(config, jnp.bfloat16)
    x = jnp.asarray(RNG.normal(100, 3, (4, HIDDEN)), jnp.bfloat16)
    exact = normalised(np.asarray(x, np.float32), weights, 1e-5)
    for residual in (jnp.bfloat16, jnp.float32):
        actual = module(x.astype(residual))
        assert actual.dtype == jnp.bfloat16
        np.testing.assert_allclose(np.asarray(actual, np.float32), exact, rtol=2**-8, atol=2**-8)


def applied(module, x):
    """A feed-forward layer, in one program."""
    with jax.default_matmul_precision("highest"):
        return jax.jit(lambda x: module(x, ANYWHERE))(x)


def turned_by(rope, x, positions):
    """Rotated as in one program."""
    return jax.jit(lambda x, positions: rope(x, positions))(x, positions)


def rotated(x: np.ndarray, positions: np.ndarray, frequencies: np.ndarray) -> np.ndarray:
    """(x[i], x[i + H/2]) as complex numbers, turned by position * frequency."""
    half = x.shape[-1] // 2
    turned = (x[..., :half] + 1j * x[..., half:]) * np.exp(1j * positions[:, :, None, None] * frequencies)
    return np.concatenate([turned.real, turned.imag], axis=-1)


def test_rope_turns_complex_numbers():
    rope = RopeConfig(base=1000.0).build(8)
    x = RNG.normal(size=(2, 5, 3, 8)).astype(np.float32)
    positions = RNG.integers(0, 200, (2, 5)).astype(np.int32)
    frequencies = 1000.0 ** (-np.arange(4) / 4)
    np.testing.assert_allclose(turned_by(rope, x, positions), rotated(x, positions, frequencies), atol=2e-5)


LONG = [
    RopeConfig(),
    RopeConfig(base=500000.0, scaling=Llama3ScalingConfig()),
    RopeConfig(scaling=YarnScalingConfig(factor=40.0)),
    RopeConfig(interpolation=3.0),
]


@pytest.mark.parametrize("config", LONG)
def test_rope_is_as_exact_at_a_million_positions_as_at_the_first(config):
    """A float32 product of position and frequency is off by 1e-2 at 131,071, and by up to 1 at the last."""
    rope = config.build(128)
    if config.scaling is None:
        exact = config.base ** (-np.arange(64) / 64) / config.interpolation
        np.testing.assert_allclose(rope.frequencies(), exact, rtol=1e-14)
    sampled = np.concatenate([[0, 1, -7, 131071, 2**20, 2**31 - 1], RNG.integers(0, 2**20, 2000)])
    x = np.concatenate([np.ones((1, len(sampled), 1, 64)), np.zeros((1, len(sampled), 1, 64))], -1).astype(np.float32)
    actual = jax.jit(lambda positions: rope(x, positions))(jnp.asarray(sampled, jnp.int32)[None])
    magnitude = 1.0 if config.scaling is None else config.scaling.magnitude()
    exact = magnitude * rotated(x.astype(np.float64), sampled[None].astype(np.float64), rope.frequencies())
    np.testing.assert_allclose(actual, exact, rtol=0, atol=1e-6)


def test_a_part_of_a_head_is_rotated_and_the_rest_unchanged():
    """A quarter of 16 dimensions: two pairs, with the wavelengths of a head of 4."""
    rope = RopeConfig(base=1000.0, fraction=0.25).build(16)
    x = RNG.normal(size=(2, 5, 3, 16)).astype(np.float32)
    positions = RNG.integers(0, 200, (2, 5)).astype(np.int32)
    actual = turned_by(rope, x, positions)
    np.testing.assert_array_equal(actual[..., 4:], x[..., 4:])
    np.testing.assert_allclose(actual[..., :4], rotated(x[..., :4], positions, np.array([1, 1000**-0.5])), atol=2e-5)


def test_interleaved_rope_rotates_neighbours():
    x = RNG.normal(size=(2, 5, 3, 8)).astype(np.float32)
    positions = RNG.integers(0, 200, (2, 5)).astype(np.int32)
    apart = np.concatenate([x[..., ::2], x[..., 1::2]], axis=-1)
    turned = np.asarray(turned_by(RopeConfig().build(8), apart, positions))
    actual = np.asarray(turned_by(RopeConfig(interleaved=True).build(8), x, positions))
    np.testing.assert_allclose(np.concatenate([actual[..., ::2], actual[..., 1::2]], axis=-1), turned, atol=1e-6)


def test_yarn_keeps_high_frequencies_and_stretches_low_ones():
    """The paper's ramp, pair by pair, over the number of turns within the original length."""
    scaling = YarnScalingConfig(factor=40.0, original=4096, fast=32.0, slow=1.0)
    plain = RopeConfig().build(64).frequencies().astype(np.float64)
    actual = RopeConfig(scaling=scaling).build(64).frequencies()
    # 64 ln(4096 / (2 pi turns)) / (2 ln 10000) is 10.4 for 32 turns and 22.5 for one.
    for pair, (before, new) in enumerate(zip(plain, actual, strict=True)):
        share = min(max((pair - 10) / (23 - 10), 0), 1)
        np.testing.assert_allclose(new, before / 40 * share + before * (1 - share), rtol=1e-12)
    unrounded = RopeConfig(scaling=YarnScalingConfig(factor=40.0, rounded=False)).build(64).frequencies()
    assert 0 < np.abs(unrounded / actual - 1).max() < 0.5


def test_stretched_rope_equals_llama_3_1():
    """Wavelengths below original/high stay, above original/low grow by factor, and are interpolated between."""
    scaling = Llama3ScalingConfig(factor=8.0, low=1.0, high=4.0, original=8192)
    plain = RopeConfig(base=500000.0).build(128).frequencies()
    actual = RopeConfig(base=500000.0, scaling=scaling).build(128).frequencies()
    for before, new in zip(plain.astype(np.float64), actual, strict=True):
        wavelength = 2 * np.pi / before
        if wavelength < 8192 / 4:
            expected = before
        elif wavelength > 8192:
            expected = before / 8
        else:
            smooth = (8192 / wavelength - 1) / 3
            expected = (1 - smooth) * before / 8 + smooth * before
        np.testing.assert_allclose(new, expected, rtol=1e-12)
    assert 0 < np.sum((actual < plain) & (actual > plain / 8 * 1.0001)) < 20


EXACT = {
    "relu": lambda x: np.maximum(x, 0),
    "squared_relu": lambda x: np.maximum(x, 0) ** 2,
    "quick_gelu": lambda x: x / (1 + np.exp(-1.702 * x)),
    "silu": lambda x: x / (1 + np.exp(-x)),
    "gelu": lambda x: x * 0.5 * (1 + np.vectorize(erf)(x / np.sqrt(2))),
    "gelu_tanh": lambda x: 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3))),
}


@pytest.mark.parametrize("activation", EXACT)
def test_dense_mlp(activation):
    module, w = weighted(DenseMLPConfig(ffn=20, activation=activation))
    x = RNG.normal(size=(2, 3, HIDDEN)).astype(np.float32)
    actual = applied(module, x)
    inner = EXACT[activation](x.astype(np.float64) @ w["up"] + w["up_bias"])
    np.testing.assert_allclose(actual, inner @ w["down"] + w["down_bias"], rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize(("activation", "bias"), [("silu", False), ("gelu", True)])
def test_gated_mlp(activation, bias):
    module, w = weighted(GatedMLPConfig(ffn=20, activation=activation, bias=bias))
    x = RNG.normal(size=(2, 3, HIDDEN)).astype(np.float32)
    actual = applied(module, x)
    gate, up = (x.astype(np.float64) @ w[name] + w.get(f"{name}_bias", 0) for name in ("gate", "up"))
    assert len(w) == (6 if bias else 3)
    exact = EXACT[activation](gate) * up @ w["down"] + w.get("down_bias", 0)
    np.testing.assert_allclose(actual, exact, rtol=1e-5, atol=1e-4)


def test_xielu_has_a_slope_of_each_side():
    module, w = weighted(XieluMLPConfig(ffn=20, bias=True))
    x = RNG.normal(size=(2, 3, HIDDEN)).astype(np.float32)
    actual = applied(module, x)
    up = x.astype(np.float64) @ w["up"] + w["up_bias"]
    above, below = (
        np.log1p(np.exp(w["positive"])) * up**2,
        (np.expm1(up) - up) * (0.5 + np.log1p(np.exp(w["negative"]))),
    )
    inner = np.where(up > 0, above, below) + 0.5 * up
    np.testing.assert_allclose(actual, inner @ w["down"] + w["down_bias"], rtol=1e-5, atol=1e-4)


def test_a_clamped_gated_mlp_clips_the_gate_above_and_the_other_on_both_sides():
    module, w = weighted(GatedMLPConfig(ffn=20, activation="quick_gelu", bias=True, clamp=0.7, offset=1.0))
    x = RNG.normal(size=(2, 3, HIDDEN)).astype(np.float32)
    actual = applied(module, x)
    gate, up = (x.astype(np.float64) @ w[name] + w[f"{name}_bias"] for name in ("gate", "up"))
    assert gate.max() > 0.7 and gate.min() < -0.7 and np.abs(up).max() > 0.7
    inner = EXACT["quick_gelu"](np.minimum(gate, 0.7)) * (np.clip(up, -0.7, 0.7) + 1)
    np.testing.assert_allclose(actual, inner @ w["down"] + w["down_bias"], rtol=1e-5, atol=1e-4)
