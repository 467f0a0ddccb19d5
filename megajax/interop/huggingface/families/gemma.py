"""Gemma: zero-centred norms, GeGLU, embeddings times sqrt(hidden size), and a tied head.

Gemma 1 has the names of Llama. Gemma 3 has norms around sub-layers, norms of queries and keys, and sliding windows in
five of six layers, whose rotary positions have a base of their own.
"""

from collections.abc import Mapping
from typing import Any

from megajax.checkpoint.weights.name_mapping import Row
from megajax.interop.huggingface import decoders
from megajax.interop.huggingface.decoders import LAYER, MIXER, gated, outer_rows
from megajax.interop.huggingface.families import llama
from megajax.interop.huggingface.family import Settings, activation_name, layers_of, norm
from megajax.interop.huggingface.rotary import layered_rope, layered_rope_settings, ropes_of
from megajax.layers.attention.config import AttentionConfig
from megajax.layers.norm.config import RMSNormConfig
from megajax.layers.position.config import RopeConfig
from megajax.models.decoder.config import DecoderConfig, WidthScalingConfig

GEMMA: Mapping[str, Any] = {
    "hidden_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "head_dim": 256,
    "rms_norm_eps": 1e-6,
    "vocab_size": 256000,
    "intermediate_size": 24576,
    "max_position_embeddings": 8192,
    "hidden_act": "gelu_pytorch_tanh",
    "tie_word_embeddings": True,
}
GEMMA3: Mapping[str, Any] = GEMMA | {
    "hidden_size": 2304,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "vocab_size": 262208,
    "intermediate_size": 9216,
    "max_position_embeddings": 131072,
    "hidden_activation": "gelu_pytorch_tanh",
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "sliding_window_pattern": 6,
}


def _read(settings: Settings) -> DecoderConfig:
    settings.assume(GEMMA)
    if settings.remaining["hidden_act"] == "gelu":  # of the first files, which mean the other
        settings.remaining["hidden_act"] = "gelu_pytorch_tanh"
    mixer = decoders.attention(settings, bias=settings.take("attention_bias", False))
    mlp = decoders.gated_mlp(settings)
    return decoders.decoder(settings, mixer, lambda _: mlp, zero_centred=True, width_scaling=_scaling(settings))


def _scaling(settings: Settings) -> WidthScalingConfig:
    hidden = settings.peek("hidden_size")
    return WidthScalingConfig(base_hidden=hidden, score_power=0.5, embedding=hidden**0.5)


def _read_gemma3(settings: Settings) -> DecoderConfig:
    settings.assume(GEMMA3)
    full, local = layered_rope(settings, settings.peek("max_position_embeddings"), base=1e6, local_base=1e4)
    mixer = AttentionConfig(
        heads=settings.count("num_attention_heads"),
        kv_heads=settings.count("num_key_value_heads"),
        head_dim=settings.count("head_dim"),
        bias=settings.take("attention_bias", False),
        qk_norm=RMSNormConfig(epsilon=settings.peek("rms_norm_eps"), zero_centred=True),
        scale=settings.count("query_pre_attn_scalar") ** -0.5,
    )
    mlp, every = decoders.gated_mlp(settings, activation="hidden_activation"), settings.count("sliding_window_pattern")
    return decoders.decoder(
        settings,
        mixer,
        lambda _: mlp,
        slides=lambda layer: (layer + 1) % every != 0,
        rope_of=lambda _, slides: local if slides else full,
        zero_centred=True,
        norm_placement="sandwich",
        width_scaling=_scaling(settings),
    )


def _write_gemma3(cfg: Any) -> dict[str, Any]:
    first = layers_of(cfg)[0].mixer
    full, local = ropes_of(cfg, full=RopeConfig(base=1e6), local=RopeConfig(base=1e4))
    settings = decoders.write(cfg, "sliding_window", "layer_types")
    activation = {"hidden_activation": activation_name(layers_of(cfg)[0].mlp.activation)}
    return {
        **{name: value for name, value in settings.items() if name not in ("hidden_act", "rope_theta", "rope_scaling")},
        **activation,
        **layered_rope_settings(full, local, RopeConfig(base=local.base)),
        "rope_local_base_freq": local.base,
        "query_pre_attn_scalar": round((first.scale or first.size(cfg.hidden) ** -0.5) ** -2),
    }


def _rows_gemma3(cfg: DecoderConfig) -> list[Row]:
    return [
        *outer_rows(cfg),
        *MIXER,
        *norm(f"{LAYER}.input_layernorm", "stack.*.mixer_norm"),
        *norm(f"{LAYER}.post_attention_layernorm", "stack.*.mixer_output_norm"),
        *norm(f"{LAYER}.pre_feedforward_layernorm", "stack.*.mlp_norm"),
        *norm(f"{LAYER}.post_feedforward_layernorm", "stack.*.mlp_output_norm"),
        *gated(f"{LAYER}.mlp", "stack.*.mlp"),
    ]


FAMILIES = [
    decoders.family(
        "gemma",
        "GemmaForCausalLM",
        read=_read,
        write=decoders.write,
        rows=llama.rows,
        unused=frozenset({"hidden_activation"}),
    ),
    decoders.family(
        "gemma3_text",
        "Gemma3ForCausalLM",
        read=_read_gemma3,
        write=_write_gemma3,
        rows=_rows_gemma3,
        unused=frozenset({"hidden_act"}),
    ),
]
