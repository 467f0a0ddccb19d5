"""EXAONE 4 (LG AI Research 2025). Sizes from the released configs."""

from dataclasses import replace

from megajax.layers.attention.config import AttentionConfig
from megajax.layers.block.config import BlockConfig
from megajax.layers.mlp.config import GatedMLPConfig
from megajax.layers.norm.config import RMSNormConfig
from megajax.layers.position.config import Llama3ScalingConfig, RopeConfig
from megajax.models.decoder.config import DecoderConfig
from megajax.models.presets.sizes import Size, decoder, pick

EXAONE4 = {
    "debug": Size(4, 64, 4, 2, 160),
    "1.2b": Size(30, 2048, 32, 8, 4096, tied=True),
    "32b": Size(64, 5120, 40, 8, 27392),
}


def exaone4(
    size: str, *, sequence_length: int = 65536, vocabulary_size: int = 102400, window: int = 4096
) -> DecoderConfig:
    """EXAONE 4: norms of outputs and of query and key heads, windows in three of four layers and no RoPE in the fourth.

    The 1.2B size has RoPE and no window in all layers. Raises UserError for an unknown size.

    Example: `mj.exaone4("32b")`
    """
    row, norm = pick("exaone4", EXAONE4, size), RMSNormConfig(epsilon=1e-5)
    rope = RopeConfig(base=1e6, scaling=Llama3ScalingConfig(factor=16.0))
    full = AttentionConfig(heads=row.heads, kv_heads=row.kv_heads, qk_norm=norm, rope=rope if row.tied else None)
    block = BlockConfig(mixer=full, mlp=GatedMLPConfig(ffn=row.ffn), norm=norm, norm_placement="output")
    local = replace(block, mixer=replace(full, window=window - 1, rope=rope))
    blocks = (block,) if row.tied else (local, local, local, block)
    return decoder(row, *blocks, sequence_length=sequence_length, vocabulary_size=vocabulary_size, tied=row.tied)
