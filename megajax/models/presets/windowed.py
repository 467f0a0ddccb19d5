"""Models with windows in three of four layers: Cohere 2 (Cohere 2024), EXAONE 4 (LG AI Research 2025), OLMo 3 (Team
OLMo 2025); and OLMoE (Muennighoff et al. 2024). Sizes from the released configs."""

from dataclasses import replace

from megajax.layers.attention.config import AttentionConfig
from megajax.layers.block.config import BlockConfig
from megajax.layers.mlp.config import GatedMLPConfig
from megajax.layers.moe.config import MoEConfig, RouterConfig
from megajax.layers.norm.config import LayerNormConfig, RMSNormConfig
from megajax.layers.position.config import Llama3ScalingConfig, RopeConfig, YarnScalingConfig
from megajax.models.decoder.config import DecoderConfig, WidthScalingConfig
from megajax.models.presets.sizes import Size, decoder, pick

COHERE2 = {
    "debug": Size(4, 64, 4, 2, 160, tied=True),
    "7b": Size(32, 4096, 32, 8, 14336, tied=True),
    "111b": Size(64, 12288, 96, 8, 36864, tied=True),
}


def cohere2(
    size: str, *, sequence_length: int = 8192, vocabulary_size: int = 256000, window: int = 4096
) -> DecoderConfig:
    """Command R7B and Command A: parallel sub-layers; windows and RoPE in three of four layers, neither in the fourth.

    Raises UserError for an unknown size.

    Example: `mj.cohere2("7b")`
    """
    row, norm = pick("cohere2", COHERE2, size), LayerNormConfig(epsilon=1e-5, bias=False)
    mixer = AttentionConfig(heads=row.heads, kv_heads=row.kv_heads)
    block = BlockConfig(mixer=mixer, mlp=GatedMLPConfig(ffn=row.ffn), norm=norm, norm_placement="parallel")
    rope = RopeConfig(base=50000.0, interleaved=True)
    local = replace(block, mixer=replace(mixer, window=window - 1, rope=rope))
    return decoder(
        row,
        *(local,) * 3,
        block,
        sequence_length=sequence_length,
        vocabulary_size=vocabulary_size,
        tied=row.tied,
        width_scaling=WidthScalingConfig(base_hidden=row.hidden, score_power=0.5, output=0.25),
    )


EXAONE4 = {
    "debug": Size(4, 64, 4, 2, 160),
    "1.2b": Size(30, 2048, 32, 8, 4096, tied=True),
    "32b": Size(64, 5120, 40, 8, 27392),
}


def exaone4(
    size: str, *, sequence_length: int = 65536, vocabulary_size: int = 102400, window: int = 4096
) -> DecoderConfig:
    """EXAONE 4: norms of outputs and of query and key heads, windows in three of four layers and no RoPE in the fourth.

    The 1.2B size has RoPE and no window in all layers. Raises UserError for an unknown size.

    Example: `mj.exaone4("32b")`
    """
    row, norm = pick("exaone4", EXAONE4, size), RMSNormConfig(epsilon=1e-5)
    rope = RopeConfig(base=1e6, scaling=Llama3ScalingConfig(factor=16.0))
    full = AttentionConfig(heads=row.heads, kv_heads=row.kv_heads, qk_norm=norm, rope=rope if row.tied else None)
    block = BlockConfig(mixer=full, mlp=GatedMLPConfig(ffn=row.ffn), norm=norm, norm_placement="output")
    local = replace(block, mixer=replace(full, window=window - 1, rope=rope))
    blocks = (block,) if row.tied else (local, local, local, block)
    return decoder(row, *blocks, sequence_length=sequence_length, vocabulary_size=vocabulary_size, tied=row.tied)


OLMO3 = {
    "debug": Size(4, 64, 4, 4, 160),
    "7b": Size(32, 4096, 32, 32, 11008),
    "32b": Size(64, 5120, 40, 8, 27648),
}

OLMOE = {
    "debug": Size(4, 64, 4, 4, 32, experts=16, top_k=4),
    "1b-7b": Size(16, 2048, 16, 16, 1024, experts=64, top_k=8),
}


def olmoe(size: str, *, sequence_length: int = 4096, vocabulary_size: int = 50304) -> DecoderConfig:
    """OLMoE: experts in all layers, norms of queries and keys over all heads. Raises UserError for an unknown size.

    Example: `mj.olmoe("1b-7b")`
    """
    row, norm = pick("olmoe", OLMOE, size), RMSNormConfig(epsilon=1e-5)
    mixer = AttentionConfig(
        heads=row.heads, kv_heads=row.kv_heads, qk_norm=norm, qk_norm_over="heads", rope=RopeConfig()
    )
    router = RouterConfig(normalise="all", aux_loss=0.01, z_loss=0.001)
    moe = MoEConfig(experts=row.experts, top_k=row.top_k, expert=GatedMLPConfig(ffn=row.ffn), router=router)
    block = BlockConfig(mixer=mixer, mlp=moe, norm=norm)
    return decoder(row, block, sequence_length=sequence_length, vocabulary_size=vocabulary_size)


def olmo3(
    size: str, *, sequence_length: int = 8192, vocabulary_size: int = 100278, window: int = 4096, yarn: bool = False
) -> DecoderConfig:
    """OLMo 3: norms of outputs, and of queries and keys over all heads; windows in three of four layers.

    yarn: extends RoPE of full layers from 8192 tokens to 65536, as in the released models. Raises UserError for an
    unknown size.

    Example: `mj.olmo3("7b")`
    """
    row, norm = pick("olmo3", OLMO3, size), RMSNormConfig(epsilon=1e-6)
    plain = RopeConfig(base=500000.0)
    scaled = replace(plain, scaling=YarnScalingConfig(factor=8.0, original=8192))
    full = AttentionConfig(
        heads=row.heads, kv_heads=row.kv_heads, qk_norm=norm, qk_norm_over="heads", rope=scaled if yarn else plain
    )
    block = BlockConfig(mixer=full, mlp=GatedMLPConfig(ffn=row.ffn), norm=norm, norm_placement="output")
    local = replace(block, mixer=replace(full, window=window - 1, rope=plain))
    return decoder(row, local, local, local, block, sequence_length=sequence_length, vocabulary_size=vocabulary_size)
