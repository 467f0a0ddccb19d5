"""SmolLM3 (Hugging Face 2025). The size of the released config."""

from dataclasses import replace

from megajax.layers.attention.config import AttentionConfig
from megajax.layers.block.config import BlockConfig
from megajax.layers.mlp.config import GatedMLPConfig
from megajax.layers.norm.config import RMSNormConfig
from megajax.layers.position.config import RopeConfig
from megajax.models.decoder.config import DecoderConfig
from megajax.models.presets.sizes import Size, decoder, pick

SMOLLM3 = {
    "debug": Size(4, 64, 4, 2, 160, tied=True),
    "3b": Size(36, 2048, 16, 4, 11008, tied=True),
}


def smollm3(size: str, *, sequence_length: int = 65536, vocabulary_size: int = 128256) -> DecoderConfig:
    """SmolLM3: Llama without RoPE in every fourth layer. Raises UserError for an unknown size.

    Example: `mj.smollm3("3b")`
    """
    row = pick("smollm3", SMOLLM3, size)
    mixer = AttentionConfig(heads=row.heads, kv_heads=row.kv_heads, rope=RopeConfig(base=5e6))
    rotated = BlockConfig(mixer=mixer, mlp=GatedMLPConfig(ffn=row.ffn), norm=RMSNormConfig(epsilon=1e-6))
    block = replace(rotated, mixer=replace(mixer, rope=None))
    blocks = (rotated, rotated, rotated, block)
    return decoder(row, *blocks, sequence_length=sequence_length, vocabulary_size=vocabulary_size, tied=row.tied)
