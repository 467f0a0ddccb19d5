"""DeepSeek-V2-Lite (DeepSeek-AI 2024, DeepSeek-V2, appendix B) and V3 (2024, section 4.2), as in released configs.

Moonlight (Liu et al. 2025) and Kimi K2 (Kimi team 2025) have the layers of V3.
"""

from dataclasses import replace
from typing import NamedTuple

from megajax.layers.attention.latent_config import LatentAttentionConfig
from megajax.layers.block.config import BlockConfig
from megajax.layers.mlp.config import GatedMLPConfig
from megajax.layers.moe.config import DispatchConfig, MoEConfig, RouterConfig, SharedExpertConfig
from megajax.layers.norm.config import RMSNormConfig
from megajax.layers.position.config import RopeConfig, YarnScalingConfig
from megajax.layers.stack.config import SegmentsConfig, StackConfig
from megajax.models.decoder.config import DecoderConfig, PredictionConfig
from megajax.models.presets.sizes import pick


class DeepSeekSize(NamedTuple):
    """Dimensions of a size, its latent attention and its experts."""

    layers: int
    hidden: int
    dense: int
    """Number of dense layers at the start."""
    ffn: int
    """Width of their feed-forwards."""
    mixer: LatentAttentionConfig
    experts: int
    top_k: int
    expert_ffn: int
    shared: int
    """Number of shared experts, computed as one layer of their total width."""
    router: RouterConfig
    vocabulary: int = 0
    mscale: float = 1.0
    """mscale of YaRN, for rows of 160 k tokens."""
    ahead: bool = False
    """Whether a second head predicts the token after the next one."""
    epsilon: float = 1e-6
    """Of the norms of the residual stream."""


NORM = RMSNormConfig(epsilon=1e-6)
BY_LOSS = RouterConfig(normalise="all", row_loss=0.001)
SLOW = RopeConfig(base=50000.0, interleaved=True)
BY_BIAS = RouterConfig(score="sigmoid", scale=2.5, groups=8, chosen_groups=4, balance_rate=0.001, row_loss=0.0001)

DEEPSEEK = {
    "debug": DeepSeekSize(
        3, 64, 1, 160,
        LatentAttentionConfig(
            heads=4, query_rank=24, key_value_rank=32, content_dim=16, position_dim=8, value_dim=16, norm=NORM
        ),
        16, 4, 32, 1, replace(BY_BIAS, groups=4, chosen_groups=2), 129280, ahead=True,
    ),
    "v2-lite": DeepSeekSize(
        27, 2048, 1, 10944, LatentAttentionConfig(heads=16, norm=NORM), 64, 6, 1408, 2, BY_LOSS, 102400, mscale=0.707
    ),
    "v3": DeepSeekSize(
        61, 7168, 3, 18432, LatentAttentionConfig(heads=128, query_rank=1536, norm=NORM), 256, 8, 2048, 1, BY_BIAS,
        129280, ahead=True,
    ),
    "moonlight": DeepSeekSize(
        27, 2048, 1, 11264, LatentAttentionConfig(heads=16, norm=NORM, rope=SLOW), 64, 6, 1408, 2,
        replace(BY_BIAS, scale=2.446, groups=None, chosen_groups=None), 163840, epsilon=1e-5,
    ),
    "kimi-k2": DeepSeekSize(
        61, 7168, 1, 18432, LatentAttentionConfig(heads=64, query_rank=1536, norm=NORM, rope=SLOW), 384, 8, 2048, 1,
        replace(BY_BIAS, scale=2.827, groups=None, chosen_groups=None), 163840,
    ),
}  # fmt: skip


def deepseek(
    size: str,
    *,
    sequence_length: int = 4096,
    vocabulary_size: int | None = None,
    yarn: bool = False,
    dispatch: DispatchConfig | None = None,
) -> DecoderConfig:
    """DeepSeek: latent attention, shared experts, dense layers first. Raises UserError for an unknown size.

    V2-Lite balances experts with a loss over each row. V3 uses a bias on scores and a small loss, and also predicts the
    token after the next one; Moonlight and Kimi K2 don't predict it, and have no groups of experts. yarn: RoPE extended
    40 times from 4096 tokens, as after pretraining.

    Example: `mj.deepseek("v2-lite")`
    """
    row = pick("deepseek", DEEPSEEK, size)
    mixer = row.mixer
    if yarn and mixer.rope is not None:
        scaling = YarnScalingConfig(factor=40.0, original=4096, mscale=row.mscale, mscale_all=row.mscale)
        mixer = replace(mixer, rope=replace(mixer.rope, scaling=scaling))
    norm = RMSNormConfig(epsilon=row.epsilon)
    dense = BlockConfig(mixer=mixer, mlp=GatedMLPConfig(ffn=row.ffn), norm=norm)
    shared = SharedExpertConfig(mlp=GatedMLPConfig(ffn=row.shared * row.expert_ffn))
    experts = MoEConfig(
        experts=row.experts,
        top_k=row.top_k,
        expert=GatedMLPConfig(ffn=row.expert_ffn),
        router=row.router,
        shared=shared,
        dispatch=dispatch or DispatchConfig(),
    )
    first = StackConfig(pattern=(dense,), repeats=row.dense)
    rest = StackConfig(pattern=(replace(dense, mlp=experts),), repeats=row.layers - row.dense)
    return DecoderConfig(
        hidden=row.hidden,
        vocabulary_size=vocabulary_size or row.vocabulary,
        sequence_length=sequence_length,
        stack=SegmentsConfig(segments=(first, rest)),
        norm=norm,
        init_std=0.006,
        prediction=PredictionConfig(weight=0.3) if row.ahead else None,
        family="deepseek_v2" if row.router.score == "softmax" else "deepseek_v3",
    )
