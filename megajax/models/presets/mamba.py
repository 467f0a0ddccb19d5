"""Mamba-2 (Dao and Gu 2024, section 9.1) and Nemotron-H (NVIDIA 2025, table 1), as in the released configs."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

from megajax.layers.attention.config import AttentionConfig
from megajax.layers.block.config import BlockConfig
from megajax.layers.mamba.config import Mamba2Config
from megajax.layers.mlp.config import DenseMLPConfig
from megajax.layers.norm.config import RMSNormConfig
from megajax.models.decoder.config import DecoderConfig
from megajax.models.presets.hybrid import hybrid_stack
from megajax.models.presets.sizes import Size, decoder, pick

MAMBA2 = {
    "debug": Size(4, 64, 8, head_dim=16),
    "130m": Size(24, 768, 24),
    "370m": Size(48, 1024, 32),
    "780m": Size(48, 1536, 48),
    "1.3b": Size(48, 2048, 64),
    "2.7b": Size(64, 2560, 80),
}
"""Heads of size 64 over 2 * hidden channels."""


class Hybrid(NamedTuple):
    """A size of Nemotron-H."""

    pattern: str
    """A letter for each layer: M Mamba-2, - MLP, * attention."""
    hidden: int
    ffn: int
    heads: int
    mamba_heads: int
    state: int
    kv_heads: int = 8
    head_dim: int = 128
    mamba_head_dim: int = 64
    groups: int = 8


NEMOTRON_H = {
    "debug": Hybrid("M-M*-M-M-M*-", 64, 128, 4, 8, 16, kv_heads=2, head_dim=16, mamba_head_dim=16, groups=2),
    "8b": Hybrid("M-M-M-M*-M-" + 3 * "M-M-M-M*-M-" + "M-M-M-M-", 4096, 21504, 32, 128, 128),
    "56b": Hybrid("M-M-M-M*-M-" + 9 * "M-M-M-M*-M-" + "M-M-M-M-", 8192, 32768, 64, 256, 256),
}

NEMOTRON_VOCABULARY = 131072


def mamba2(size: str, *, sequence_length: int = 2048, vocabulary_size: int = 50288) -> DecoderConfig:
    """Only Mamba-2 layers, with a float32 residual stream and the vocabulary of GPT-NeoX.

    Raises UserError for an unknown size.

    Example: `mj.mamba2("130m")`
    """
    row = pick("mamba2", MAMBA2, size)
    mixer = Mamba2Config(heads=row.heads, head_dim=row.head_dim or 64)
    block = BlockConfig(mixer=mixer, norm=RMSNormConfig())
    more = {"tied": True, "residual": "float32"}
    return decoder(row, block, sequence_length=sequence_length, vocabulary_size=vocabulary_size, **more)


def nemotron_blocks(row: Hybrid) -> Mapping[str, BlockConfig]:
    """Letter of the pattern -> layer with one sub-layer; no biases except in convolutions, no positions."""
    mamba = Mamba2Config(heads=row.mamba_heads, head_dim=row.mamba_head_dim, state=row.state, groups=row.groups)
    attention = AttentionConfig(heads=row.heads, kv_heads=row.kv_heads, head_dim=row.head_dim)
    mlp = DenseMLPConfig(ffn=row.ffn, activation="squared_relu", bias=False)
    return MappingProxyType(
        {
            "M": BlockConfig(mixer=mamba, norm=RMSNormConfig()),
            "*": BlockConfig(mixer=attention, norm=RMSNormConfig()),
            "-": BlockConfig(mlp=mlp, norm=RMSNormConfig()),
        }
    )


def nemotron_h(size: str, *, sequence_length: int = 8192, vocabulary_size: int = NEMOTRON_VOCABULARY) -> DecoderConfig:
    """Alternating Mamba-2 and MLP layers, with a few attention layers. Raises UserError for an unknown size.

    Example: `mj.nemotron_h("8b")`
    """
    row = pick("nemotron_h", NEMOTRON_H, size)
    return DecoderConfig(
        hidden=row.hidden,
        vocabulary_size=vocabulary_size,
        sequence_length=sequence_length,
        stack=hybrid_stack(row.pattern, nemotron_blocks(row)),
        norm=RMSNormConfig(),
    )
