"""Falcon-H1 (Falcon LLM team 2025). Sizes from the released configs."""

from typing import NamedTuple

from megajax.layers.attention.config import AttentionConfig
from megajax.layers.block.config import BlockConfig
from megajax.layers.mamba.config import Mamba2Config
from megajax.layers.mlp.config import GatedMLPConfig
from megajax.layers.norm.config import RMSNormConfig
from megajax.layers.position.config import RopeConfig
from megajax.models.decoder.config import DecoderConfig
from megajax.models.presets.sizes import Size, decoder, pick


class FalconH1Size(NamedTuple):
    """A size, and its Mamba-2 mixers."""

    size: Size
    mamba: Mamba2Config


FALCON_H1 = {
    "debug": FalconH1Size(
        Size(2, 64, 4, 2, 128, vocabulary=1024, head_dim=16),
        Mamba2Config(heads=4, head_dim=16, state=16, normalised=False),
    ),
    "0.5b": FalconH1Size(
        Size(36, 1024, 8, 2, 2048, vocabulary=32784, head_dim=64), Mamba2Config(heads=24, state=128, normalised=False)
    ),
    "34b": FalconH1Size(
        Size(72, 5120, 20, 4, 21504, vocabulary=261120, head_dim=128),
        Mamba2Config(heads=32, head_dim=128, state=256, groups=2),
    ),
}


def falcon_h1(size: str, *, sequence_length: int = 4096, vocabulary_size: int | None = None) -> DecoderConfig:
    """Falcon-H1: attention and Mamba-2 read the same input in each layer. A converted model has factors, this none.

    vocabulary_size: None: that of the released model. Raises UserError for an unknown size.

    Example: `mj.falcon_h1("0.5b")`
    """
    row, mamba = pick("falcon_h1", FALCON_H1, size)
    rope = RopeConfig(base=1e11)
    attention = AttentionConfig(heads=row.heads, kv_heads=row.kv_heads, head_dim=row.head_dim, rope=rope)
    norm, mlp = RMSNormConfig(epsilon=1e-5), GatedMLPConfig(ffn=row.ffn)
    block = BlockConfig(mixer=attention, beside=mamba, mlp=mlp, norm=norm)
    rows = vocabulary_size or row.vocabulary
    return decoder(row, block, sequence_length=sequence_length, vocabulary_size=rows)
