"""MiniMax-Text-01 (MiniMax 2025). The size of the released config."""

from dataclasses import replace

from megajax.layers.attention.config import AttentionConfig
from megajax.layers.block.config import BlockConfig
from megajax.layers.linear.config import LightningAttentionConfig
from megajax.layers.mlp.config import GatedMLPConfig
from megajax.layers.moe.config import DispatchConfig, MoEConfig, RouterConfig
from megajax.layers.norm.config import RMSNormConfig, SumWeightsConfig
from megajax.layers.position.config import RopeConfig
from megajax.models.decoder.config import DecoderConfig
from megajax.models.presets.sizes import Size, decoder, pick

MINIMAX = {
    "debug": Size(4, 64, 4, 2, 48, head_dim=16, experts=8, top_k=2),
    "text-01": Size(80, 6144, 64, 8, 9216, head_dim=128, experts=32, top_k=2),
}
STREAM = 3.5565588200778455
"""Factor on the residual stream: (2 * 80)^0.25, as in DeepNorm (Wang et al. 2022)."""


def minimax(
    size: str,
    *,
    sequence_length: int = 8192,
    vocabulary_size: int = 200064,
    dispatch: DispatchConfig | None = None,
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
    return decoder(row, *blocks, sequence_length=sequence_length, vocabulary_size=vocabulary_size)
