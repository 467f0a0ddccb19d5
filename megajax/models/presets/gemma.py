"""Gemma (Gemma team, Google). Sizes from the released configs; of image models, the text part."""

from dataclasses import replace
from typing import NamedTuple

from megajax.layers.attention.config import AttentionConfig
from megajax.layers.block.config import BlockConfig
from megajax.layers.mlp.config import GatedMLPConfig
from megajax.layers.norm.config import RMSNormConfig
from megajax.layers.position.config import RopeConfig
from megajax.models.decoder.config import DecoderConfig, WidthScalingConfig
from megajax.models.presets.sizes import Size, decoder, pick


class Gemma3Size(NamedTuple):
    """A size, and the settings that differ between sizes."""

    size: Size
    window: int
    """Tokens that a layer with a window sees, the query's own included."""
    score_size: int
    """Scores are divided by its square root."""
    interpolation: float = 1.0
    """Of the positions of full layers."""


GEMMA3 = {
    "debug": Gemma3Size(Size(6, 64, 4, 2, 128, head_dim=16, vocabulary=512), 16, 16, 8.0),
    "270m": Gemma3Size(Size(18, 640, 4, 1, 2048, head_dim=256, vocabulary=262144), 512, 256),
    "1b": Gemma3Size(Size(26, 1152, 4, 1, 6912, head_dim=256, vocabulary=262144), 512, 256),
    "4b": Gemma3Size(Size(34, 2560, 8, 4, 10240, head_dim=256, vocabulary=262208), 1024, 256, 8.0),
    "12b": Gemma3Size(Size(48, 3840, 16, 8, 15360, head_dim=256, vocabulary=262208), 1024, 256, 8.0),
    "27b": Gemma3Size(Size(62, 5376, 32, 16, 21504, head_dim=128, vocabulary=262208), 1024, 168, 8.0),
}

NORM = RMSNormConfig(epsilon=1e-6, zero_centred=True)


def gemma3(size: str, *, sequence_length: int = 32768, vocabulary_size: int | None = None) -> DecoderConfig:
    """Gemma 3: five layers with a window, then one without, with RoPE of another base each; norms around sub-layers.

    Raises UserError for an unknown size.

    Example: `mj.gemma3("1b")`
    """
    row, window, score_size, interpolation = pick("gemma3", GEMMA3, size)
    full = AttentionConfig(
        heads=row.heads,
        kv_heads=row.kv_heads,
        head_dim=row.head_dim,
        qk_norm=NORM,
        rope=RopeConfig(base=1e6, interpolation=interpolation),
        scale=score_size**-0.5,
    )
    mlp = GatedMLPConfig(ffn=row.ffn, activation="gelu_tanh")
    block = BlockConfig(mixer=full, mlp=mlp, norm=NORM, norm_placement="sandwich")
    local = replace(block, mixer=replace(full, window=window - 1, rope=RopeConfig(base=1e4)))
    return decoder(
        row,
        *(local,) * 5,
        block,
        sequence_length=sequence_length,
        vocabulary_size=vocabulary_size or row.vocabulary,
        tied=True,
        width_scaling=WidthScalingConfig(base_hidden=row.hidden, score_power=0.5, embedding=row.hidden**0.5),
    )
