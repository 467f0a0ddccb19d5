"""Qwen 3 with experts (Qwen team 2025, table 2), sizes of the released configs."""

from megajax.layers.config import AttentionConfig, BlockConfig, GatedMLPConfig, MoEConfig, RopeConfig, RouterConfig
from megajax.models.config import DecoderConfig
from megajax.models.presets.qwen import NORM, RELEASED
from megajax.models.presets.sizes import Size, decoder, pick

QWEN3_MOE = {
    "debug": Size(4, 64, 4, 2, 32, head_dim=16, experts=16, top_k=4),
    "30b-a3b": Size(48, 2048, 32, 4, 768, head_dim=128, experts=128, top_k=8),
    "235b-a22b": Size(94, 4096, 64, 4, 1536, head_dim=128, experts=128, top_k=8),
}


def qwen3_moe(size: str, *, sequence_length: int = 32768, vocabulary_size: int = RELEASED) -> DecoderConfig:
    """Qwen 3 with experts instead of MLPs, and no shared one. Raises UserError for an unknown size.

    Balanced by a loss over the whole batch, as the report says, with the coefficient of the released configs.
    """
    row = pick("qwen3_moe", QWEN3_MOE, size)
    rope = RopeConfig(base=1000000.0)
    block = BlockConfig(
        mixer=AttentionConfig(heads=row.heads, kv_heads=row.kv_heads, head_dim=row.head_dim, rope=rope, qk_norm=NORM),
        mlp=MoEConfig(
            experts=row.experts,
            top_k=row.top_k,
            expert=GatedMLPConfig(ffn=row.ffn),
            router=RouterConfig(global_loss=0.001),
        ),
        norm=NORM,
    )
    return decoder(row, block, sequence_length=sequence_length, vocabulary_size=vocabulary_size)
