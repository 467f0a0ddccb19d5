"""BERT, normalised after each sum, and Megatron-LM's BERT, normalised before each sub-layer."""

from typing import Any

from megajax.interop.huggingface.decoders import SCORES
from megajax.interop.huggingface.family import (
    Family,
    Names,
    Settings,
    activation_name,
    attention,
    class_settings,
    classes,
    dense,
    layers_of,
    linear,
    norm,
    to_settings,
    tokens,
)
from megajax.interop.weights.name_mapping import Row
from megajax.layers.attention.config import AttentionConfig
from megajax.layers.block.config import BlockConfig
from megajax.layers.mlp.config import DenseMLPConfig
from megajax.layers.norm.config import IdentityNormConfig, LayerNormConfig
from megajax.layers.stack.config import StackConfig
from megajax.models.bert.config import BertConfig
from megajax.models.classifier.config import (
    ClassHeadConfig,
    RegressionHeadConfig,
    SpanHeadConfig,
    with_text_head,
)

UNUSED = frozenset({
    "attention_probs_dropout_prob", "classifier_dropout", "directionality", "gradient_checkpointing",
    "hidden_dropout_prob", "pooler_*",
})  # fmt: skip
"""About dropout and other heads."""
MODEL: Names = {
    "hidden": ("hidden_size", 768),
    "vocabulary_size": ("vocab_size", 30522),
    "sequence_length": ("max_position_embeddings", 512),
    "token_types": ("type_vocab_size", 2),
    "tied": ("tie_word_embeddings", True),
}
MEGATRON = {"vocab_size": 29056, "hidden_size": 1024, "intermediate_size": 4096, "num_attention_heads": 16}
"""Sizes of Megatron-LM's BERT where config.json does not say them, with 24 layers."""


def _read(settings: Settings) -> Any:
    before = settings.remaining.get("model_type") == "megatron-bert"
    settings.assume({**MEGATRON, "num_hidden_layers": 24} if before else {})
    norm = LayerNormConfig(epsilon=settings.take("layer_norm_eps", 1e-12))
    activation = settings.activation("hidden_act", "gelu")
    settings.only("position_embedding_type", "absolute")
    settings.only("is_decoder", False)
    block = BlockConfig(
        mixer=AttentionConfig(heads=settings.take("num_attention_heads", 12), bias=True, causal=False),
        mlp=DenseMLPConfig(ffn=settings.take("intermediate_size", 3072), activation=activation),
        norm=norm,
        norm_placement="pre" if before else "post",
    )
    model = BertConfig(
        **settings.fields(MODEL),
        stack=StackConfig(pattern=(block,), repeats=settings.layers(default=12)),
        norm=norm if before else IdentityNormConfig(),
        embedding_norm=None if before else norm,
        head_norm=None if before else norm,
        head_activation=activation,
        next_sentence=not settings.architecture().endswith("ForMaskedLM"),
    )
    if settings.architecture().endswith(ANSWERS):
        return with_text_head(model, SpanHeadConfig())
    if not settings.architecture().endswith((SCORES, CHOICES)):
        return model
    count = 1 if settings.architecture().endswith(CHOICES) else classes(settings)
    return with_text_head(model, RegressionHeadConfig() if count == 1 else ClassHeadConfig(classes=count))


ANSWERS, CHOICES = "ForQuestionAnswering", "ForMultipleChoice"
"""Ends of the names of classes with other heads."""


def _class(cfg: BertConfig) -> dict[str, Any]:
    """The class in transformers of the model's heads, and its settings."""
    name, head = "MegatronBert" if cfg.embedding_norm is None else "Bert", getattr(cfg, "head", None)
    if isinstance(head, SpanHeadConfig):
        return {"architectures": [f"{name}{ANSWERS}"]}
    if head is not None:
        return {"architectures": [f"{name}{SCORES}"], **class_settings(head.columns())}
    return {"architectures": [f"{name}ForPreTraining" if cfg.next_sentence else f"{name}ForMaskedLM"]}


def _write(cfg: BertConfig) -> dict[str, Any]:
    block = layers_of(cfg)[0]
    return {
        **_class(cfg),
        **to_settings(cfg, MODEL),
        "type_vocab_size": max(1, cfg.token_types),  # each token has a type in transformers
        "num_hidden_layers": cfg.stack.layers(),
        "num_attention_heads": block.mixer.heads,
        "intermediate_size": block.mlp.ffn,
        "hidden_act": activation_name(block.mlp.activation),
        "layer_norm_eps": block.norm.epsilon,
    }


LAYER, BLOCK, HEAD = "bert.encoder.layer.{layer}", "stack.*", "cls.predictions"
WORDS = "bert.embeddings.word_embeddings.weight"
POST = (
    ("bert.embeddings.LayerNorm", "embedding_norm"),
    (f"{LAYER}.attention.output.LayerNorm", f"{BLOCK}.mixer_norm"),
    (f"{LAYER}.output.LayerNorm", f"{BLOCK}.mlp_norm"),
)
PRE = (
    (f"{LAYER}.attention.ln", f"{BLOCK}.mixer_norm"),
    (f"{LAYER}.ln", f"{BLOCK}.mlp_norm"),
    ("bert.encoder.ln", "norm"),
)


def _rows(cfg: BertConfig) -> list[Row]:
    norms = (*(PRE if cfg.embedding_norm is None else POST), (f"{HEAD}.transform.LayerNorm", "masked_norm"))
    # An untied head has its own bias, and the other one is not read.
    bias = f"{HEAD}.bias" if cfg.tied else f"{HEAD}.decoder.bias"
    return [
        *tokens(cfg, WORDS, f"{HEAD}.decoder.weight"),
        Row("bert.embeddings.position_embeddings.weight", "positions"),
        Row("bert.embeddings.token_type_embeddings.weight", "types"),
        *attention(f"{LAYER}.attention", f"{BLOCK}.mixer", ("self.query", "self.key", "self.value", "output.dense")),
        *linear(f"{LAYER}.intermediate.dense", f"{BLOCK}.mlp.up"),
        *linear(f"{LAYER}.output.dense", f"{BLOCK}.mlp.down"),
        *[row for names in norms for row in norm(*names)],
        *dense("bert.pooler.dense", "pooler"),
        *dense(f"{HEAD}.transform.dense", "masked"),
        Row(bias, "masked_bias", index=(slice(0, cfg.vocabulary_size),)),
        *linear("cls.seq_relationship", "order"),
        *dense("qa_outputs" if isinstance(getattr(cfg, "head", None), SpanHeadConfig) else "classifier", "head.linear"),
    ]


FAMILIES = [
    Family(
        name=name,
        architecture=architecture,
        read=_read,
        write=_write,
        rows=_rows,
        unused=UNUSED,
        ignored=("bert.embeddings.position_ids", "bert.pooler.*", "cls.seq_relationship.*", f"{HEAD}.bias"),
        extra=("bert.pooler.*", "cls.seq_relationship.*"),
        renamed=((r"^(embeddings|encoder|pooler)\.", r"bert.\1."), (r"\.gamma$", ".weight"), (r"\.beta$", ".bias")),
        heads={f"{HEAD}.decoder.weight": WORDS, f"{HEAD}.decoder.bias": f"{HEAD}.bias"},
    )
    for name, architecture in (("bert", "BertForPreTraining"), ("megatron-bert", "MegatronBertForPreTraining"))
]
