"""Granite 3 (IBM 2024) and the hybrids of Granite 4 (IBM 2025). Sizes from the released configs."""

from dataclasses import replace
from typing import NamedTuple

from megajax.layers.attention.config import AttentionConfig
from megajax.layers.block.config import BlockConfig
from megajax.layers.mamba.config import Mamba2Config
from megajax.layers.mlp.config import GatedMLPConfig
from megajax.layers.moe.config import MoEConfig, RouterConfig, SharedExpertConfig
from megajax.layers.norm.config import FixedScaleConfig, RMSNormConfig
from megajax.layers.position.config import RopeConfig
from megajax.models.decoder.config import DecoderConfig, WidthScalingConfig
from megajax.models.presets.sizes import Size, decoder, pick

GRANITE = {
    "debug": (Size(4, 64, 4, 2, 160, tied=True), 1 / 16, 8.0),
    "2b": (Size(40, 2048, 32, 8, 8192, tied=True), 1 / 64, 8.0),
    "8b": (Size(40, 4096, 32, 8, 12800, tied=True), 1 / 128, 16.0),
}
"""Size -> dimensions, factor on scores, divisor of logits."""


def granite(size: str, *, sequence_length: int = 4096, vocabulary_size: int = 49155) -> DecoderConfig:
    """Granite 3: fixed factors on embeddings, on the outputs of sub-layers, on scores and on logits.

    Raises UserError for an unknown size.

    Example: `mj.granite("8b")`
    """
    row, scale, divisor = pick("granite", GRANITE, size)
    block = BlockConfig(
        mixer=AttentionConfig(heads=row.heads, kv_heads=row.kv_heads, rope=RopeConfig(), scale=scale),
        mlp=GatedMLPConfig(ffn=row.ffn),
        norm=RMSNormConfig(epsilon=1e-5),
        layer_scale=FixedScaleConfig(factor=0.22),
    )
    scaling = WidthScalingConfig(base_hidden=row.hidden, score_power=0.5, embedding=12.0, output=1 / divisor)
    return decoder(
        row,
        block,
        sequence_length=sequence_length,
        vocabulary_size=vocabulary_size,
        tied=row.tied,
        width_scaling=scaling,
        family="granite",
    )


class HybridSize(NamedTuple):
    """A size of Granite 4, and the settings that differ between sizes."""

    size: Size
    shared: int
    """Width of the shared expert."""
    mamba_heads: int
    every: int = 10
    """Layers with one of attention, in the middle of them."""
    divisor: float = 16.0
    """Of logits."""
    state: int = 128


GRANITE4 = {
    "debug": HybridSize(Size(4, 64, 4, 2, 32, tied=True, experts=8, top_k=2), 48, 8, every=2, state=16),
    "h-tiny": HybridSize(Size(40, 1536, 12, 4, 512, tied=True, experts=64, top_k=6), 1024, 48, divisor=6.0),
    "h-small": HybridSize(Size(40, 4096, 32, 8, 768, tied=True, experts=72, top_k=10), 1536, 128),
}


def granite4(size: str, *, sequence_length: int = 8192, vocabulary_size: int = 100352) -> DecoderConfig:
    """Granite 4: nine Mamba-2 layers and one of attention without positions; experts, and Granite's fixed factors.

    Raises UserError for an unknown size.

    Example: `mj.granite4("h-tiny")`
    """
    row, shared, heads, every, divisor, state = pick("granite4", GRANITE4, size)
    moe = MoEConfig(
        experts=row.experts,
        top_k=row.top_k,
        expert=GatedMLPConfig(ffn=row.ffn),
        router=RouterConfig(aux_loss=0.0001),
        shared=SharedExpertConfig(mlp=GatedMLPConfig(ffn=shared)),
    )
    linear = BlockConfig(
        mixer=Mamba2Config(heads=heads, head_dim=2 * row.hidden // heads, state=state),
        mlp=moe,
        norm=RMSNormConfig(epsilon=1e-5),
        layer_scale=FixedScaleConfig(factor=0.22),
    )
    full = replace(linear, mixer=AttentionConfig(heads=row.heads, kv_heads=row.kv_heads, scale=1 / 128))
    scaling = WidthScalingConfig(base_hidden=row.hidden, score_power=0.5, embedding=12.0, output=1 / divisor)
    before = every // 2
    blocks = (*(linear,) * before, full, *(linear,) * (every - before - 1))
    sizes = {"sequence_length": sequence_length, "vocabulary_size": vocabulary_size}
    return decoder(row, *blocks, **sizes, tied=row.tied, width_scaling=scaling, family="granitemoehybrid")
