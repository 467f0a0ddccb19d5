"""Cohere 2 (Cohere 2024). Sizes from the released configs."""

from dataclasses import replace

from megajax.layers.attention.config import AttentionConfig
from megajax.layers.block.config import BlockConfig
from megajax.layers.mlp.config import GatedMLPConfig
from megajax.layers.norm.config import LayerNormConfig
from megajax.layers.position.config import RopeConfig
from megajax.models.decoder.config import DecoderConfig, WidthScalingConfig
from megajax.models.presets.sizes import Size, decoder, pick

COHERE2 = {
    "debug": Size(4, 64, 4, 2, 160, tied=True),
    "7b": Size(32, 4096, 32, 8, 14336, tied=True),
    "111b": Size(64, 12288, 96, 8, 36864, tied=True),
}


def cohere2(
    size: str, *, sequence_length: int = 8192, vocabulary_size: int = 256000, window: int = 4096
) -> DecoderConfig:
    """Command R7B and Command A: parallel sub-layers; windows and RoPE in three of four layers, neither in the fourth.

    Raises UserError for an unknown size.

    Example: `mj.cohere2("7b")`
    """
    row, norm = pick("cohere2", COHERE2, size), LayerNormConfig(epsilon=1e-5, bias=False)
    mixer = AttentionConfig(heads=row.heads, kv_heads=row.kv_heads)
    block = BlockConfig(mixer=mixer, mlp=GatedMLPConfig(ffn=row.ffn), norm=norm, norm_placement="parallel")
    rope = RopeConfig(base=50000.0, interleaved=True)
    local = replace(block, mixer=replace(mixer, window=window - 1, rope=rope))
    return decoder(
        row,
        *(local,) * 3,
        block,
        sequence_length=sequence_length,
        vocabulary_size=vocabulary_size,
        tied=row.tied,
        width_scaling=WidthScalingConfig(base_hidden=row.hidden, score_power=0.5, output=0.25),
    )
