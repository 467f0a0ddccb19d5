"""Options of attention, each against an independent computation."""

from dataclasses import replace
from math import log

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from megajax.config.compose import problems_of
from megajax.layers.attention.config import AttentionConfig
from megajax.layers.attention.latent_config import LatentAttentionConfig
from megajax.layers.block.config import BlockConfig
from megajax.layers.context import Context
from megajax.layers.mlp.config import GatedMLPConfig
from megajax.layers.norm.config import RMSNormConfig
from megajax.layers.param import LayerSettings, bind, specs
from megajax.layers.position.config import AlibiConfig, RelativeBiasConfig, RopeConfig, YarnScalingConfig
from megajax.layers.position.module import bucket
from megajax.layers.stack.config import StackConfig
from megajax.mesh.config import ParallelConfig
from megajax.mesh.layout import Layout
from megajax.mesh.sharding_rules import Plan

HIDDEN, LENGTH = 12, 7
SETTINGS = LayerSettings(layout=Layout(Plan.of(ParallelConfig())), hidden=HIDDEN, std=0.3, output_std=0.3)
RNG = np.random.default_rng(0)
X = RNG.normal(size=(2, LENGTH, HIDDEN)).astype(np.float32)
CTX = Context(jnp.broadcast_to(jnp.arange(LENGTH), (2, LENGTH)), jnp.arange(LENGTH))


def layer_output(cfg) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """Output for X with random weights, and those weights."""
    module = cfg.build(SETTINGS)
    rng = np.random.default_rng(1)
    w = {path: rng.normal(0, 0.5, spec.shape).astype(np.float32) for path, spec in sorted(specs(module).items())}
    with jax.default_matmul_precision("highest"):
        out = bind(module, {path: jnp.asarray(value) for path, value in w.items()})(X, CTX)
    return np.asarray(out), {path: value.astype(np.float64) for path, value in w.items()}


def attended(q: np.ndarray, k: np.ndarray, v: np.ndarray, scale: float, bias: np.ndarray | float = 0.0) -> np.ndarray:
    """Causal, as many key heads as query heads; in float64."""
    scores = np.einsum("bsnh,btnh->bnst", q, k) * scale + bias
    scores = np.where(np.tril(np.ones((LENGTH, LENGTH), bool)), scores, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return np.einsum("bnst,btnu->bsnu", weights / weights.sum(-1, keepdims=True), v)


def rms(x: np.ndarray, gain: np.ndarray) -> np.ndarray:
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-5) * gain


def turned(x: np.ndarray) -> np.ndarray:
    """Neighbours, by wavelengths of base 10000."""
    size = x.shape[-1]
    angle = np.arange(LENGTH)[:, None, None] * 10000.0 ** (-np.arange(0, size, 2) / size)
    pairs = (x[..., ::2] + 1j * x[..., 1::2]) * np.exp(1j * angle)
    return np.stack([pairs.real, pairs.imag], axis=-1).reshape(x.shape)


def test_query_and_key_heads_are_normalised_separately_and_scaled_as_configured():
    cfg = AttentionConfig(heads=3, head_dim=4, qk_norm=RMSNormConfig(zero_centred=True), scale=0.7)
    actual, w = layer_output(cfg)
    q, k, v = (np.einsum("bsd,dnh->bsnh", X, w[name]) for name in ("query", "key", "value"))
    q, k = rms(q, 1 + w["query_norm.gain"]), rms(k, 1 + w["key_norm.gain"])
    np.testing.assert_allclose(actual, np.einsum("bsnh,nhd->bsd", attended(q, k, v, 0.7), w["output"]), atol=1e-4)


def test_a_gate_depends_on_the_input_and_is_applied_before_the_output_matrix():
    actual, w = layer_output(AttentionConfig(heads=3, head_dim=4, gate=True, qkv_bias=True))
    q, k, v, gate = (
        np.einsum("bsd,dnh->bsnh", X, w[name]) + w[f"{name}_bias"] for name in ("query", "key", "value", "gate")
    )
    mixed = attended(q, k, v, 0.5) / (1 + np.exp(-gate))
    assert "output_bias" not in w
    np.testing.assert_allclose(actual, np.einsum("bsnh,nhd->bsd", mixed, w["output"]), atol=1e-4)


def test_relative_bias_is_looked_up_by_distance():
    actual, w = layer_output(AttentionConfig(heads=3, head_dim=4, relative=RelativeBiasConfig(buckets=8, distance=20)))
    q, k, v = (np.einsum("bsd,dnh->bsnh", X, w[name]) for name in ("query", "key", "value"))
    distance = np.arange(LENGTH)[:, None] - np.arange(LENGTH)
    # Below 4 one by one; 4, 5 and 6 are 4 ln(far / 4) / ln(5) = 0, 0.55 and 1.01 steps beyond.
    number = np.array([0, 1, 2, 3, 4, 4, 5])[np.maximum(distance, 0)]
    bias = w["core.relative.table"][number].transpose(2, 0, 1)
    np.testing.assert_allclose(actual, np.einsum("bsnh,nhd->bsd", attended(q, k, v, 0.5, bias), w["output"]), atol=1e-4)


def test_alibi_falls_with_the_distance_by_the_slope_of_each_head():
    """Slopes of 5 heads: those of 4, and the first of 8."""
    actual, w = layer_output(AttentionConfig(heads=5, head_dim=4, relative=AlibiConfig(factor=0.5)))
    q, k, v = (np.einsum("bsd,dnh->bsnh", X, w[name]) for name in ("query", "key", "value"))
    slopes = np.array([1 / 4, 1 / 16, 1 / 64, 1 / 256, 1 / 2]) / 2
    bias = (np.arange(LENGTH) - np.arange(LENGTH)[:, None]) * slopes[:, None, None]
    np.testing.assert_allclose(actual, np.einsum("bsnh,nhd->bsd", attended(q, k, v, 0.5, bias), w["output"]), atol=1e-4)
    assert AlibiConfig().slopes(12)[8:] == [2 ** (-0.5 * i) for i in (1, 3, 5, 7)]


def test_buckets_equal_those_of_t5():
    """32 buckets both ways: 16 each, 8 of them of one distance, the last from 128 on."""
    two_way = RelativeBiasConfig(both_ways=True)
    after = np.array([0, -1, 1, -7, 7, -8, 8, -127, 127, -128, -5000, 5000], np.int32)
    expected = [0, 1, 17, 7, 23, 8, 24, 15, 31, 15, 15, 31]
    np.testing.assert_array_equal(bucket(two_way, after), expected)
    causal = RelativeBiasConfig()
    np.testing.assert_array_equal(bucket(causal, np.array([5, 0, -15, -16, -128, -9999])), [0, 0, 15, 16, 31, 31])


@pytest.mark.parametrize("rank", [None, 5])
def test_latent_attention(rank):
    cfg = LatentAttentionConfig(
        heads=3,
        query_rank=rank,
        key_value_rank=6,
        content_dim=4,
        position_dim=2,
        value_dim=5,
        bias=True,
        latent_bias=True,
    )
    actual, w = layer_output(cfg)
    queries = X if rank is None else rms(X @ w["query_down"] + w["query_down_bias"], w["query_norm.gain"])
    latent = rms(X @ w["down"] + w["down_bias"], w["norm.gain"])
    q = np.einsum("bsr,rnh->bsnh", queries, w["query"])
    k, v = (np.einsum("bsr,rnh->bsnh", latent, w[name]) for name in ("key", "value"))
    place = turned((X @ w["position_key"] + w["position_key_bias"])[:, :, None])
    q = np.concatenate([q[..., :4], turned(q[..., 4:])], axis=-1)
    k = np.concatenate([k, np.repeat(place, 3, axis=2)], axis=-1)
    mixed = attended(q, k, v, 6**-0.5)
    np.testing.assert_allclose(actual, np.einsum("bsnu,nud->bsd", mixed, w["output"]) + w["output_bias"], atol=1e-4)


def test_yarn_scales_all_scores_of_latent_attention():
    yarn = YarnScalingConfig(factor=40.0, mscale=1.0, mscale_all=1.0)
    cfg = LatentAttentionConfig(heads=2, key_value_rank=6, content_dim=4, position_dim=2, value_dim=4)
    longer = replace(cfg, rope=RopeConfig(interleaved=True, scaling=yarn))
    assert longer.build(SETTINGS).core.scale == pytest.approx(6**-0.5 * (0.1 * log(40) + 1) ** 2)
    assert cfg.build(SETTINGS).core.scale == pytest.approx(6**-0.5)


def test_the_shortest_pattern_of_blocks():
    full = BlockConfig(mixer=AttentionConfig(heads=2), mlp=GatedMLPConfig(ffn=8))
    local = replace(full, mixer=AttentionConfig(heads=2, window=4))
    assert StackConfig.of([full] * 5) == StackConfig(pattern=(full,), repeats=5)
    assert StackConfig.of([local, local, full] * 2) == StackConfig(pattern=(local, local, full), repeats=2)
    assert StackConfig.of([local, local, full, local]) == StackConfig(pattern=(local, local, full, local), repeats=1)


@pytest.mark.parametrize(
    ("cfg", "message"),
    [
        (AttentionConfig(heads=2, window=-1), "window: must be at least 0, got -1"),
        (AttentionConfig(heads=2, scale=0.0), "scale: must be above 0"),
        (AttentionConfig(heads=2, kernel="cudnn", dropout=0.1), "kernel: cuDNN's attention has no dropout"),
        (
            AttentionConfig(heads=2, kernel="cudnn", relative=RelativeBiasConfig()),
            "kernel: cuDNN's attention has no bias of scores",
        ),
        (LatentAttentionConfig(heads=2, key_value_rank=0), "key_value_rank: must be at least 1, got 0"),
        (
            LatentAttentionConfig(heads=2, content_dim=8, position_dim=4, value_dim=16, kernel="cudnn"),
            "kernel: cuDNN's attention takes heads of a multiple of 8, not of 12 with values of 16",
        ),
        (RelativeBiasConfig(buckets=7), "buckets: must be an even number"),
        (RelativeBiasConfig(buckets=32, distance=16), "distance: must be above 16"),
        (RopeConfig(fraction=0.0), "fraction: must be above 0 and at most 1, got 0"),
        (RopeConfig(interpolation=0.0), "interpolation: must be above 0"),
        (YarnScalingConfig(factor=2.0, slow=40.0), "slow: must be at most fast, got slow=40.0 and fast=32.0"),
        (YarnScalingConfig(factor=2.0, mscale=1.0), "mscale: must be given together with mscale_all"),
        (GatedMLPConfig(ffn=8, clamp=-1.0), "clamp: must be above 0"),
    ],
)
def test_problems_are_named(cfg, message):
    (problem,) = problems_of(cfg)
    assert str(problem).startswith(message)


def test_problems_that_depend_on_the_model():
    attention = AttentionConfig(heads=2, window=16, rope=RopeConfig(fraction=0.3))
    problems = [str(problem) for problem in attention.shape_problems(hidden=20, length=16)]
    assert problems[0].startswith("window: 16 reaches beyond sequence_length=16")
    assert problems[1].startswith("rope: rotary positions need an even head size, got 3, 0.3 of 10")
    latent = LatentAttentionConfig(heads=2, position_dim=5)
    assert [problem.setting for problem in latent.shape_problems(hidden=7, length=4)] == ["rope"]
