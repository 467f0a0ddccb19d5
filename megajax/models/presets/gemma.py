"""Gemma (Gemma team, Google). Sizes from the released configs; of image models, the text part."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from megajax.layers.attention.config import AttentionConfig
from megajax.layers.block.config import BlockConfig
from megajax.layers.mlp.config import GatedMLPConfig
from megajax.layers.norm.config import RMSNormConfig
from megajax.layers.position.config import RopeConfig
from megajax.models.decoder.config import DecoderConfig, WidthScalingConfig
from megajax.models.presets.sizes import Size, decoder, pick


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

NORM = RMSNormConfig(epsilon=1e-6, zero_centred=True)


def gemma2(size: str, *, sequence_length: int = 8192, vocabulary_size: int | None = None) -> DecoderConfig:
    """Gemma 2: a window in every other layer, norms around sub-layers, soft caps of scores at 50 and of logits at 30.

    Raises UserError for an unknown size.

    Example: `mj.gemma2("9b")`
    """
    row = pick("gemma2", GEMMA2, size)
    full = replace(_attention(row), rope=RopeConfig(), score_cap=50.0)
    local = replace(full, window=row.window - 1)
    return _decoder(row, (local, full), sequence_length, vocabulary_size, logit_cap=30.0)


def gemma3(size: str, *, sequence_length: int = 32768, vocabulary_size: int | None = None) -> DecoderConfig:
    """Gemma 3: five layers with a window, then one without, with RoPE of another base each; norms around sub-layers.

    Raises UserError for an unknown size.

    Example: `mj.gemma3("1b")`
    """
    row = pick("gemma3", GEMMA3, size)
    full = replace(_attention(row), qk_norm=NORM, rope=RopeConfig(base=1e6, interpolation=row.interpolation))
    local = replace(full, window=row.window - 1, rope=RopeConfig(base=1e4))
    return _decoder(row, (*(local,) * 5, full), sequence_length, vocabulary_size)


def _attention(row: GemmaSize) -> AttentionConfig:
    size = row.size
    return AttentionConfig(heads=size.heads, kv_heads=size.kv_heads, head_dim=size.head_dim, scale=row.score_size**-0.5)


def _decoder(
    row: GemmaSize, mixers: Sequence[AttentionConfig], sequence_length: int, vocabulary_size: int | None, **more: Any
) -> DecoderConfig:
    size, mlp = row.size, GatedMLPConfig(ffn=row.size.ffn, activation="gelu_tanh")
    blocks = [BlockConfig(mixer=mixer, mlp=mlp, norm=NORM, norm_placement="sandwich") for mixer in mixers]
    return decoder(
        size,
        *blocks,
        sequence_length=sequence_length,
        vocabulary_size=vocabulary_size or size.vocabulary,
        tied=True,
        width_scaling=WidthScalingConfig(base_hidden=size.hidden, score_power=0.5, embedding=size.hidden**0.5),
        **more,
    )
