"""GLM-4 and GLM-4.5 (Zhipu AI 2025). Sizes from the released configs."""

from dataclasses import replace
from typing import Any, NamedTuple

from megajax.layers.attention.config import AttentionConfig
from megajax.layers.block.config import BlockConfig
from megajax.layers.mlp.config import GatedMLPConfig
from megajax.layers.moe.config import MoEConfig, RouterConfig, SharedExpertConfig
from megajax.layers.norm.config import RMSNormConfig
from megajax.layers.position.config import RopeConfig
from megajax.layers.stack.config import stack_of
from megajax.models.decoder.config import DecoderConfig, PredictionConfig
from megajax.models.presets.sizes import Size, decoder, pick


class GlmSize(NamedTuple):
    """A size, and the settings that differ between sizes."""

    size: Size
    dense: int
    """First layers without experts."""
    dense_ffn: int
    scale: float
    """Factor on the weights of experts."""
    normalised: bool
    """Norms of queries and keys."""


GLM4_MOE = {
    "debug": GlmSize(Size(4, 64, 4, 2, 32, head_dim=16, experts=16, top_k=4), 1, 128, 2.5, True),
    "4.5-air": GlmSize(Size(46, 4096, 96, 8, 1408, head_dim=128, experts=128, top_k=8), 1, 10944, 1.0, False),
    "4.5": GlmSize(Size(92, 5120, 96, 8, 1536, head_dim=128, experts=160, top_k=8), 3, 12288, 2.5, True),
}

GLM4 = {
    "debug": Size(4, 64, 4, 2, 160, head_dim=16),
    "9b": Size(40, 4096, 32, 2, 13696, head_dim=128),
    "32b": Size(61, 6144, 48, 2, 23040, head_dim=128),
}


def glm4(size: str, *, sequence_length: int = 32768, vocabulary_size: int = 151552) -> DecoderConfig:
    """GLM-4-0414: norms before and after each sub-layer, half of each head rotated in adjacent pairs.

    Only 9b has biases on queries, keys and values. Raises UserError for an unknown size.

    Example: `mj.glm4("9b")`
    """
    row = pick("glm4", GLM4, size)
    rope = RopeConfig(fraction=0.5, interleaved=True)
    sizes: dict[str, Any] = {"heads": row.heads, "kv_heads": row.kv_heads, "head_dim": row.head_dim}
    mixer = AttentionConfig(**sizes, qkv_bias=size == "9b" or None, rope=rope)
    norm, mlp = RMSNormConfig(epsilon=1e-5), GatedMLPConfig(ffn=row.ffn)
    block = BlockConfig(mixer=mixer, mlp=mlp, norm=norm, norm_placement="sandwich")
    return decoder(row, block, sequence_length=sequence_length, vocabulary_size=vocabulary_size, family="glm4")


def glm4_moe(size: str, *, sequence_length: int = 131072, vocabulary_size: int = 151552) -> DecoderConfig:
    """GLM-4.5: sigmoid routing with a bias that balances the choice, a shared expert, half of each head rotated.

    One multi-token prediction block. Raises UserError for an unknown size.

    Example: `mj.glm4_moe("4.5-air")`
    """
    row, dense, dense_ffn, scale, normalised = pick("glm4_moe", GLM4_MOE, size)
    norm, mlp = RMSNormConfig(epsilon=1e-5), GatedMLPConfig(ffn=row.ffn)
    mixer = AttentionConfig(
        heads=row.heads,
        kv_heads=row.kv_heads,
        head_dim=row.head_dim,
        qkv_bias=True,
        qk_norm=norm if normalised else None,
        rope=RopeConfig(base=1e6, fraction=0.5),
    )
    moe = MoEConfig(
        experts=row.experts,
        top_k=row.top_k,
        expert=mlp,
        router=RouterConfig(score="sigmoid", normalise="chosen", scale=scale, balance_rate=0.001, row_loss=0.0001),
        shared=SharedExpertConfig(mlp=mlp),
    )
    block = BlockConfig(mixer=mixer, mlp=moe, norm=norm)
    first = replace(block, mlp=GatedMLPConfig(ffn=dense_ffn))
    return DecoderConfig(
        hidden=row.hidden,
        vocabulary_size=vocabulary_size,
        sequence_length=sequence_length,
        stack=stack_of([first if layer < dense else block for layer in range(row.layers)]),
        norm=norm,
        prediction=PredictionConfig(weight=0.3),
        family="glm4_moe",
    )
