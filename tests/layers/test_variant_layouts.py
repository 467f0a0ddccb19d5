"""Every variant of a layer on several devices against one: losses and gradients of a whole model."""

from dataclasses import replace
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from megajax.batch import Batch, batch_schema
from megajax.layers.attention.config import AttentionConfig
from megajax.layers.attention.latent_config import LatentAttentionConfig
from megajax.layers.block.config import BlockConfig
from megajax.layers.linear.config import LightningAttentionConfig, ShortConvConfig
from megajax.layers.mamba.config import Mamba1Config, Mamba2Config
from megajax.layers.mlp.config import GatedMLPConfig, XieluMLPConfig
from megajax.layers.norm.config import FixedScaleConfig, L2NormConfig, LayerNormConfig, RMSNormConfig, SumWeightsConfig
from megajax.layers.param import Normal, specs
from megajax.layers.position.config import (
    AlibiConfig,
    LongRopeScalingConfig,
    RelativeBiasConfig,
    RopeConfig,
    TemperatureConfig,
    YarnScalingConfig,
)
from megajax.layers.stack.config import StackConfig
from megajax.mesh.config import ParallelConfig
from megajax.mesh.layout import Layout
from megajax.mesh.mesh import build_mesh
from megajax.mesh.rules import Plan
from megajax.models.decoder.config import DecoderConfig, PredictionConfig, WidthScalingConfig
from megajax.models.reduction import LossReduction
from megajax.precision.config import PrecisionConfig
from megajax.training.gradients.accumulate import accumulate
from megajax.training.gradients.grads import Weights
from megajax.training.gradients.staged import staged
from megajax.training.state import parameter_shardings

ROWS, LENGTH, VOCABULARY = 4, 12, 61
PLAIN = AttentionConfig(heads=4, kv_heads=2, rope=RopeConfig())
CENTRED = RMSNormConfig(zero_centred=True)
SHARED = RelativeBiasConfig(buckets=8, shared=True)
SPACE = {"heads": 4, "head_dim": 6, "state": 5, "chunk": 8}


def model(mixer, *mixers, norm=CENTRED, **changes) -> DecoderConfig:
    blocks = [BlockConfig(mixer=part, mlp=GatedMLPConfig(ffn=24), norm=norm) for part in (mixer, *mixers)]
    return DecoderConfig(
        hidden=16,
        vocabulary_size=VOCABULARY,
        vocabulary_multiple=16,
        sequence_length=LENGTH,
        stack=StackConfig(pattern=tuple(blocks), repeats=1),
        norm=norm,
        loss_chunk=16,
        init_std=0.2,
        **changes,
    )


BLOCK = BlockConfig(mixer=PLAIN, mlp=GatedMLPConfig(ffn=24), norm=CENTRED)
LONG = LongRopeScalingConfig(short=(1.0, 1.2), long=(1.5, 3.0), original=8, factor=4.0)
WEIGHTS = SumWeightsConfig(mixer_stream=1.5, mixer_output=0.7, mlp_stream=1.2, mlp_output=0.9)
FAMILIES = (
    replace(BLOCK, mixer=replace(PLAIN, score_cap=2.0, window=3), norm_placement="sandwich"),
    replace(
        BLOCK,
        mixer=replace(PLAIN, head_dim=4, rope=RopeConfig(base=100.0, scaling=LONG)),
        layer_scale=FixedScaleConfig(factor=0.4),
    ),
    replace(BLOCK, mlp=XieluMLPConfig(ffn=24), norm=LayerNormConfig(bias=False), norm_placement="parallel"),
    replace(BLOCK, mixer=replace(PLAIN, chunk=4, qk_norm=L2NormConfig()), norm_placement="output"),
    replace(
        BLOCK,
        mixer=replace(PLAIN, rope=None, temperature=TemperatureConfig(scale=0.5, length=3)),
        beside=Mamba2Config(**SPACE, groups=2, normalised=False, input_factors=(0.5, 1.5, 2.0, 0.7, 1.2)),
        mlp=GatedMLPConfig(ffn=24, gate_factor=0.6),
        sum_weights=SumWeightsConfig(mixer_output=0.8, beside_output=1.3, mlp_output=0.9),
    ),
    replace(BLOCK, mixer=ShortConvConfig(channels=24, bias=True, conv_bias=True)),
    replace(
        BLOCK,
        mixer=LightningAttentionConfig(heads=4, head_dim=6, layers=7, chunk=8),
        norm_placement="input",
        sum_weights=WEIGHTS,
    ),
    replace(
        BLOCK,
        mixer=replace(PLAIN, qk_norm=CENTRED, qk_norm_after_rope=True, qkv_clip=0.5),
        norm=LayerNormConfig(gain=False, bias=False),
        norm_placement="parallel_norms",
    ),
)
"""What the families of 2025 add."""
MODELS = {
    "attention": model(
        replace(PLAIN, qk_norm=CENTRED, qkv_bias=True, window=3),
        replace(
            PLAIN,
            qk_norm=L2NormConfig(),
            sink="learned",
            gate=True,
            qkv_bias=True,
            rope=RopeConfig(fraction=0.5, interleaved=True, interpolation=2.0),
        ),
        LatentAttentionConfig(
            heads=4,
            query_rank=6,
            key_value_rank=8,
            content_dim=4,
            position_dim=2,
            value_dim=5,
            latent_bias=True,
            sink="learned",
            rope=RopeConfig(scaling=YarnScalingConfig(factor=4.0, original=8, mscale=1.0, mscale_all=0.5)),
        ),
        replace(PLAIN, rope=None, relative=SHARED),
        replace(PLAIN, rope=None, relative=SHARED, window=3, qk_norm=LayerNormConfig()),
    ),
    "others": model(
        replace(PLAIN, rope=None, relative=RelativeBiasConfig(buckets=8), sink="zero"),
        LatentAttentionConfig(heads=2, key_value_rank=8, content_dim=4, position_dim=2, value_dim=4, norm=None),
        Mamba2Config(**SPACE, groups=2),  # Groups are cut.
        Mamba2Config(**SPACE, groups=1, bias=True, conv_bias=False, norm_before_gate=True),  # The group is copied.
        Mamba1Config(inner=24, rank=3, state=4, bias=True, chunk=5, inner_norm=CENTRED),
        replace(PLAIN, qk_norm=CENTRED, rope=None, relative=AlibiConfig()),
        embedding_norm=LayerNormConfig(),
        first_position=2,
        prediction=PredictionConfig(depth=2, weight=0.5),
        learned_positions=True,
        tied=True,
        head_bias=True,
        width_scaling=WidthScalingConfig(base_hidden=8, embedding=2.0),
        recompute="none",
    ),
    "families": replace(
        model(PLAIN, logit_cap=3.0, width_scaling=WidthScalingConfig(base_hidden=16, embedding=2.0, output=0.5)),
        stack=StackConfig(pattern=FAMILIES, repeats=1),
    ),
}
"""Every variant in one of the programs: a weight's path names the layer that differs."""
LAYOUTS = {
    "tensor": ParallelConfig(data=1, tensor=2),
    "fsdp and sequence": ParallelConfig(data=2, tensor=2, sequence=True, data_sharding="fsdp"),
}


def batch() -> Batch:
    """Leaves [1, ROWS, LENGTH], two documents a row."""
    rng = np.random.default_rng(0)
    text = rng.integers(0, VOCABULARY, (1, ROWS, LENGTH + 1), dtype=np.int32)
    segments = np.broadcast_to(np.arange(LENGTH, dtype=np.int32) // 7, (1, ROWS, LENGTH))
    mask = (rng.random((1, ROWS, LENGTH)) < 0.8).astype(np.float32)
    positions = np.broadcast_to(np.arange(LENGTH, dtype=np.int32), (1, ROWS, LENGTH))
    leaves = {"tokens": text[..., :-1], "labels": text[..., 1:], "loss_mask": mask}
    sample = np.arange(ROWS, dtype=np.uint32)[None]
    return {**leaves, "positions": positions, "segment_ids": segments, "sample": sample}


@cache
def gradients(name: str, parallel: ParallelConfig) -> tuple[dict[str, float], dict[str, np.ndarray]]:
    """(what is reported and the loss that is minimised, gradients by path), with isolated documents."""
    cfg, plan = MODELS[name], Plan.of(parallel)
    if parallel.data_sharding == "fsdp":
        cfg = replace(cfg, recompute="selective")
    layout, mesh = (
        Layout(plan),
        build_mesh(parallel, jax.devices()[: parallel.data * parallel.tensor]),
    )
    abstract = nnx.eval_shape(lambda: cfg.build(layout))
    declared = specs(abstract)
    rng = np.random.default_rng(1)
    params = {}
    for path in sorted(declared):
        spec = declared[path]
        gaussian = isinstance(spec.init, Normal)
        values = rng.normal(0, spec.init.std if gaussian else 0.2, spec.shape)
        mean = 0 if gaussian else np.asarray(spec.init.draw(jax.random.key(len(path)), spec.shape))
        params[path] = (values + mean).astype(np.float32)
    schema = batch_schema(cfg.schema(), batch())
    weights = Weights(abstract, declared, schema, layout, PrecisionConfig(compute="float32"))
    grad_fn = accumulate(weights, staged(abstract, declared, LossReduction(), None), mesh)
    with jax.set_mesh(mesh), jax.default_matmul_precision("highest"):
        placed = jax.device_put(params, parameter_shardings(declared, plan.params, mesh))
        out = jax.device_get(jax.jit(grad_fn)(placed, batch(), jnp.ones(())))
    reported = {key: float(total / count) for key, (total, count) in out.metrics.items()}
    return reported | {"minimised": float(out.loss_sum / out.weight_sum)}, dict(out.grads)


def test_the_variants_are_legal():
    for name, cfg in MODELS.items():
        problems = cfg.problems() + [
            p for block in cfg.stack.pattern for p in (*block.problems(), *block.mixer.problems())
        ]
        assert not problems, name


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_losses_equal_those_of_one_device(name, layout):
    losses, expected = gradients(name, ParallelConfig(data=1))
    actual, grads = gradients(name, LAYOUTS[layout])
    if name == "others":
        assert set(losses) == {"loss", "loss_2_ahead", "loss_3_ahead", "minimised"}
        assert losses["minimised"] > losses["loss"] + 0.1
    assert grads.keys() == expected.keys()
    for key, value in losses.items():
        np.testing.assert_allclose(actual[key], value, rtol=1e-5, err_msg=key)
    top = max(np.abs(g).max() for g in expected.values())
    for path, g in expected.items():
        # The gradient of a key's bias without rotation is zero except for rounding.
        scale = top if path.endswith("key_norm.bias") else max(np.abs(g).max(), 1e-3 * top)
        np.testing.assert_allclose(grads[path], g, atol=1e-5 * scale, err_msg=path)
