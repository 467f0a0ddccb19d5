"""Tiny decoders with every kind of layer, head and loss, and the batches that they read: for tests/one_device.py."""

from dataclasses import replace
from typing import Any

import numpy as np
from tiny_runs import LENGTH, ROWS, VOCABULARY, gpt, llama, rows

from megajax.batch import Batch
from megajax.layers.attention.config import AttentionConfig
from megajax.layers.attention.latent_config import LatentAttentionConfig
from megajax.layers.block.config import BlockConfig
from megajax.layers.delta.config import GatedDeltaNetConfig, KimiDeltaConfig
from megajax.layers.linear.config import LightningAttentionConfig, ShortConvConfig
from megajax.layers.lora.config import LoRAConfig
from megajax.layers.mamba.config import Mamba1Config, Mamba2Config
from megajax.layers.mlp.config import GatedMLPConfig, XieluMLPConfig
from megajax.layers.moe.config import CapacityConfig, DispatchConfig, MoEConfig, RouterConfig, SharedExpertConfig
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
from megajax.models.answers.config import (
    AnswerDecoderConfig,
    DPOConfig,
    GRPOConfig,
    KTOConfig,
    ObjectiveConfig,
    ORPOConfig,
    with_objective,
)
from megajax.models.decoder.config import DecoderConfig, PredictionConfig, WidthScalingConfig
from megajax.models.distilled.config import DistillationConfig, DistilledDecoderConfig, with_teacher

EXPERTS = 8
ROUTERS = {
    "losses": RouterConfig(aux_loss=0.01, row_loss=0.01, z_loss=0.001),
    "biased": RouterConfig(
        score="sigmoid", scale=1.5, groups=4, chosen_groups=1, balance_rate=0.01, global_loss=0.01, jitter=0.1
    ),
    "drops": RouterConfig(aux_loss=0.01, capacity=CapacityConfig(factor=0.7), jitter=0.1),
    "drops-by-position": RouterConfig(aux_loss=0.01, capacity=CapacityConfig(factor=0.7, drop="position")),
    "sinkhorn": RouterConfig(sinkhorn=True, score="sigmoid"),
}


def moe(*routers: RouterConfig, repeats: int = 2) -> DecoderConfig:
    """Layers of eight experts and a shared one by each router, by turns."""
    model = llama(repeats=repeats)
    (block,) = model.stack.pattern
    shared = SharedExpertConfig(mlp=GatedMLPConfig(ffn=16), gate=True)
    pattern = tuple(
        replace(block, mlp=MoEConfig(experts=EXPERTS, expert=GatedMLPConfig(ffn=16), router=router, shared=shared))
        for router in routers
    )
    return replace(model, stack=replace(model.stack, pattern=pattern))


def dispatched(model: DecoderConfig, dispatch: DispatchConfig) -> DecoderConfig:
    """The model whose tokens go to experts in this way."""
    pattern = tuple(replace(block, mlp=replace(block.mlp, dispatch=dispatch)) for block in model.stack.pattern)
    return replace(model, stack=replace(model.stack, pattern=pattern))


MIXTURE = MoEConfig(experts=4, expert=GatedMLPConfig(ffn=16), router=RouterConfig(z_loss=1e-3))
ATTENTION = AttentionConfig(heads=4, kv_heads=2, rope=RopeConfig())
BLOCKS = {
    "M": BlockConfig(mixer=Mamba2Config(heads=4, head_dim=16, state=8, groups=2, chunk=8), dropout=0.1),
    "*": BlockConfig(mixer=ATTENTION),
    "-": BlockConfig(mlp=GatedMLPConfig(ffn=48)),
    "E": BlockConfig(mlp=MIXTURE),
    "d": BlockConfig(mixer=ATTENTION, mlp=GatedMLPConfig(ffn=48)),
    "e": BlockConfig(mixer=ATTENTION, mlp=MIXTURE),
}


def hybrid(pattern: str, **settings: Any) -> DecoderConfig:
    """Layers that differ and repeat no pattern."""
    return replace(llama(), stack=SegmentsConfig.of([BLOCKS[letter] for letter in pattern]), **settings)


def windows(repeats: int = 1) -> DecoderConfig:
    """By turns a window with a learned sink and all earlier positions with a sink of 0."""
    (block,) = llama().stack.pattern
    windowed = replace(block, mixer=replace(block.mixer, window=9, sink="learned"))
    unwindowed = replace(block, mixer=replace(block.mixer, sink="zero"))
    return replace(llama(), stack=StackConfig(pattern=(windowed, unwindowed), repeats=repeats))


LATENT = LatentAttentionConfig(heads=8, query_rank=24, key_value_rank=16, content_dim=8, position_dim=4, value_dim=8)
"""Query and key heads of 12, value heads of 8, a part of keys that all heads share."""

RECURRENCES = {
    "mamba2": Mamba2Config(heads=4, head_dim=6, state=5, groups=2, chunk=8, bias=True),
    "mamba2-one-group": Mamba2Config(heads=4, head_dim=6, state=5, groups=1, chunk=8),
    "mamba1": Mamba1Config(inner=24, rank=4, state=5, chunk=4, bias=True),
    "delta-net": GatedDeltaNetConfig(heads=4, key_heads=2, head_dim=6, key_dim=5, chunk=16),
    "delta-by-channel": KimiDeltaConfig(heads=4, head_dim=6, key_dim=5, gate_rank=3, chunk=16),
    "delta-one-key-head": GatedDeltaNetConfig(heads=4, key_heads=1, head_dim=6, key_dim=5, chunk=16),
}


def recurrent(*names: str) -> DecoderConfig:
    """Layers of these recurrences by turns, each with a feed-forward layer."""
    pattern = tuple(BlockConfig(mixer=RECURRENCES[name], mlp=GatedMLPConfig(ffn=48)) for name in names)
    return replace(llama(), stack=StackConfig(pattern=pattern, repeats=2))


PLAIN = AttentionConfig(heads=4, kv_heads=2, rope=RopeConfig())
CENTRED = RMSNormConfig(zero_centred=True)
SHARED_TABLE = RelativeBiasConfig(buckets=8, shared=True)
SPACE = {"heads": 4, "head_dim": 6, "state": 5, "chunk": 8}
BLOCK = BlockConfig(mixer=PLAIN, mlp=GatedMLPConfig(ffn=24), norm=CENTRED)


def varied(*blocks: BlockConfig, **changes: Any) -> DecoderConfig:
    """One layer of each block."""
    return DecoderConfig(
        hidden=16,
        vocabulary_size=VOCABULARY,
        sequence_length=LENGTH,
        stack=StackConfig(pattern=blocks, repeats=1),
        norm=CENTRED,
        loss_chunk=16,
        init_std=0.2,
        **changes,
    )


def of_attention() -> DecoderConfig:
    """Norms of queries and keys, biases, windows, sinks, gates, latents, and kinds of positions."""
    latent = LatentAttentionConfig(
        heads=4,
        query_rank=6,
        key_value_rank=8,
        content_dim=4,
        position_dim=2,
        value_dim=5,
        latent_bias=True,
        sink="learned",
        rope=RopeConfig(scaling=YarnScalingConfig(factor=4.0, original=8, mscale=1.0, mscale_all=0.5)),
    )
    mixers = (
        replace(PLAIN, qk_norm=CENTRED, qkv_bias=True, window=3),
        replace(
            PLAIN,
            qk_norm=L2NormConfig(),
            sink="learned",
            gate=True,
            qkv_bias=True,
            rope=RopeConfig(fraction=0.5, interleaved=True, interpolation=2.0),
        ),
        latent,
        replace(PLAIN, rope=None, relative=SHARED_TABLE),
        replace(PLAIN, rope=None, relative=SHARED_TABLE, window=3, qk_norm=LayerNormConfig()),
    )
    return varied(*(replace(BLOCK, mixer=mixer) for mixer in mixers))


def of_others() -> DecoderConfig:
    """Recurrences, and settings of the whole decoder."""
    mixers = (
        replace(PLAIN, rope=None, relative=RelativeBiasConfig(buckets=8), sink="zero"),
        LatentAttentionConfig(heads=2, key_value_rank=8, content_dim=4, position_dim=2, value_dim=4, norm=None),
        Mamba2Config(**SPACE, groups=2),  # Groups are cut.
        Mamba2Config(**SPACE, groups=1, bias=True, conv_bias=False, norm_before_gate=True),  # The group is copied.
        Mamba1Config(inner=24, rank=3, state=4, bias=True, chunk=5, inner_norm=CENTRED),
        replace(PLAIN, qk_norm=CENTRED, rope=None, relative=AlibiConfig()),
    )
    return varied(
        *(replace(BLOCK, mixer=mixer) for mixer in mixers),
        embedding_norm=LayerNormConfig(),
        first_position=2,
        prediction=PredictionConfig(depth=2, weight=0.5),
        learned_positions=True,
        tied=True,
        head_bias=True,
        width_scaling=WidthScalingConfig(base_hidden=8, embedding=2.0),
    )


def of_families() -> DecoderConfig:
    """What the families of 2025 add."""
    long = LongRopeScalingConfig(short=(1.0, 1.2), long=(1.5, 3.0), original=8, factor=4.0)
    weights = SumWeightsConfig(mixer_stream=1.5, mixer_output=0.7, mlp_stream=1.2, mlp_output=0.9)
    blocks = (
        replace(BLOCK, mixer=replace(PLAIN, score_cap=2.0, window=3), norm_placement="sandwich"),
        replace(
            BLOCK,
            mixer=replace(PLAIN, head_dim=4, rope=RopeConfig(base=100.0, scaling=long)),
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
            sum_weights=weights,
        ),
        replace(
            BLOCK,
            mixer=replace(PLAIN, qk_norm=CENTRED, qk_norm_after_rope=True, qkv_clip=0.5),
            norm=LayerNormConfig(gain=False, bias=False),
            norm_placement="parallel_norms",
        ),
    )
    scaling = WidthScalingConfig(base_hidden=16, embedding=2.0, output=0.5)
    return varied(*blocks, logit_cap=3.0, width_scaling=scaling)


VARIANTS = {"of-attention": of_attention(), "of-others": of_others(), "of-families": of_families()}


def in_segments(model: DecoderConfig) -> DecoderConfig:
    """The same layers, as a pipeline takes them."""
    return replace(model, stack=SegmentsConfig.of(model.stack.pattern))


LORA = LoRAConfig(rank=4, alpha=8.0)


def adapted_experts() -> DecoderConfig:
    """Adapters of a llama with experts in its second block, and of a head that predicts further ahead."""
    model = llama(repeats=1)
    (block,) = model.stack.pattern
    mixture = replace(block, mlp=MoEConfig(experts=4, top_k=2, expert=GatedMLPConfig(ffn=16)))
    stack = replace(model.stack, pattern=(block, mixture))
    return replace(model, stack=stack, prediction=PredictionConfig(block=block), lora=LORA)


OBJECTIVES: dict[str, ObjectiveConfig] = {
    "dpo": DPOConfig(beta=0.3, label_smoothing=0.1, length_weight=0.5, sft_weight=0.2),
    "kto": KTOConfig(beta=0.5, desirable_weight=1.5),
    "grpo": GRPOConfig(kl_weight=0.1, clip_high=0.28, entropy_weight=0.3),
    "gspo": GRPOConfig(ratio="sequence", average="tokens"),
    "cispo": GRPOConfig(loss="cispo", clip_high=1.5, average="length", length=3),
    "orpo": ORPOConfig(),
}


def answering(objective: ObjectiveConfig, repeats: int = 2) -> AnswerDecoderConfig:
    """With a soft cap of logits."""
    return with_objective(replace(llama(repeats=repeats), logit_cap=5.0), objective)


def answers(seed: int) -> Batch:
    """Rows of four documents with answers of one to three tokens: two pairs, or a judged group and one answer more."""
    batch, draw = rows(seed), np.random.default_rng(seed)
    document, place_in_document = np.divmod(np.arange(LENGTH, dtype=np.int32), LENGTH // 4)
    document, position = (np.tile(values, (ROWS, 1)) for values in (document, place_in_document))
    lengths = draw.integers(1, 4, (ROWS, 4))
    inside = position < lengths[np.arange(ROWS)[:, None], document]
    numbers = np.where(inside, document + 1, 0).astype(np.int32)
    # The last row has no second pair.
    numbers[-1, LENGTH // 2 :] = 0
    return batch | {
        "segment_ids": document,
        "positions": position,
        "loss_mask": (numbers > 0).astype(np.float32),
        "pairs": numbers,
        "judged": numbers,
        "answers": numbers,
        "advantage": draw.normal(0, 1, (ROWS, 4)).astype(np.float32)[np.arange(ROWS)[:, None], document],
        "old_log_p": draw.normal(-5.5, 0.5, (ROWS, LENGTH)).astype(np.float32),
        "reference": draw.normal(-5, 1, (ROWS, LENGTH)).astype(np.float32),
    }


def replaying() -> AnswerDecoderConfig:
    """Layers of experts that take the choices of a rollout."""
    model = moe(RouterConfig(score="sigmoid", balance_rate=0.1), repeats=4)
    return with_objective(model, GRPOConfig(router_replay="rollout"))


def with_experts(seed: int) -> Batch:
    """Experts of four fifths of the tokens, which differ from layer to layer."""
    shape = replaying().schema()["experts"].shape
    draw = np.random.default_rng(seed)
    experts = 1 + np.argsort(draw.normal(size=(ROWS, *shape[:2], EXPERTS)), axis=-1)[..., : shape[2]]
    given = draw.random((ROWS, shape[0], 1, 1)) < 0.8
    return answers(seed) | {"experts": (experts * given).astype(np.int16)}


DISTILLATION = DistillationConfig(mixture=0.3, temperature=2.0, weight=0.7, label_weight=0.4)
TEACHER = replace(gpt("selective", repeats=1), hidden=48, sequence_length=LENGTH + 2, logit_cap=3.0)


def distilled() -> DistilledDecoderConfig:
    """A student with capped logits, and a wider teacher of another kind, with dropout that must not act."""
    return with_teacher(replace(llama(repeats=1), logit_cap=5.0), TEACHER, DISTILLATION)
