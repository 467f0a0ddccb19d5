"""MiniMax-Text-01 and MiniMax-M2 (MiniMax 2025), Kimi Linear (Kimi Team 2025). The sizes of the released configs."""

from dataclasses import replace
from typing import Any

from megajax.layers.attention.config import AttentionConfig
from megajax.layers.attention.latent_config import LatentAttentionConfig
from megajax.layers.block.config import BlockConfig
from megajax.layers.delta.config import KimiDeltaConfig
from megajax.layers.linear.config import LightningAttentionConfig
from megajax.layers.mlp.config import GatedMLPConfig
from megajax.layers.moe.config import DispatchConfig, MoEConfig, RouterConfig, SharedExpertConfig
from megajax.layers.norm.config import RMSNormConfig, SumWeightsConfig
from megajax.layers.position.config import RopeConfig
from megajax.layers.stack.config import stack_of
from megajax.models.decoder.config import DecoderConfig
from megajax.models.presets.sizes import Size, decoder, pick

MINIMAX = {
    "debug": Size(4, 64, 4, 2, 48, head_dim=16, experts=8, top_k=2),
    "text-01": Size(80, 6144, 64, 8, 9216, head_dim=128, experts=32, top_k=2),
}
MINIMAX_M2 = {
    "debug": Size(4, 64, 4, 2, 32, head_dim=16, experts=16, top_k=4),
    "230b-a10b": Size(62, 3072, 48, 8, 1536, head_dim=128, experts=256, top_k=8),
}
STREAM = 3.5565588200778455
"""Factor on the residual stream: (2 * 80)^0.25, as in DeepNorm (Wang et al. 2022)."""


def minimax(
    size: str, *, sequence_length: int = 8192, vocabulary_size: int = 200064, dispatch: DispatchConfig | None = None
) -> DecoderConfig:
    """MiniMax: seven layers of lightning attention, then one of attention; experts in all. `debug` has three, then one.

    Raises UserError for an unknown size.

    Example: `mj.minimax("text-01")`
    """
    row = pick("minimax", MINIMAX, size)
    moe = MoEConfig(
        dispatch=dispatch or DispatchConfig(),
        experts=row.experts,
        top_k=row.top_k,
        expert=GatedMLPConfig(ffn=row.ffn),
        router=RouterConfig(aux_loss=0.001),
    )
    lightning = LightningAttentionConfig(heads=row.heads, head_dim=row.head_dim, layers=row.layers)
    weights = SumWeightsConfig(mixer_stream=STREAM, mlp_stream=STREAM)
    norm = RMSNormConfig(epsilon=1e-5)
    block = BlockConfig(mixer=lightning, mlp=moe, norm=norm, norm_placement="input", sum_weights=weights)
    rope = RopeConfig(base=1e7)
    softmax = AttentionConfig(heads=row.heads, kv_heads=row.kv_heads, head_dim=row.head_dim, rope=rope)
    blocks = (*(block,) * (3 if size == "debug" else 7), replace(block, mixer=softmax))
    return decoder(row, *blocks, sequence_length=sequence_length, vocabulary_size=vocabulary_size, family="minimax")


def minimax_m2(size: str, *, sequence_length: int = 8192, vocabulary_size: int = 200064) -> DecoderConfig:
    """MiniMax-M2: attention with norms over all heads, half of each head rotated, experts balanced by biases.

    Without the released blocks for multi-token prediction. Raises UserError for an unknown size.

    Example: `mj.minimax_m2("230b-a10b")`
    """
    row, norm = pick("minimax_m2", MINIMAX_M2, size), RMSNormConfig(epsilon=1e-6)
    sizes: dict[str, Any] = {"heads": row.heads, "kv_heads": row.kv_heads, "head_dim": row.head_dim}
    rope = RopeConfig(base=5e6, fraction=0.5)
    router = RouterConfig(score="sigmoid", balance_rate=0.001, row_loss=0.0001)
    block = BlockConfig(
        mixer=AttentionConfig(**sizes, qk_norm=norm, qk_norm_over="heads", rope=rope),
        mlp=MoEConfig(experts=row.experts, top_k=row.top_k, expert=GatedMLPConfig(ffn=row.ffn), router=router),
        norm=norm,
    )
    return decoder(row, block, sequence_length=sequence_length, vocabulary_size=vocabulary_size, family="minimax_m2")


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
        family="kimi_linear",
    )
