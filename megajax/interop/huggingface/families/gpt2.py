"""GPT-2: learned positions, LayerNorm, biases. Its matrices are (in, out), with query, key and value side by side."""

from dataclasses import replace
from typing import Any

from megajax.interop.huggingface.family import Family, Settings, activation_name, final_norm, layers_of, norm, tokens
from megajax.interop.weights.name_mapping import Row
from megajax.layers.attention.config import AttentionConfig
from megajax.layers.block.config import BlockConfig
from megajax.layers.mlp.config import DenseMLPConfig
from megajax.layers.norm.config import LayerNormConfig
from megajax.layers.stack.config import StackConfig
from megajax.models.decoder.config import DecoderConfig

UNUSED = frozenset({
    "n_ctx", "reorder_and_upcast_attn", "summary_activation", "summary_first_dropout",
    "summary_proj_to_labels", "summary_type", "summary_use_proj",
})  # fmt: skip
"""About dtypes and other heads."""


def _read(settings: Settings) -> DecoderConfig:
    hidden, heads, layers = settings.take("n_embd", 768), settings.count("n_head", 12), settings.layers("n_layer", 12)
    ln = LayerNormConfig(epsilon=settings.take("layer_norm_epsilon", 1e-5))
    activation = settings.activation("activation_function", "gelu_new")
    mixer = AttentionConfig(heads=heads, bias=True, scale=None if settings.take("scale_attn_weights", True) else 1.0)
    mlp = DenseMLPConfig(ffn=settings.take("n_inner", 4 * hidden), activation=activation)
    block = BlockConfig(mixer=mixer, mlp=mlp, norm=ln)
    blocks = [block] * layers
    if settings.take("scale_attn_by_inverse_layer_idx", False):
        scale = (hidden // heads) ** -0.5 if mixer.scale is None else 1.0
        blocks = [replace(block, mixer=replace(mixer, scale=scale / (number + 1))) for number in range(layers)]
    return DecoderConfig(
        hidden=hidden,
        vocabulary_size=settings.take("vocab_size", 50257),
        sequence_length=settings.take("n_positions", 1024),
        stack=StackConfig.of(blocks),
        learned_positions=True,
        norm=ln,
        tied=settings.take("tie_word_embeddings", True),
    )


def _write(cfg: DecoderConfig) -> dict[str, Any]:
    blocks = layers_of(cfg)
    mixer, mlp, scales = blocks[0].mixer, blocks[0].mlp, [block.mixer.scale for block in blocks]
    return {
        "n_embd": cfg.hidden,
        "n_head": mixer.heads,
        "n_layer": len(blocks),
        "n_inner": mlp.ffn,
        "n_positions": cfg.sequence_length,
        "vocab_size": cfg.vocabulary_size,
        "activation_function": "gelu_new" if mlp.activation == "gelu_tanh" else activation_name(mlp.activation),
        "layer_norm_epsilon": final_norm(cfg).epsilon,
        "scale_attn_weights": scales[0] != 1.0,
        "scale_attn_by_inverse_layer_idx": len(set(scales)) > 1,
        "tie_word_embeddings": cfg.tied,
    }


LAYER, BLOCK = "transformer.h.{layer}", "stack.*"
QKV = tuple(f"{BLOCK}.mixer.{name}" for name in ("query", "key", "value"))


def _rows(cfg: DecoderConfig) -> list[Row]:
    return [
        *tokens(cfg, "transformer.wte.weight", "lm_head.weight"),
        Row("transformer.wpe.weight", "positions"),
        Row(f"{LAYER}.attn.c_attn.weight", QKV, "d (n h) -> d n h", axis=1),
        Row(f"{LAYER}.attn.c_attn.bias", tuple(f"{path}_bias" for path in QKV), "(n h) -> n h"),
        Row(f"{LAYER}.attn.c_proj.weight", f"{BLOCK}.mixer.output", "(n h) d -> n h d"),
        Row(f"{LAYER}.attn.c_proj.bias", f"{BLOCK}.mixer.output_bias"),
        Row(f"{LAYER}.mlp.c_fc.weight", f"{BLOCK}.mlp.up"),
        Row(f"{LAYER}.mlp.c_fc.bias", f"{BLOCK}.mlp.up_bias"),
        Row(f"{LAYER}.mlp.c_proj.weight", f"{BLOCK}.mlp.down"),
        Row(f"{LAYER}.mlp.c_proj.bias", f"{BLOCK}.mlp.down_bias"),
        *norm(f"{LAYER}.ln_1", f"{BLOCK}.mixer_norm"),
        *norm(f"{LAYER}.ln_2", f"{BLOCK}.mlp_norm"),
        *norm("transformer.ln_f", "norm"),
    ]


FAMILIES = [
    Family(
        name="gpt2",
        architecture="GPT2LMHeadModel",
        task="CAUSAL_LM",
        read=_read,
        write=_write,
        rows=_rows,
        unused=UNUSED,
        ignored=("transformer.h.*.attn.bias", "transformer.h.*.attn.masked_bias"),
        # GPT2Model's own names, as of the first checkpoints, have no prefix.
        renamed=((r"^(wte|wpe|h|ln_f)\.", r"transformer.\1."),),
        heads={"lm_head.weight": "transformer.wte.weight"},
    )
]
