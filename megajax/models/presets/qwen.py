"""Qwen 2.5 (Qwen team 2024, table 1), Qwen 3 (2025, tables 1 and 2), and Qwen3-Next, 3.5 and VL, as released."""

from dataclasses import replace
from typing import Any, NamedTuple

from megajax.layers.attention.config import AttentionConfig
from megajax.layers.block.config import BlockConfig
from megajax.layers.delta.config import GatedDeltaNetConfig
from megajax.layers.mlp.config import DenseMLPConfig, GatedMLPConfig
from megajax.layers.moe.config import FeedForwardConfig, MoEConfig, RouterConfig, SharedExpertConfig
from megajax.layers.norm.config import LayerNormConfig, RMSNormConfig
from megajax.layers.position.config import AxialRopeConfig, InterleavedRopeConfig, RopeConfig
from megajax.layers.stack.config import StackConfig
from megajax.models.decoder.config import DecoderConfig
from megajax.models.presets.sizes import Size, decoder, pick
from megajax.models.qwen_vl.config import DynamicTowerConfig, QwenVLConfig, qwen_vl

RELEASED = 151936
"""Rows of the released embedding tables; the larger sizes of Qwen 2.5 have more."""

QWEN2 = {
    "debug": Size(2, 64, 4, 2, 192, True, RELEASED),
    "0.5b": Size(24, 896, 14, 2, 4864, True, RELEASED),
    "1.5b": Size(28, 1536, 12, 2, 8960, True, RELEASED),
    "3b": Size(36, 2048, 16, 2, 11008, True, RELEASED),
    "7b": Size(28, 3584, 28, 4, 18944, False, 152064),
    "14b": Size(48, 5120, 40, 8, 13824, False, 152064),
    "32b": Size(64, 5120, 40, 8, 27648, False, 152064),
    "72b": Size(80, 8192, 64, 8, 29568, False, 152064),
}

QWEN3 = {
    "debug": Size(2, 64, 4, 2, 192, True, RELEASED),
    "0.6b": Size(28, 1024, 16, 8, 3072, True, RELEASED),
    "1.7b": Size(28, 2048, 16, 8, 6144, True, RELEASED),
    "4b": Size(36, 2560, 32, 8, 9728, True, RELEASED),
    "8b": Size(36, 4096, 32, 8, 12288, False, RELEASED),
    "14b": Size(40, 5120, 40, 8, 17408, False, RELEASED),
    "32b": Size(64, 5120, 64, 8, 25600, False, RELEASED),
}

QWEN3_MOE = {
    "debug": Size(4, 64, 4, 2, 32, head_dim=16, experts=16, top_k=4),
    "30b-a3b": Size(48, 2048, 32, 4, 768, head_dim=128, experts=128, top_k=8),
    "235b-a22b": Size(94, 4096, 64, 4, 1536, head_dim=128, experts=128, top_k=8),
}

QWEN3_VL = {
    "debug": ("debug", Size(3, 32, 2, ffn=64), (0, 1)),
    "2b": ("1.7b", Size(24, 1024, 16, ffn=4096), (5, 11, 17)),
    "4b": ("4b", Size(24, 1024, 16, ffn=4096), (5, 11, 17)),
    "8b": ("8b", Size(27, 1152, 16, ffn=4304), (8, 16, 24)),
    "32b": ("32b", Size(27, 1152, 16, ffn=4304), (8, 16, 24)),
}
"""Size -> that of the decoder, the tower, and its blocks whose outputs DeepStack adds."""
IMAGE_TOKEN = 151655

NORM = RMSNormConfig(epsilon=1e-6)


class DeltaSize(NamedTuple):
    """A size with gated delta nets in three of four layers."""

    size: Size
    heads: int
    """Value heads of a gated delta net."""
    key_heads: int = 16
    head_dim: int = 128
    """Size of its heads."""


QWEN3_NEXT = {
    "debug": DeltaSize(Size(4, 64, 4, 2, 32, head_dim=16, experts=16, top_k=4), 4, 2, 16),
    "80b-a3b": DeltaSize(Size(48, 2048, 16, 2, 512, head_dim=256, experts=512, top_k=10), 32),
}

QWEN3_5 = {
    "debug": DeltaSize(Size(4, 64, 4, 2, 192, True, head_dim=16), 4, 2, 16),
    "4b": DeltaSize(Size(32, 2560, 16, 4, 9216, True, head_dim=256), 32),
    "9b": DeltaSize(Size(32, 4096, 16, 4, 12288, head_dim=256), 32),
    "27b": DeltaSize(Size(64, 5120, 24, 4, 17408, head_dim=256), 48),
}

QWEN3_5_MOE = {
    "debug": DeltaSize(Size(4, 64, 4, 2, 32, head_dim=16, experts=16, top_k=4), 4, 2, 16),
    "35b-a3b": DeltaSize(Size(40, 2048, 16, 2, 512, head_dim=256, experts=256, top_k=8), 32),
    "397b-a17b": DeltaSize(Size(60, 4096, 32, 2, 1024, head_dim=256, experts=512, top_k=10), 64),
}


def qwen2(size: str, *, sequence_length: int = 32768, vocabulary_size: int | None = None) -> DecoderConfig:
    """Qwen 2.5: like Llama, with biases on queries, keys and values. Raises UserError for an unknown size.

    Example: `mj.qwen2("7b")`
    """
    return _qwen("qwen2", pick("qwen2", QWEN2, size), sequence_length, vocabulary_size, qkv_bias=True)


def qwen3(size: str, *, sequence_length: int = 32768, vocabulary_size: int | None = None) -> DecoderConfig:
    """Qwen 3: normalised queries and keys, head size 128 for every width. Raises UserError for an unknown size.

    Example: `mj.qwen3("8b")`
    """
    head_dim = 16 if size == "debug" else 128
    return _qwen("qwen3", pick("qwen3", QWEN3, size), sequence_length, vocabulary_size, head_dim=head_dim, qk_norm=NORM)


def qwen3_moe(size: str, *, sequence_length: int = 32768, vocabulary_size: int = RELEASED) -> DecoderConfig:
    """Qwen 3 with experts instead of MLPs, without shared experts. Raises UserError for an unknown size.

    The balancing loss is over the whole batch, as in the report, with the coefficient of the released configs.

    Example: `mj.qwen3_moe("30b-a3b")`
    """
    row = pick("qwen3_moe", QWEN3_MOE, size)
    rope = RopeConfig(base=1000000.0)
    block = BlockConfig(
        mixer=AttentionConfig(heads=row.heads, kv_heads=row.kv_heads, head_dim=row.head_dim, rope=rope, qk_norm=NORM),
        mlp=MoEConfig(
            experts=row.experts,
            top_k=row.top_k,
            expert=GatedMLPConfig(ffn=row.ffn),
            router=RouterConfig(global_loss=0.001),
        ),
        norm=NORM,
    )
    return decoder(row, block, sequence_length=sequence_length, vocabulary_size=vocabulary_size, family="qwen3_moe")


def _qwen(
    family: str, size: Size, sequence_length: int, vocabulary_size: int | None, **attention: Any
) -> DecoderConfig:
    rope = RopeConfig(base=1000000.0)
    mixer = AttentionConfig(heads=size.heads, kv_heads=size.kv_heads, rope=rope, **attention)
    block = BlockConfig(mixer=mixer, mlp=GatedMLPConfig(ffn=size.ffn), norm=NORM)
    lengths = {"sequence_length": sequence_length, "vocabulary_size": vocabulary_size or size.vocabulary}
    return decoder(size, block, **lengths, tied=size.tied, family=family)


def qwen3_next(size: str, *, sequence_length: int = 262144, vocabulary_size: int = RELEASED) -> DecoderConfig:
    """Qwen3-Next: gated delta nets, gated attention in every fourth layer, experts with a gated shared one.

    Without the released block for multi-token prediction. Raises UserError for an unknown size.

    Example: `mj.qwen3_next("80b-a3b")`
    """
    return _delta("qwen3_next", pick("qwen3_next", QWEN3_NEXT, size), sequence_length, vocabulary_size)


def qwen3_5(size: str, *, sequence_length: int = 262144, vocabulary_size: int = 248320) -> DecoderConfig:
    """Qwen3.5 without experts: the text model, with Qwen3-Next's mixers. Raises UserError for an unknown size.

    Example: `mj.qwen3_5("27b")`
    """
    return _delta("qwen3_5_text", pick("qwen3_5", QWEN3_5, size), sequence_length, vocabulary_size)


def qwen3_5_moe(size: str, *, sequence_length: int = 262144, vocabulary_size: int = 248320) -> DecoderConfig:
    """Qwen3.5 with experts: the text model, in Qwen3-Next's blocks. Raises UserError for an unknown size.

    Example: `mj.qwen3_5_moe("35b-a3b")`
    """
    return _delta("qwen3_5_moe_text", pick("qwen3_5_moe", QWEN3_5_MOE, size), sequence_length, vocabulary_size)


def _delta(family: str, size: DeltaSize, sequence_length: int, vocabulary_size: int) -> DecoderConfig:
    row, heads, key_heads, head_dim = size
    mlp, norm = GatedMLPConfig(ffn=row.ffn), RMSNormConfig(epsilon=1e-6, zero_centred=True)
    feed_forward: FeedForwardConfig = mlp
    if row.experts:
        router, shared = RouterConfig(global_loss=0.001), SharedExpertConfig(mlp=mlp, gate=True)
        feed_forward = MoEConfig(experts=row.experts, top_k=row.top_k, expert=mlp, router=router, shared=shared)
    delta = GatedDeltaNetConfig(heads=heads, key_heads=key_heads, head_dim=head_dim, key_dim=head_dim)
    attention = AttentionConfig(
        heads=row.heads,
        kv_heads=row.kv_heads,
        head_dim=row.head_dim,
        rope=RopeConfig(base=10000000.0, fraction=0.25),
        qk_norm=norm,
        gate=True,
    )
    blocks = [BlockConfig(mixer=mixer, mlp=feed_forward, norm=norm) for mixer in (delta, delta, delta, attention)]
    lengths = {"sequence_length": sequence_length, "vocabulary_size": vocabulary_size}
    return decoder(row, *blocks, **lengths, tied=row.tied, family=family)


def qwen3_vl(size: str, *, sequence_length: int = 262144, vocabulary_size: int = RELEASED, **more: Any) -> QwenVLConfig:
    """Qwen3-VL without experts: Qwen 3 with a tower for images of any size. Raises UserError for an unknown size.

    more: other settings of QwenVLConfig, such as slots.

    Example: `mj.qwen3_vl("4b", sequence_length=8192, slots=4)`
    """
    name, row, features = pick("qwen3_vl", QWEN3_VL, size)
    language = qwen3(name, sequence_length=sequence_length, vocabulary_size=vocabulary_size)
    (block,), norm = language.stack.pattern, LayerNormConfig(epsilon=1e-6)
    # Of 64 frequencies of a head, 24 are of time, and 20 each of rows and columns.
    sections = (4, 2, 2) if size == "debug" else (24, 20, 20)
    rope = InterleavedRopeConfig(base=5000000.0, sections=sections)
    mixer: Any = block.mixer
    block = replace(block, mixer=replace(mixer, rope=rope))
    seeing = BlockConfig(
        mixer=AttentionConfig(heads=row.heads, bias=True, causal=False, rope=AxialRopeConfig()),
        mlp=DenseMLPConfig(ffn=row.ffn, activation="gelu_tanh"),
        norm=norm,
    )
    side, patch = (4, 4) if size == "debug" else (48, 16)
    tower = DynamicTowerConfig(
        hidden=row.hidden,
        stack=StackConfig(pattern=(seeing,), repeats=row.layers),
        height=side * patch,
        width=side * patch,
        patch=patch,
        class_tokens=0,
        norm=norm,
        features=features,
        least=16 if size == "debug" else 256,
        most=side**2,
    )
    language = replace(language, stack=replace(language.stack, pattern=(block,)))
    settings: dict[str, Any] = {"image_token": min(IMAGE_TOKEN, vocabulary_size - 1), "family": "qwen3_vl", **more}
    return qwen_vl(language, tower, **settings)
