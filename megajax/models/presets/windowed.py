"""Models with windows in some layers, and their kin; sizes from the released configs.

Cohere 2 (Cohere 2024), EXAONE 4 (LG AI Research 2025), OLMo 3 (Team OLMo 2025) and OLMoE (Muennighoff et al. 2024),
gpt-oss (OpenAI 2025, model card, section 2), Gemma (Gemma team, Google; of image models, the text part).
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

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
        family="cohere2",
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
    return decoder(
        row, *blocks, sequence_length=sequence_length, vocabulary_size=vocabulary_size, tied=row.tied, family="exaone4"
    )


OLMO3 = {"debug": Size(4, 64, 4, 4, 160), "7b": Size(32, 4096, 32, 32, 11008), "32b": Size(64, 5120, 40, 8, 27648)}

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
    return decoder(row, block, sequence_length=sequence_length, vocabulary_size=vocabulary_size, family="olmoe")


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
    lengths = {"sequence_length": sequence_length, "vocabulary_size": vocabulary_size}
    return decoder(row, *(local,) * 3, block, **lengths, family="olmo3")


GPT_OSS = {
    "debug": Size(4, 64, 4, 2, 64, head_dim=16, experts=8, top_k=4),
    "20b": Size(24, 2880, 64, 8, 2880, head_dim=64, experts=32, top_k=4),
    "120b": Size(36, 2880, 64, 8, 2880, head_dim=64, experts=128, top_k=4),
}


def gpt_oss(
    size: str, *, sequence_length: int = 131072, vocabulary_size: int = 201088, window: int = 128
) -> DecoderConfig:
    """gpt-oss: in every other layer a token sees only the last `window` tokens, including itself; heads have a learned
    sink.

    All layers and the router have biases. Experts compute (x up + 1) * x gate * sigmoid(1.702 x gate), with both
    products clipped at 7. YaRN extends RoPE from 4096 tokens to 131072. The model card does not say how experts were
    balanced; a loss is used here. Raises UserError for an unknown size.

    Example: `mj.gpt_oss("20b")`
    """
    row = pick("gpt_oss", GPT_OSS, size)
    yarn = YarnScalingConfig(factor=32.0, original=4096, fast=32.0, slow=1.0, rounded=False)
    full = AttentionConfig(
        heads=row.heads,
        kv_heads=row.kv_heads,
        head_dim=row.head_dim,
        bias=True,
        rope=RopeConfig(base=150000.0, scaling=yarn),
        sink="learned",
    )
    expert = GatedMLPConfig(ffn=row.ffn, activation="quick_gelu", bias=True, clamp=7.0, offset=1.0)
    block = BlockConfig(
        mixer=full,
        mlp=MoEConfig(
            experts=row.experts, top_k=row.top_k, expert=expert, router=RouterConfig(bias=True, aux_loss=0.001)
        ),
        norm=RMSNormConfig(),
    )
    windowed = replace(block, mixer=replace(full, window=window - 1))
    return decoder(
        row, windowed, block, sequence_length=sequence_length, vocabulary_size=vocabulary_size, family="gpt_oss"
    )


class GemmaSize(NamedTuple):
    """A size, and the settings that differ between sizes."""

    size: Size
    window: int
    """Tokens that a layer with a window sees, the query's own included."""
    score_size: int
    """Scores are divided by its square root."""
    interpolation: float = 1.0
    """Of the positions of full layers."""


GEMMA2 = {
    "debug": GemmaSize(Size(4, 64, 4, 2, 128, head_dim=16, vocabulary=512), 16, 16),
    "2b": GemmaSize(Size(26, 2304, 8, 4, 9216, head_dim=256, vocabulary=256000), 4096, 256),
    "9b": GemmaSize(Size(42, 3584, 16, 8, 14336, head_dim=256, vocabulary=256000), 4096, 256),
    "27b": GemmaSize(Size(46, 4608, 32, 16, 36864, head_dim=128, vocabulary=256000), 4096, 144),
}

GEMMA3 = {
    "debug": GemmaSize(Size(6, 64, 4, 2, 128, head_dim=16, vocabulary=512), 16, 16, 8.0),
    "270m": GemmaSize(Size(18, 640, 4, 1, 2048, head_dim=256, vocabulary=262144), 512, 256),
    "1b": GemmaSize(Size(26, 1152, 4, 1, 6912, head_dim=256, vocabulary=262144), 512, 256),
    "4b": GemmaSize(Size(34, 2560, 8, 4, 10240, head_dim=256, vocabulary=262208), 1024, 256, 8.0),
    "12b": GemmaSize(Size(48, 3840, 16, 8, 15360, head_dim=256, vocabulary=262208), 1024, 256, 8.0),
    "27b": GemmaSize(Size(62, 5376, 32, 16, 21504, head_dim=128, vocabulary=262208), 1024, 168, 8.0),
}

GEMMA_NORM = RMSNormConfig(epsilon=1e-6, zero_centred=True)


def gemma2(size: str, *, sequence_length: int = 8192, vocabulary_size: int | None = None) -> DecoderConfig:
    """Gemma 2: a window in every other layer, norms around sub-layers, soft caps of scores at 50 and of logits at 30.

    Raises UserError for an unknown size.

    Example: `mj.gemma2("9b")`
    """
    row = pick("gemma2", GEMMA2, size)
    full = replace(_attention(row), rope=RopeConfig(), score_cap=50.0)
    local = replace(full, window=row.window - 1)
    return _decoder(row, (local, full), sequence_length, vocabulary_size, logit_cap=30.0, family="gemma2")


def gemma3(size: str, *, sequence_length: int = 32768, vocabulary_size: int | None = None) -> DecoderConfig:
    """Gemma 3: five layers with a window, then one without, with RoPE of another base each; norms around sub-layers.

    Raises UserError for an unknown size.

    Example: `mj.gemma3("1b")`
    """
    row = pick("gemma3", GEMMA3, size)
    full = replace(_attention(row), qk_norm=GEMMA_NORM, rope=RopeConfig(base=1e6, interpolation=row.interpolation))
    local = replace(full, window=row.window - 1, rope=RopeConfig(base=1e4))
    return _decoder(row, (*(local,) * 5, full), sequence_length, vocabulary_size, family="gemma3_text")


def _attention(row: GemmaSize) -> AttentionConfig:
    size = row.size
    return AttentionConfig(heads=size.heads, kv_heads=size.kv_heads, head_dim=size.head_dim, scale=row.score_size**-0.5)


def _decoder(
    row: GemmaSize, mixers: Sequence[AttentionConfig], sequence_length: int, vocabulary_size: int | None, **more: Any
) -> DecoderConfig:
    size, mlp = row.size, GatedMLPConfig(ffn=row.size.ffn, activation="gelu_tanh")
    blocks = [BlockConfig(mixer=mixer, mlp=mlp, norm=GEMMA_NORM, norm_placement="sandwich") for mixer in mixers]
    return decoder(
        size,
        *blocks,
        sequence_length=sequence_length,
        vocabulary_size=vocabulary_size or size.vocabulary,
        tied=True,
        width_scaling=WidthScalingConfig(base_hidden=size.hidden, score_power=0.5, embedding=size.hidden**0.5),
        **more,
    )
