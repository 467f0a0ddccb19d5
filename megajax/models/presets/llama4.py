"""Llama 4 (Meta 2025), the text part. Sizes from the released configs."""

from dataclasses import replace
from typing import NamedTuple

from megajax.layers.attention.config import AttentionConfig
from megajax.layers.block.config import BlockConfig
from megajax.layers.mlp.config import GatedMLPConfig
from megajax.layers.moe.config import MoEConfig, RouterConfig, SharedExpertConfig
from megajax.layers.norm.config import L2NormConfig, RMSNormConfig
from megajax.layers.position.config import Llama3ScalingConfig, RopeConfig, TemperatureConfig
from megajax.layers.stack.config import stack_of
from megajax.models.decoder.config import DecoderConfig
from megajax.models.presets.sizes import Size, pick


class Llama4Size(NamedTuple):
    """A size, and the settings that differ between sizes."""

    size: Size
    dense_ffn: int
    """Width of layers without experts."""
    step: int
    """The last of so many layers has experts."""
    chunk: int
    scaling: Llama3ScalingConfig | None = None
    normalised: bool = False
    """Norms of queries and keys."""


SCOUT_SCALING = Llama3ScalingConfig(factor=16.0, low=1.0, high=1.0)
LLAMA4 = {
    "debug": Llama4Size(Size(4, 64, 4, 2, 48, head_dim=16, experts=4, top_k=1), 96, 2, 32, normalised=True),
    "scout": Llama4Size(
        Size(48, 5120, 40, 8, 8192, head_dim=128, experts=16, top_k=1), 16384, 1, 8192, SCOUT_SCALING, normalised=True
    ),
    "maverick": Llama4Size(Size(48, 5120, 40, 8, 8192, head_dim=128, experts=128, top_k=1), 16384, 2, 8192),
}


def llama4(size: str, *, sequence_length: int = 8192, vocabulary_size: int = 202048) -> DecoderConfig:
    """Llama 4: chunked attention with RoPE in three of four layers, full attention without positions in the fourth.

    The sigmoid of a logit multiplies the input of the one chosen expert, beside a shared one. Chunks that are not
    shorter than a row are left out. Raises UserError for an unknown size.

    Example: `mj.llama4("scout")`
    """
    row, dense_ffn, step, chunk, scaling, normalised = pick("llama4", LLAMA4, size)
    norm, mlp = RMSNormConfig(epsilon=1e-5), GatedMLPConfig(ffn=row.ffn)
    full = AttentionConfig(heads=row.heads, kv_heads=row.kv_heads, head_dim=row.head_dim)
    local = replace(
        full,
        chunk=chunk if chunk < sequence_length else None,
        rope=RopeConfig(base=500000.0, interleaved=True, scaling=scaling),
        qk_norm=L2NormConfig(epsilon=1e-5) if normalised else None,
    )
    moe = MoEConfig(
        experts=row.experts,
        top_k=row.top_k,
        expert=mlp,
        router=RouterConfig(score="sigmoid", normalise="all", aux_loss=0.001),
        shared=SharedExpertConfig(mlp=mlp),
        weigh="inputs",
    )
    dense = BlockConfig(
        mixer=replace(full, temperature=TemperatureConfig()), mlp=GatedMLPConfig(ffn=dense_ffn), norm=norm
    )
    blocks = [
        replace(dense, mixer=local if (layer + 1) % 4 else dense.mixer, mlp=dense.mlp if (layer + 1) % step else moe)
        for layer in range(row.layers)
    ]
    return DecoderConfig(
        hidden=row.hidden,
        vocabulary_size=vocabulary_size,
        sequence_length=sequence_length,
        stack=stack_of(blocks),
        norm=norm,
        family="llama4_text",
    )
