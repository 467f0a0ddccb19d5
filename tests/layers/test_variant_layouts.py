"""Every variant of a layer on several devices against one: losses and gradients of a whole model."""

from dataclasses import replace

import numpy as np
import pytest
from tiny_runs import LENGTH, ONE, VOCABULARY, assert_close, differentiate

from megajax.config.compose import problems_of
from megajax.layers.attention.config import AttentionConfig
from megajax.layers.attention.latent_config import LatentAttentionConfig
from megajax.layers.block.config import BlockConfig
from megajax.layers.linear.config import LightningAttentionConfig, ShortConvConfig
from megajax.layers.mamba.config import Mamba1Config, Mamba2Config
from megajax.layers.mlp.config import GatedMLPConfig, XieluMLPConfig
from megajax.layers.norm.config import FixedScaleConfig, L2NormConfig, LayerNormConfig, RMSNormConfig, SumWeightsConfig
from megajax.layers.position.config import (
    AlibiConfig,
    LongRopeScalingConfig,
    RelativeBiasConfig,
    RopeConfig,
    TemperatureConfig,
    YarnScalingConfig,
)
from megajax.layers.stack.config import SegmentsConfig, StackConfig
from megajax.mesh.config import ParallelConfig
from megajax.models.decoder.config import DecoderConfig, PredictionConfig, WidthScalingConfig

PLAIN = AttentionConfig(heads=4, kv_heads=2, rope=RopeConfig())
CENTRED = RMSNormConfig(zero_centred=True)
SHARED = RelativeBiasConfig(buckets=8, shared=True)
SPACE = {"heads": 4, "head_dim": 6, "state": 5, "chunk": 8}


def model(mixer, *mixers, norm=CENTRED, **changes) -> DecoderConfig:
    blocks = [BlockConfig(mixer=part, mlp=GatedMLPConfig(ffn=24), norm=norm) for part in (mixer, *mixers)]
    return DecoderConfig(
        hidden=16,
        vocabulary_size=VOCABULARY,
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
SEGMENTS = {name: replace(cfg, stack=SegmentsConfig.of(cfg.stack.pattern)) for name, cfg in MODELS.items()}
TENSOR = ParallelConfig(data=1, tensor=2)
FSDP = ParallelConfig(data=2, tensor=2, sequence=True, data_sharding="fsdp")
STAGES = ParallelConfig(data=1, pipeline=2, tensor=2, sequence=True)
RING = ParallelConfig(data=1, context=2, context_strategy="ring")
CASES = {f"{name}, {layout}": (cfg, parallel) for name, cfg in MODELS.items()
         for layout, parallel in {"tensor": TENSOR, "fsdp and sequence": FSDP}.items()}  # fmt: skip
CASES |= {f"{name}, pipeline and tensor": (cfg, STAGES) for name, cfg in SEGMENTS.items()}
CASES |= {
    "families, pipeline and context": (SEGMENTS["families"], ParallelConfig(data=1, pipeline=2, context=2)),
    "families, ring": (SEGMENTS["families"], RING),
    "others, tensor and context": (MODELS["others"], ParallelConfig(data=1, tensor=2, context=2)),
}


def test_the_variants_are_legal():
    for name, cfg in MODELS.items():
        assert not problems_of(cfg), name


@pytest.mark.slow
@pytest.mark.parametrize(("cfg", "parallel"), CASES.values(), ids=CASES)
def test_losses_equal_those_of_one_device(cfg, parallel):
    if parallel.data_sharding == "fsdp":
        cfg = replace(cfg, recompute="selective")
    expected, actual = (differentiate(cfg, layout, microbatches=2) for layout in (ONE, parallel))
    assert actual.means == pytest.approx(expected.means, rel=1e-5)
    if cfg.prediction:
        assert set(expected.means) == {"loss", "loss_2_ahead", "loss_3_ahead", "minimised"}
        assert expected.means["minimised"] > expected.loss + 0.1
    assert actual.padding == 0
    biases = {path for path in expected.gradients if path.endswith("key_norm.bias")}
    for path in biases:
        # The gradient of a key's bias without rotation is zero except for rounding.
        top = max(np.abs(gradient).max() for gradient in expected.gradients.values())
        np.testing.assert_allclose(actual.gradients[path], expected.gradients[path], rtol=0, atol=1e-5 * top)
    others = [{path: g for path, g in run.gradients.items() if path not in biases} for run in (actual, expected)]
    assert_close(*others, floor=1e-3)
