"""Granite 3 (IBM 2024). Sizes from the released configs."""

from megajax.layers.attention.config import AttentionConfig
from megajax.layers.block.config import BlockConfig
from megajax.layers.mlp.config import GatedMLPConfig
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
    )
