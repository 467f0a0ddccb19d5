"""Qwen 2.5 (Qwen team 2024, table 1) and the dense Qwen 3 (Qwen team 2025, table 1), sizes of the released configs."""

from typing import NamedTuple

from megajax.config.errors import UserError
from megajax.layers.config import AttentionConfig, BlockConfig, GatedMLPConfig, RMSNormConfig, RopeConfig, StackConfig
from megajax.models.config import DecoderConfig


class Size(NamedTuple):
    """A row of the papers' tables."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    ffn: int
    tied: bool
    vocabulary: int = 151936
    """Rows of the released tables."""


QWEN2 = {
    "debug": Size(2, 64, 4, 2, 192, True),
    "0.5b": Size(24, 896, 14, 2, 4864, True),
    "1.5b": Size(28, 1536, 12, 2, 8960, True),
    "3b": Size(36, 2048, 16, 2, 11008, True),
    "7b": Size(28, 3584, 28, 4, 18944, False, 152064),
    "14b": Size(48, 5120, 40, 8, 13824, False, 152064),
    "32b": Size(64, 5120, 40, 8, 27648, False, 152064),
    "72b": Size(80, 8192, 64, 8, 29568, False, 152064),
}

QWEN3 = {
    "debug": Size(2, 64, 4, 2, 192, True),
    "0.6b": Size(28, 1024, 16, 8, 3072, True),
    "1.7b": Size(28, 2048, 16, 8, 6144, True),
    "4b": Size(36, 2560, 32, 8, 9728, True),
    "8b": Size(36, 4096, 32, 8, 12288, False),
    "14b": Size(40, 5120, 40, 8, 17408, False),
    "32b": Size(64, 5120, 64, 8, 25600, False),
}

NORM = RMSNormConfig(epsilon=1e-6)


def qwen2(size: str, *, sequence_length: int = 32768, vocabulary_size: int | None = None) -> DecoderConfig:
    """Qwen 2.5: like Llama, with biases on queries, keys and values. Raises UserError for an unknown size."""
    chosen = _pick("qwen2", QWEN2, size)
    mixer = AttentionConfig(
        heads=chosen.heads, kv_heads=chosen.kv_heads, qkv_bias=True, rope=RopeConfig(base=1000000.0)
    )
    return _decoder(chosen, mixer, sequence_length, vocabulary_size)


def qwen3(size: str, *, sequence_length: int = 32768, vocabulary_size: int | None = None) -> DecoderConfig:
    """Qwen 3: query and key heads normalised, each of 128 whatever the width. Raises UserError for an unknown size."""
    chosen = _pick("qwen3", QWEN3, size)
    mixer = AttentionConfig(
        heads=chosen.heads,
        kv_heads=chosen.kv_heads,
        head_dim=16 if size == "debug" else 128,
        qk_norm=NORM,
        rope=RopeConfig(base=1000000.0),
    )
    return _decoder(chosen, mixer, sequence_length, vocabulary_size)


def _pick(family: str, sizes: dict[str, Size], size: str) -> Size:
    if size not in sizes:
        raise UserError(f"{family} has no size {size!r}; sizes: {', '.join(sizes)}")
    return sizes[size]


def _decoder(size: Size, mixer: AttentionConfig, sequence_length: int, vocabulary_size: int | None) -> DecoderConfig:
    block = BlockConfig(mixer=mixer, mlp=GatedMLPConfig(ffn=size.ffn), norm=NORM)
    return DecoderConfig(
        hidden=size.hidden,
        vocabulary_size=vocabulary_size or size.vocabulary,
        sequence_length=sequence_length,
        stack=StackConfig(pattern=(block,), repeats=size.layers),
        norm=NORM,
        tied=size.tied,
    )
