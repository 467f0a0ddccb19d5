"""BERT (Devlin et al. 2019, section 3), and Megatron-LM's larger sizes (Shoeybi et al. 2019, table 4)."""

from megajax.layers.attention.config import AttentionConfig
from megajax.layers.block.config import BlockConfig
from megajax.layers.mlp.config import DenseMLPConfig
from megajax.layers.norm.config import LayerNormConfig
from megajax.layers.stack.config import StackConfig
from megajax.models.bert.config import BertConfig
from megajax.models.presets.sizes import Size, pick

BERT_VOCABULARY = 30524
"""Size of the vocabulary of bert-base-uncased with [BOS] and [EOS]."""

BERT = {
    "debug": Size(2, 64, 4),
    "text": Size(2, 128, 4),
    "base": Size(12, 768, 12),
    "large": Size(24, 1024, 16),
    "1.3b": Size(24, 2048, 32),
    "3.9b": Size(48, 2560, 40),
}
"""`text` is for a few megabytes of text."""


def bert(
    size: str,
    *,
    sequence_length: int = 512,
    vocabulary_size: int = BERT_VOCABULARY,
    dropout: float = 0.1,
    next_sentence: bool = True,
) -> BertConfig:
    """Pre-norm BERT, as trained by Megatron-LM: learned positions, tanh GELU, biases.

    Raises UserError for an unknown size.

    Example: `mj.bert("base", sequence_length=128)`
    """
    row = pick("bert", BERT, size)
    block = BlockConfig(
        mixer=AttentionConfig(heads=row.heads, bias=True, dropout=dropout, causal=False),
        mlp=DenseMLPConfig(ffn=4 * row.hidden, activation="gelu_tanh", bias=True),
        norm=LayerNormConfig(),
        dropout=dropout,
    )
    return BertConfig(
        hidden=row.hidden,
        vocabulary_size=vocabulary_size,
        sequence_length=sequence_length,
        stack=StackConfig(pattern=(block,), repeats=row.layers),
        dropout=dropout,
        next_sentence=next_sentence,
    )
