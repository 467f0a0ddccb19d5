"""OLMo 3 (Team OLMo 2025). Sizes from the released configs."""

from dataclasses import replace

from megajax.layers.attention.config import AttentionConfig
from megajax.layers.block.config import BlockConfig
from megajax.layers.mlp.config import GatedMLPConfig
from megajax.layers.norm.config import RMSNormConfig
from megajax.layers.position.config import RopeConfig, YarnScalingConfig
from megajax.models.decoder.config import DecoderConfig
from megajax.models.presets.sizes import Size, decoder, pick

OLMO3 = {
    "debug": Size(4, 64, 4, 4, 160),
    "7b": Size(32, 4096, 32, 32, 11008),
    "32b": Size(64, 5120, 40, 8, 27648),
}


def olmo3(
    size: str, *, sequence_length: int = 8192, vocabulary_size: int = 100278, window: int = 4096, yarn: bool = False
) -> DecoderConfig:
    """OLMo 3: norms of outputs, and of queries and keys over all heads; windows in three of four layers.

    yarn: extends RoPE of full layers from 8192 tokens to 65536, as in the released models. Raises UserError for an
    unknown size.

    Example: `mj.olmo3("7b")`
    """
    row, norm = pick("olmo3", OLMO3, size), RMSNormConfig(epsilon=1e-6)
    plain = RopeConfig(base=500000.0)
    scaled = replace(plain, scaling=YarnScalingConfig(factor=8.0, original=8192))
    full = AttentionConfig(
        heads=row.heads, kv_heads=row.kv_heads, qk_norm=norm, qk_norm_over="heads", rope=scaled if yarn else plain
    )
    block = BlockConfig(mixer=full, mlp=GatedMLPConfig(ffn=row.ffn), norm=norm, norm_placement="output")
    local = replace(block, mixer=replace(full, window=window - 1, rope=plain))
    return decoder(row, local, local, local, block, sequence_length=sequence_length, vocabulary_size=vocabulary_size)
