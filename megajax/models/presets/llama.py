"""Llama 2 (Touvron et al. 2023, table 1 and the released configs) and Llama 3 (Llama team 2024, table 3)."""

from megajax.layers.attention.config import AttentionConfig
from megajax.layers.block.config import BlockConfig
from megajax.layers.mlp.config import GatedMLPConfig
from megajax.layers.norm.config import RMSNormConfig
from megajax.layers.position.config import Llama3ScalingConfig, RopeConfig
from megajax.models.decoder.config import DecoderConfig
from megajax.models.presets.sizes import Size, decoder, pick

LLAMA2 = {
    "debug": Size(2, 64, 4, 2, 192),
    "7b": Size(32, 4096, 32, 32, 11008),
    "13b": Size(40, 5120, 40, 40, 13824),
    "70b": Size(80, 8192, 64, 8, 28672),
}

LLAMA3 = {
    "debug": Size(4, 64, 4, 2, 192),
    "8b": Size(32, 4096, 32, 8, 14336),
    "70b": Size(80, 8192, 64, 8, 28672),
    "405b": Size(126, 16384, 128, 8, 53248),
}


def llama2(size: str, *, sequence_length: int = 4096, vocabulary_size: int = 32000) -> DecoderConfig:
    """Llama 2: RoPE, RMSNorm, SwiGLU, no biases, untied head. Raises UserError for an unknown size.

    Example: `mj.llama2("7b")`
    """
    return _llama(pick("llama2", LLAMA2, size), RopeConfig(), sequence_length, vocabulary_size)


def llama3(
    size: str,
    *,
    sequence_length: int = 8192,
    vocabulary_size: int = 128256,
    rope_base: float = 500000.0,
    llama3_scaling: bool = False,
) -> DecoderConfig:
    """Llama 3; `llama3_scaling`: the RoPE frequencies of Llama 3.1. Raises UserError for an unknown size.

    Example: `mj.llama3("8b", sequence_length=131_072, llama3_scaling=True)`
    """
    rope = RopeConfig(base=rope_base, scaling=Llama3ScalingConfig() if llama3_scaling else None)
    return _llama(pick("llama3", LLAMA3, size), rope, sequence_length, vocabulary_size)


def _llama(size: Size, rope: RopeConfig, sequence_length: int, vocabulary_size: int) -> DecoderConfig:
    block = BlockConfig(
        mixer=AttentionConfig(heads=size.heads, kv_heads=size.kv_heads, rope=rope),
        mlp=GatedMLPConfig(ffn=size.ffn),
        norm=RMSNormConfig(),
    )
    return decoder(size, block, sequence_length=sequence_length, vocabulary_size=vocabulary_size)
