"""Llama 2 (Touvron et al. 2023, table 1 and the released configs), Llama 3 (Llama team 2024, table 3), and their kin.

Phi-3 and Phi-4 (Microsoft 2024), with their original lengths; SmolLM3 (Hugging Face 2025); Mixtral (Jiang et al. 2024,
table 1; 8x22B: Mistral AI's release of April 2024). Sizes from the released configs.
"""

from dataclasses import replace

from megajax.layers.attention.config import AttentionConfig
from megajax.layers.block.config import BlockConfig
from megajax.layers.mlp.config import GatedMLPConfig
from megajax.layers.moe.config import MoEConfig, RouterConfig
from megajax.layers.norm.config import RMSNormConfig
from megajax.layers.position.config import Llama3ScalingConfig, LongRopeScalingConfig, RopeConfig
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
    return decoder(size, block, sequence_length=sequence_length, vocabulary_size=vocabulary_size, family="llama")


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
    return decoder(row, block, sequence_length=sequence_length, vocabulary_size=vocabulary_size, family="phi3")


SMOLLM3 = {"debug": Size(4, 64, 4, 2, 160, tied=True), "3b": Size(36, 2048, 16, 4, 11008, tied=True)}


def smollm3(size: str, *, sequence_length: int = 65536, vocabulary_size: int = 128256) -> DecoderConfig:
    """SmolLM3: Llama without RoPE in every fourth layer. Raises UserError for an unknown size.

    Example: `mj.smollm3("3b")`
    """
    row = pick("smollm3", SMOLLM3, size)
    mixer = AttentionConfig(heads=row.heads, kv_heads=row.kv_heads, rope=RopeConfig(base=5e6))
    rotated = BlockConfig(mixer=mixer, mlp=GatedMLPConfig(ffn=row.ffn), norm=RMSNormConfig(epsilon=1e-6))
    block = replace(rotated, mixer=replace(mixer, rope=None))
    blocks = (rotated, rotated, rotated, block)
    return decoder(
        row, *blocks, sequence_length=sequence_length, vocabulary_size=vocabulary_size, tied=row.tied, family="smollm3"
    )


MIXTRAL = {
    "debug": Size(4, 64, 4, 2, 96, experts=8, top_k=2),
    "8x7b": Size(32, 4096, 32, 8, 14336, experts=8, top_k=2),
    "8x22b": Size(56, 6144, 48, 8, 16384, experts=8, top_k=2),
}


def mixtral(size: str, *, sequence_length: int = 4096, vocabulary_size: int = 32000) -> DecoderConfig:
    """Llama with 8 experts, 2 per token. Raises UserError for an unknown size.

    The balancing loss has the coefficient of the released configs.

    Example: `mj.mixtral("8x7b")`
    """
    row = pick("mixtral", MIXTRAL, size)
    block = BlockConfig(
        mixer=AttentionConfig(heads=row.heads, kv_heads=row.kv_heads, rope=RopeConfig(base=1000000.0)),
        mlp=MoEConfig(
            experts=row.experts, top_k=row.top_k, expert=GatedMLPConfig(ffn=row.ffn), router=RouterConfig(aux_loss=0.02)
        ),
        norm=RMSNormConfig(),
    )
    return decoder(row, block, sequence_length=sequence_length, vocabulary_size=vocabulary_size, family="mixtral")
