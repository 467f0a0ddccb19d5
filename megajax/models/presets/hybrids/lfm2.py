"""LFM2 (Liquid AI 2025). Sizes from the released configs."""

from dataclasses import replace
from typing import NamedTuple

from megajax.layers.attention.config import AttentionConfig
from megajax.layers.block.config import BlockConfig
from megajax.layers.linear.config import ShortConvConfig
from megajax.layers.mlp.config import GatedMLPConfig
from megajax.layers.moe.config import MoEConfig, RouterConfig
from megajax.layers.norm.config import RMSNormConfig
from megajax.layers.position.config import RopeConfig
from megajax.layers.stack.config import stack_of
from megajax.models.decoder.config import DecoderConfig
from megajax.models.presets.sizes import Size, pick


class Lfm2Size(NamedTuple):
    """A size, and its layers."""

    size: Size
    attention: tuple[int, ...]
    """Numbers of the layers with attention; the others have convolutions."""
    expert_ffn: int = 0
    dense: int = 0
    """First layers without experts, in models with experts."""


LFM2 = {
    "debug": Lfm2Size(Size(4, 64, 4, 2, 96), (2,)),
    "debug-moe": Lfm2Size(Size(4, 64, 4, 2, 96, experts=8, top_k=2), (2,), 48, 1),
    "350m": Lfm2Size(Size(16, 1024, 16, 8, 4608), (2, 5, 8, 10, 12, 14)),
    "700m": Lfm2Size(Size(16, 1536, 24, 8, 6912), (2, 5, 8, 10, 12, 14)),
    "1.2b": Lfm2Size(Size(16, 2048, 32, 8, 8192), (2, 5, 8, 10, 12, 14)),
    "8b-a1b": Lfm2Size(Size(24, 2048, 32, 8, 7168, experts=32, top_k=4), (2, 6, 10, 14, 18, 21), 1792, 2),
}


def lfm2(size: str, *, sequence_length: int = 4096, vocabulary_size: int = 65536) -> DecoderConfig:
    """LFM2: gated short convolutions, with attention in a third or a quarter of the layers; 8b-a1b has experts.

    Raises UserError for an unknown size.

    Example: `mj.lfm2("1.2b")`
    """
    row, attention, expert_ffn, dense = pick("lfm2", LFM2, size)
    norm, mlp = RMSNormConfig(epsilon=1e-5), GatedMLPConfig(ffn=row.ffn)
    mixer = AttentionConfig(heads=row.heads, kv_heads=row.kv_heads, qk_norm=norm, rope=RopeConfig(base=1e6))
    moe = MoEConfig(
        experts=row.experts,
        top_k=row.top_k,
        expert=GatedMLPConfig(ffn=expert_ffn),
        router=RouterConfig(score="sigmoid", balance_rate=0.001),
    )
    block = BlockConfig(mixer=ShortConvConfig(channels=row.hidden), mlp=mlp, norm=norm)
    blocks = [
        replace(
            block,
            mixer=mixer if layer in attention else block.mixer,
            mlp=moe if row.experts and layer >= dense else mlp,
        )
        for layer in range(row.layers)
    ]
    return DecoderConfig(
        hidden=row.hidden,
        vocabulary_size=vocabulary_size,
        sequence_length=sequence_length,
        stack=stack_of(blocks),
        norm=norm,
        tied=True,
        family="lfm2_moe" if row.experts else "lfm2",
    )
