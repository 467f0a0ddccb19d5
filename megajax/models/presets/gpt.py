"""GPT-2 (Radford et al. 2019, table 2) and GPT-3 (Brown et al. 2020, table 2.1)."""

from megajax.layers.attention.config import AttentionConfig
from megajax.layers.block.config import BlockConfig
from megajax.layers.mlp.config import DenseMLPConfig
from megajax.layers.norm.config import LayerNormConfig
from megajax.models.decoder.config import DecoderConfig
from megajax.models.presets.sizes import Size, decoder, pick

GPT_VOCABULARY = 50257

GPT2 = {
    "debug": Size(2, 64, 4),
    "124m": Size(12, 768, 12),
    "355m": Size(24, 1024, 16),
    "774m": Size(36, 1280, 20),
    "1.5b": Size(48, 1600, 25),
}

GPT3 = {
    "debug": Size(2, 64, 4),
    "50m": Size(16, 512, 8),
    "125m": Size(12, 768, 12),
    "160m": Size(12, 896, 14),
    "350m": Size(24, 1024, 16),
    "760m": Size(24, 1536, 16),
    "1.3b": Size(24, 2048, 16),
    "2.7b": Size(32, 2560, 32),
    "6.7b": Size(32, 4096, 32),
    "13b": Size(40, 5120, 40),
    "175b": Size(96, 12288, 96),
}
"""50m and 160m are not in the paper: 50.4 M parameters in the layers, and 162 M with a table of 50257 tokens.
The paper lists 24 heads of 128 for 1.3B and a width of 5140 for 13B, which do not fit its other columns; as trained by
others: 16 heads of 128 and a width of 5120."""


def gpt2(
    size: str, *, sequence_length: int = 1024, vocabulary_size: int = GPT_VOCABULARY, dropout: float = 0.1
) -> DecoderConfig:
    """GPT-2: learned positions, LayerNorm, tanh GELU, biases, tied head. Raises UserError for an unknown size.

    Example: `mj.gpt2("124m")`
    """
    return _gpt(pick("gpt2", GPT2, size), sequence_length, vocabulary_size, dropout)


def gpt3(
    size: str, *, sequence_length: int = 2048, vocabulary_size: int = GPT_VOCABULARY, dropout: float = 0.0
) -> DecoderConfig:
    """GPT-3 with dense attention in every layer. Raises UserError for an unknown size.

    Example: `mj.gpt3("1.3b", sequence_length=2048)`
    """
    return _gpt(pick("gpt3", GPT3, size), sequence_length, vocabulary_size, dropout)


def _gpt(size: Size, sequence_length: int, vocabulary_size: int, dropout: float) -> DecoderConfig:
    block = BlockConfig(
        mixer=AttentionConfig(heads=size.heads, bias=True, dropout=dropout),
        mlp=DenseMLPConfig(ffn=4 * size.hidden, activation="gelu_tanh", bias=True),
        norm=LayerNormConfig(),
        dropout=dropout,
    )
    return decoder(
        size,
        block,
        sequence_length=sequence_length,
        vocabulary_size=vocabulary_size,
        learned_positions=True,
        tied=True,
        dropout=dropout,
        family="gpt2",
    )
