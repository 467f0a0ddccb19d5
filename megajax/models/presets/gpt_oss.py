"""gpt-oss (OpenAI 2025, model card, section 2), as in the released configs."""

from dataclasses import replace

from megajax.layers.attention.config import AttentionConfig
from megajax.layers.block.config import BlockConfig
from megajax.layers.mlp.config import GatedMLPConfig
from megajax.layers.moe.config import MoEConfig, RouterConfig
from megajax.layers.norm.config import RMSNormConfig
from megajax.layers.position.config import RopeConfig, YarnScalingConfig
from megajax.models.decoder.config import DecoderConfig
from megajax.models.presets.sizes import Size, decoder, pick

GPT_OSS = {
    "debug": Size(4, 64, 4, 2, 64, head_dim=16, experts=8, top_k=4),
    "20b": Size(24, 2880, 64, 8, 2880, head_dim=64, experts=32, top_k=4),
    "120b": Size(36, 2880, 64, 8, 2880, head_dim=64, experts=128, top_k=4),
}


def gpt_oss(
    size: str, *, sequence_length: int = 131072, vocabulary_size: int = 201088, window: int = 128
) -> DecoderConfig:
    """gpt-oss: in every other layer a token sees only the last `window` tokens, including itself; heads have a learned
    sink.

    All layers and the router have biases. Experts compute (x up + 1) * x gate * sigmoid(1.702 x gate), with both
    products clipped at 7. YaRN extends RoPE from 4096 tokens to 131072. The model card does not say how experts were
    balanced; a loss is used here. Raises UserError for an unknown size.

    Example: `mj.gpt_oss("20b")`
    """
    row = pick("gpt_oss", GPT_OSS, size)
    yarn = YarnScalingConfig(factor=32.0, original=4096, fast=32.0, slow=1.0, rounded=False)
    full = AttentionConfig(
        heads=row.heads,
        kv_heads=row.kv_heads,
        head_dim=row.head_dim,
        bias=True,
        rope=RopeConfig(base=150000.0, scaling=yarn),
        sink="learned",
    )
    expert = GatedMLPConfig(ffn=row.ffn, activation="quick_gelu", bias=True, clamp=7.0, offset=1.0)
    block = BlockConfig(
        mixer=full,
        mlp=MoEConfig(
            experts=row.experts, top_k=row.top_k, expert=expert, router=RouterConfig(bias=True, aux_loss=0.001)
        ),
        norm=RMSNormConfig(),
    )
    windowed = replace(block, mixer=replace(full, window=window - 1))
    return decoder(row, windowed, block, sequence_length=sequence_length, vocabulary_size=vocabulary_size)
