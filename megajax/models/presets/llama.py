"""Llama 2 (Touvron et al. 2023, table 1 and the released configs) and Llama 3 (Llama team 2024, table 3)."""

from typing import NamedTuple

from megajax.config.errors import UserError
from megajax.layers.config import (
    AttentionConfig,
    BlockConfig,
    GatedMLPConfig,
    Llama3ScalingConfig,
    RMSNormConfig,
    RopeConfig,
    StackConfig,
)
from megajax.models.config import DecoderConfig


class Size(NamedTuple):
    """A row of the paper's table."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    ffn: int


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
    """Llama 2: RoPE, RMSNorm, SwiGLU, no biases, untied head. Raises UserError for an unknown size."""
    return _decoder("llama2", LLAMA2, size, RopeConfig(), sequence_length, vocabulary_size)


def llama3(
    size: str, *, sequence_length: int = 8192, vocabulary_size: int = 128256, stretched: bool = False
) -> DecoderConfig:
    """Llama 3; with `stretched`, the RoPE frequencies of 3.1. Raises UserError for an unknown size."""
    rope = RopeConfig(base=500000.0, scaling=Llama3ScalingConfig() if stretched else None)
    return _decoder("llama3", LLAMA3, size, rope, sequence_length, vocabulary_size)


def _decoder(
    family: str, sizes: dict[str, Size], size: str, rope: RopeConfig, sequence_length: int, vocabulary_size: int
) -> DecoderConfig:
    if size not in sizes:
        raise UserError(f"{family} has no size {size!r}; sizes: {', '.join(sizes)}")
    chosen = sizes[size]
    block = BlockConfig(
        mixer=AttentionConfig(heads=chosen.heads, kv_heads=chosen.kv_heads, rope=rope),
        mlp=GatedMLPConfig(ffn=chosen.ffn),
        norm=RMSNormConfig(),
    )
    return DecoderConfig(
        hidden=chosen.hidden,
        vocabulary_size=vocabulary_size,
        sequence_length=sequence_length,
        stack=StackConfig(pattern=(block,), repeats=chosen.layers),
        norm=RMSNormConfig(),
    )
