"""Models with Mamba layers: Mamba-2 (Dao and Gu 2024, section 9.1), Nemotron-H (NVIDIA 2025, table 1), Nemotron 3 and
Falcon-H1 (Falcon LLM team 2025), as in released configs."""

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import NamedTuple

from megajax.layers.attention.config import AttentionConfig
from megajax.layers.block.config import BlockConfig
from megajax.layers.mamba.config import Mamba2Config
from megajax.layers.mlp.config import DenseMLPConfig, GatedMLPConfig
from megajax.layers.moe.config import MoEConfig, RouterConfig, SharedExpertConfig
from megajax.layers.norm.config import RMSNormConfig
from megajax.layers.position.config import RopeConfig
from megajax.models.decoder.config import DecoderConfig
from megajax.models.presets.hybrids.hybrid import hybrid_stack
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


class ExpertSizes(NamedTuple):
    """The experts of a size."""

    experts: int
    top_k: int
    shared: int
    """Width of the shared expert."""
    scale: float
    """Factor on the weights of experts."""
    latent: int | None = None


class Hybrid(NamedTuple):
    """A size of Nemotron-H or Nemotron 3."""

    pattern: str
    """A letter for each layer: M Mamba-2, - MLP, * attention, E experts."""
    hidden: int
    ffn: int
    """Width of an MLP or an expert."""
    heads: int
    mamba_heads: int
    state: int
    kv_heads: int = 8
    head_dim: int = 128
    mamba_head_dim: int = 64
    groups: int = 8
    experts: ExpertSizes | None = None


NEMOTRON_H = {
    "debug": Hybrid("M-M*-M-M-M*-", 64, 128, 4, 8, 16, kv_heads=2, head_dim=16, mamba_head_dim=16, groups=2),
    "8b": Hybrid("M-M-M-M*-M-" + 3 * "M-M-M-M*-M-" + "M-M-M-M-", 4096, 21504, 32, 128, 128),
    "56b": Hybrid("M-M-M-M*-M-" + 9 * "M-M-M-M*-M-" + "M-M-M-M-", 8192, 32768, 64, 256, 256),
}

NEMOTRON_3 = {
    "debug": Hybrid(
        "MEM*EME", 64, 32, 4, 8, 16, kv_heads=2, head_dim=16, mamba_head_dim=16, groups=2,
        experts=ExpertSizes(8, 2, 48, 2.5, latent=32),
    ),
    "nano": Hybrid(
        "MEMEM*E" + 4 * "MEMEM*E" + "MEMEMEM*E" + "MEMEMEME", 2688, 1856, 32, 64, 128, kv_heads=2,
        experts=ExpertSizes(128, 6, 3712, 2.5),
    ),
    "super": Hybrid(
        "MEMEMEM*E" + 3 * "MEMEMEM*E" + 4 * "MEMEMEMEM*E" + "MEMEMEME", 4096, 2688, 32, 128, 128, kv_heads=2,
        experts=ExpertSizes(512, 22, 5376, 5.0, latent=1024),
    ),
}  # fmt: skip

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
    return decoder(
        row, block, sequence_length=sequence_length, vocabulary_size=vocabulary_size, **more, family="mamba2"
    )


def nemotron_blocks(row: Hybrid) -> Mapping[str, BlockConfig]:
    """Letter of the pattern -> layer with one sub-layer; no biases except in convolutions, no positions."""
    mamba = Mamba2Config(heads=row.mamba_heads, head_dim=row.mamba_head_dim, state=row.state, groups=row.groups)
    attention = AttentionConfig(heads=row.heads, kv_heads=row.kv_heads, head_dim=row.head_dim)
    mlp = DenseMLPConfig(ffn=row.ffn, activation="squared_relu", bias=False)
    blocks = {
        "M": BlockConfig(mixer=mamba, norm=RMSNormConfig()),
        "*": BlockConfig(mixer=attention, norm=RMSNormConfig()),
        "-": BlockConfig(mlp=mlp, norm=RMSNormConfig()),
    }
    if row.experts is not None:
        sizes = row.experts
        router = RouterConfig(score="sigmoid", scale=sizes.scale, balance_rate=0.001, row_loss=0.0001)
        shared = SharedExpertConfig(mlp=replace(mlp, ffn=sizes.shared))
        moe = MoEConfig(
            experts=sizes.experts, top_k=sizes.top_k, expert=mlp, router=router, shared=shared, latent=sizes.latent
        )
        blocks["E"] = BlockConfig(mlp=moe, norm=RMSNormConfig())
    return MappingProxyType(blocks)


def nemotron_h(size: str, *, sequence_length: int = 8192, vocabulary_size: int = NEMOTRON_VOCABULARY) -> DecoderConfig:
    """Alternating Mamba-2 and MLP layers, with a few attention layers. Raises UserError for an unknown size.

    Example: `mj.nemotron_h("8b")`
    """
    return _nemotron(pick("nemotron_h", NEMOTRON_H, size), sequence_length, vocabulary_size)


def nemotron3(size: str, *, sequence_length: int = 8192, vocabulary_size: int = NEMOTRON_VOCABULARY) -> DecoderConfig:
    """Alternating Mamba-2 and expert layers, with a few attention layers; sigmoid routing with balancing biases.

    Super's experts work in a latent of 1024. Raises UserError for an unknown size.

    Example: `mj.nemotron3("nano")`
    """
    return _nemotron(pick("nemotron3", NEMOTRON_3, size), sequence_length, vocabulary_size)


def _nemotron(row: Hybrid, sequence_length: int, vocabulary_size: int) -> DecoderConfig:
    return DecoderConfig(
        hidden=row.hidden,
        vocabulary_size=vocabulary_size,
        sequence_length=sequence_length,
        stack=hybrid_stack(row.pattern, nemotron_blocks(row)),
        norm=RMSNormConfig(),
        family="nemotron_h",
    )


class FalconH1Size(NamedTuple):
    """A size, and its Mamba-2 mixers."""

    size: Size
    mamba: Mamba2Config


FALCON_H1 = {
    "debug": FalconH1Size(
        Size(2, 64, 4, 2, 128, vocabulary=1024, head_dim=16),
        Mamba2Config(heads=4, head_dim=16, state=16, normalised=False),
    ),
    "0.5b": FalconH1Size(
        Size(36, 1024, 8, 2, 2048, vocabulary=32784, head_dim=64), Mamba2Config(heads=24, state=128, normalised=False)
    ),
    "34b": FalconH1Size(
        Size(72, 5120, 20, 4, 21504, vocabulary=261120, head_dim=128),
        Mamba2Config(heads=32, head_dim=128, state=256, groups=2),
    ),
}


def falcon_h1(size: str, *, sequence_length: int = 4096, vocabulary_size: int | None = None) -> DecoderConfig:
    """Falcon-H1: attention and Mamba-2 read the same input in each layer. A converted model has factors, this none.

    vocabulary_size: None: that of the released model. Raises UserError for an unknown size.

    Example: `mj.falcon_h1("0.5b")`
    """
    row, mamba = pick("falcon_h1", FALCON_H1, size)
    rope = RopeConfig(base=1e11)
    attention = AttentionConfig(heads=row.heads, kv_heads=row.kv_heads, head_dim=row.head_dim, rope=rope)
    norm, mlp = RMSNormConfig(epsilon=1e-5), GatedMLPConfig(ffn=row.ffn)
    block = BlockConfig(mixer=attention, beside=mamba, mlp=mlp, norm=norm)
    rows = vocabulary_size or row.vocabulary
    return decoder(row, block, sequence_length=sequence_length, vocabulary_size=rows, family="falcon_h1")
