"""Kimi Linear (Kimi Team 2025). The size of the released config."""

from dataclasses import replace

from megajax.layers.attention.latent_config import LatentAttentionConfig
from megajax.layers.block.config import BlockConfig
from megajax.layers.delta.config import KimiDeltaConfig
from megajax.layers.mlp.config import GatedMLPConfig
from megajax.layers.moe.config import MoEConfig, RouterConfig, SharedExpertConfig
from megajax.layers.norm.config import RMSNormConfig
from megajax.layers.stack.config import stack_of
from megajax.models.decoder.config import DecoderConfig
from megajax.models.presets.sizes import Size, pick

KIMI_LINEAR = {
    "debug": Size(5, 64, 4, ffn=48, head_dim=16, experts=8, top_k=2),
    "48b-a3b": Size(27, 2304, 32, ffn=1024, head_dim=128, experts=256, top_k=8),
}


def kimi_linear(size: str, *, sequence_length: int = 4096, vocabulary_size: int = 163840) -> DecoderConfig:
    """Kimi Linear: three gated delta nets that decay by channel, then latent attention without positions; experts.

    The first layer has no experts, and the last one has attention. Raises UserError for an unknown size.

    Example: `mj.kimi_linear("48b-a3b")`
    """
    row = pick("kimi_linear", KIMI_LINEAR, size)
    norm = RMSNormConfig(epsilon=1e-5)
    latent = LatentAttentionConfig(
        heads=row.heads,
        key_value_rank=4 * row.head_dim,
        content_dim=row.head_dim,
        position_dim=row.head_dim // 2,
        value_dim=row.head_dim,
        norm=RMSNormConfig(epsilon=1e-6),
        rope=None,
    )
    mlp = GatedMLPConfig(ffn=row.ffn)
    moe = MoEConfig(
        experts=row.experts,
        top_k=row.top_k,
        expert=mlp,
        shared=SharedExpertConfig(mlp=mlp),
        router=RouterConfig(score="sigmoid", scale=2.446, balance_rate=0.001, row_loss=0.0001),
    )
    delta = KimiDeltaConfig(heads=row.heads, head_dim=row.head_dim, key_dim=row.head_dim, norm_epsilon=1e-5)
    linear = BlockConfig(mixer=delta, mlp=moe, norm=norm)
    softmax = replace(linear, mixer=latent)
    blocks = [softmax if layer % 4 == 3 or layer == row.layers - 1 else linear for layer in range(row.layers)]
    blocks[0] = replace(linear, mlp=GatedMLPConfig(ffn=4 * row.hidden))
    return DecoderConfig(
        hidden=row.hidden,
        vocabulary_size=vocabulary_size,
        sequence_length=sequence_length,
        stack=stack_of(blocks),
        norm=norm,
    )
