"""BERT (Devlin et al. 2019, section 3), and Megatron-LM's larger sizes (Shoeybi et al. 2019, table 4); T5 (Raffel et
al. 2020, section 3.7) and T5 v1.1 (Shazeer 2020, with a gated MLP)."""

from dataclasses import replace
from typing import Any

from megajax.layers.attention.config import AttentionConfig, CrossAttentionConfig
from megajax.layers.block.config import BlockConfig
from megajax.layers.mlp.config import DenseMLPConfig, GatedMLPConfig, MLPConfig
from megajax.layers.norm.config import IdentityNormConfig, LayerNormConfig, NormConfig, RMSNormConfig
from megajax.layers.position.config import RelativeBiasConfig
from megajax.layers.stack.config import StackConfig
from megajax.models.bert.config import BertConfig
from megajax.models.decoder.config import WidthScalingConfig
from megajax.models.presets.sizes import Size, pick
from megajax.models.t5.config import T5Config

BERT_VOCABULARY = 30524
"""Size of the vocabulary of bert-base-uncased with [BOS] and [EOS]."""

BERT = {
    "debug": Size(2, 64, 4),
    "text": Size(2, 128, 4),
    "base": Size(12, 768, 12),
    "large": Size(24, 1024, 16),
    "1.3b": Size(24, 2048, 32),
    "3.9b": Size(48, 2560, 40),
    "debug-megatron": Size(2, 64, 4),
}
"""`text` is for a few megabytes of text."""
MEGATRON = ("text", "1.3b", "3.9b", "debug-megatron")


def bert(
    size: str,
    *,
    sequence_length: int = 512,
    vocabulary_size: int = BERT_VOCABULARY,
    dropout: float = 0.1,
    next_sentence: bool = True,
) -> BertConfig:
    """BERT: norms after sums, learned positions, GELU, biases. Megatron-LM's sizes and `text` have norms before
    sub-layers, and tanh GELU. Raises UserError for an unknown size.

    Example: `mj.bert("base", sequence_length=128)`
    """
    row, before = pick("bert", BERT, size), size in MEGATRON
    norm: NormConfig = LayerNormConfig(epsilon=1e-5 if before else 1e-12)
    activation = "gelu_tanh" if before else "gelu"
    block = BlockConfig(
        mixer=AttentionConfig(heads=row.heads, bias=True, dropout=dropout, causal=False),
        mlp=DenseMLPConfig(ffn=4 * row.hidden, activation=activation, bias=True),
        norm=norm,
        norm_placement="pre" if before else "post",
        dropout=dropout,
    )
    return BertConfig(
        hidden=row.hidden,
        vocabulary_size=vocabulary_size,
        sequence_length=sequence_length,
        stack=StackConfig(pattern=(block,), repeats=row.layers),
        norm=norm if before else IdentityNormConfig(),
        embedding_norm=None if before else norm,
        head_norm=None if before else norm,
        head_activation=activation,
        dropout=dropout,
        next_sentence=next_sentence,
        family="megatron-bert" if before else "bert",
    )


T5_VOCABULARY = 30624
"""Size of the vocabulary of bert-base-uncased with [BOS], [EOS] and 100 sentinels."""

T5 = {
    "debug": Size(2, 64, 4, ffn=256, head_dim=16),
    "text": Size(2, 128, 4, ffn=512, head_dim=32),
    "small": Size(6, 512, 8, ffn=2048, head_dim=64),
    "base": Size(12, 768, 12, ffn=3072, head_dim=64),
    "large": Size(24, 1024, 16, ffn=4096, head_dim=64),
    "3b": Size(24, 1024, 32, ffn=16384, head_dim=128),
    "11b": Size(24, 1024, 128, ffn=65536, head_dim=128),
}
"""Encoder and decoder have the same number of layers. `text` is for a few megabytes of text."""

T5_V1_1 = {
    "debug": Size(2, 64, 4, ffn=128, head_dim=16),
    "small": Size(8, 512, 6, ffn=1024, head_dim=64),
    "base": Size(12, 768, 12, ffn=2048, head_dim=64),
    "large": Size(24, 1024, 16, ffn=2816, head_dim=64),
    "xl": Size(24, 2048, 32, ffn=5120, head_dim=64),
    "xxl": Size(24, 4096, 64, ffn=10240, head_dim=64),
}


def t5(
    size: str,
    *,
    encoder_length: int = 512,
    sequence_length: int = 128,
    vocabulary_size: int = T5_VOCABULARY,
    dropout: float = 0.1,
) -> T5Config:
    """T5: RMSNorm, ReLU, no biases, relative positions, and a tied head whose inputs are divided by sqrt(hidden).

    Raises UserError for an unknown size.

    Example: `mj.t5("base")`
    """
    row = pick("t5", T5, size)
    scaling = WidthScalingConfig(base_hidden=row.hidden, output=row.hidden**-0.5)
    sizes = {"vocabulary_size": vocabulary_size, "dropout": dropout}
    mlp = DenseMLPConfig(ffn=row.ffn, activation="relu", bias=False)
    return _t5(row, mlp, encoder_length, sequence_length, **sizes, tied=True, width_scaling=scaling)


def t5_v1_1(
    size: str,
    *,
    encoder_length: int = 512,
    sequence_length: int = 128,
    vocabulary_size: int = T5_VOCABULARY,
    dropout: float = 0.0,
) -> T5Config:
    """T5 v1.1: like T5, with GeGLU and an untied head that has no factor.

    Raises UserError for an unknown size.

    Example: `mj.t5_v1_1("base")`
    """
    row, sizes = pick("t5_v1_1", T5_V1_1, size), {"vocabulary_size": vocabulary_size, "dropout": dropout}
    mlp = GatedMLPConfig(ffn=row.ffn, activation="gelu_tanh")
    return _t5(row, mlp, encoder_length, sequence_length, **sizes, tied=False)


def _t5(row: Size, mlp: MLPConfig, encoder_length: int, length: int, *, dropout: float, **more: Any) -> T5Config:
    """Encoder and decoder of a size; scores have no factor. `more` are other settings of the model."""
    norm, relative = RMSNormConfig(epsilon=1e-6), RelativeBiasConfig(shared=True)
    heads: dict[str, Any] = {"heads": row.heads, "head_dim": row.head_dim, "scale": 1.0, "dropout": dropout}
    parts: dict[str, Any] = {"mlp": mlp, "norm": norm, "dropout": dropout}
    both_ways = replace(relative, both_ways=True)
    reads = BlockConfig(mixer=AttentionConfig(**heads, relative=both_ways, causal=False), **parts)
    mixer, cross = AttentionConfig(**heads, relative=relative), CrossAttentionConfig(**heads)
    writes = BlockConfig(mixer=mixer, cross=cross, **parts)
    return T5Config(
        hidden=row.hidden,
        encoder_length=encoder_length,
        sequence_length=length,
        encoder=StackConfig(pattern=(reads,), repeats=row.layers),
        stack=StackConfig(pattern=(writes,), repeats=row.layers),
        norm=norm,
        head_bias=False,
        dropout=dropout,
        init_std=(row.hidden * row.head_dim**0.5) ** -0.5,  # scores have no factor: theirs is 1 at first
        embedding_std=1.0,  # a tied head with smaller ones would learn slowly
        family="t5",
        **more,
    )
