"""BERT, normalised after each sum, and Megatron-LM's BERT, normalised before each sub-layer."""

from collections.abc import Callable, Sequence
from typing import Any

from megajax.checkpoint.huggingface.activations import ACTIVATIONS, theirs
from megajax.checkpoint.huggingface.family import Family, Names, Settings, written
from megajax.checkpoint.huggingface.rows import attention, dense, linear, norm
from megajax.checkpoint.weights.tensor_table import Row
from megajax.layers import config as layers
from megajax.models.config import BertConfig

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


def model(given: Settings) -> BertConfig:
    """The model of a config.json."""
    before = given.left.get("model_type") == "megatron-bert"
    given.assume({**MEGATRON, "num_hidden_layers": 24} if before else {})
    norm = layers.LayerNormConfig(epsilon=given.take("layer_norm_eps", 1e-12))
    activation = given.choose("hidden_act", "gelu", ACTIVATIONS)
    given.only("position_embedding_type", "absolute")
    given.only("is_decoder", False)
    block = (layers.BlockConfig if before else layers.PostNormBlockConfig)(
        mixer=layers.AttentionConfig(heads=given.take("num_attention_heads", 12), bias=True, causal=False),
        mlp=layers.DenseMLPConfig(ffn=given.take("intermediate_size", 3072), activation=activation),
        norm=norm,
    )
    return BertConfig(
        **given.fields(MODEL),
        stack=layers.StackConfig(pattern=(block,), repeats=given.layers(default=12)),
        norm=norm if before else layers.IdentityNormConfig(),
        embedding_norm=None if before else norm,
        head_norm=None if before else norm,
        head_activation=activation,
        next_sentence=not given.architecture().endswith("ForMaskedLM"),
    )


def settings_of(kind: str, name: str) -> Callable[[Any], dict[str, Any]]:
    """The config.json of a model as one of this model_type, whose classes begin with `name`."""

    def settings(cfg: Any) -> dict[str, Any]:
        block = cfg.stack.pattern[0]
        return {
            "model_type": kind,
            "architectures": [f"{name}ForPreTraining" if cfg.next_sentence else f"{name}ForMaskedLM"],
            **written(cfg, MODEL),
            "num_hidden_layers": cfg.stack.layers(),
            "num_attention_heads": block.mixer.heads,
            "intermediate_size": block.mlp.ffn,
            "hidden_act": theirs(block.mlp.activation),
            "layer_norm_eps": block.norm.epsilon,
        }

    return settings


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


def rows(cfg: Any) -> Sequence[Row]:
    """The table."""
    tokens, norms = (slice(0, cfg.vocabulary_size),), PRE if cfg.embedding_norm is None else POST
    return [
        Row(WORDS, "tokens", inside=tokens),
        Row("bert.embeddings.position_embeddings.weight", "positions"),
        Row("bert.embeddings.token_type_embeddings.weight", "types"),
        *attention(f"{LAYER}.attention", f"{BLOCK}.mixer", ("self.query", "self.key", "self.value", "output.dense")),
        *linear(f"{LAYER}.intermediate.dense", f"{BLOCK}.mlp.up"),
        *linear(f"{LAYER}.output.dense", f"{BLOCK}.mlp.down"),
        *[row for each in (*norms, (f"{HEAD}.transform.LayerNorm", "masked_norm")) for row in norm(*each)],
        *dense("bert.pooler.dense", "pooler"),
        *dense(f"{HEAD}.transform.dense", "masked"),
        Row(f"{HEAD}.decoder.weight", "head", inside=tokens),
        # An untied head has its own bias, and the other one is not read.
        Row(f"{HEAD}.bias" if cfg.tied else f"{HEAD}.decoder.bias", "masked_bias", inside=tokens),
        *linear("cls.seq_relationship", "order"),
    ]


FAMILIES = [
    Family(
        name=kind,
        model_types=(kind,),
        model=model,
        settings=settings_of(kind, name),
        rows=rows,
        unused=UNUSED,
        ignored=("bert.embeddings.position_ids", "bert.pooler.*", "cls.seq_relationship.*", f"{HEAD}.bias"),
        renamed=((r"^(embeddings|encoder|pooler)\.", r"bert.\1."), (r"\.gamma$", ".weight"), (r"\.beta$", ".bias")),
        heads={f"{HEAD}.decoder.weight": WORDS, f"{HEAD}.decoder.bias": f"{HEAD}.bias"},
    )
    for kind, name in (("bert", "Bert"), ("megatron-bert", "MegatronBert"))
]
