"""Phi-3 and Phi-4 (Microsoft 2024). Sizes from the released configs, with their original lengths."""

from megajax.layers.attention.config import AttentionConfig
from megajax.layers.block.config import BlockConfig
from megajax.layers.mlp.config import GatedMLPConfig
from megajax.layers.norm.config import RMSNormConfig
from megajax.layers.position.config import LongRopeScalingConfig, RopeConfig
from megajax.models.decoder.config import DecoderConfig
from megajax.models.presets.sizes import Size, decoder, pick

PHI3 = {
    "debug": (Size(2, 64, 4, 2, 160, vocabulary=512), 10000.0),
    "3-mini": (Size(32, 3072, 32, 32, 8192, vocabulary=32064), 10000.0),
    "3-medium": (Size(40, 5120, 40, 10, 17920, vocabulary=32064), 10000.0),
    "4": (Size(40, 5120, 40, 10, 17920, vocabulary=100352), 250000.0),
}
"""Size -> dimensions, base of RoPE."""


def phi3(
    size: str,
    *,
    sequence_length: int = 4096,
    vocabulary_size: int | None = None,
    scaling: LongRopeScalingConfig | None = None,
) -> DecoderConfig:
    """Phi-3 and Phi-4: Llama's blocks. scaling: of RoPE, for models of longer texts.

    Raises UserError for an unknown size.

    Example: `mj.phi3("4", sequence_length=16384)`
    """
    row, base = pick("phi3", PHI3, size)
    rope = RopeConfig(base=base, scaling=scaling)
    mixer = AttentionConfig(heads=row.heads, kv_heads=row.kv_heads, rope=rope)
    block = BlockConfig(mixer=mixer, mlp=GatedMLPConfig(ffn=row.ffn), norm=RMSNormConfig(epsilon=1e-5))
    vocabulary_size = vocabulary_size or row.vocabulary
    return decoder(row, block, sequence_length=sequence_length, vocabulary_size=vocabulary_size)
