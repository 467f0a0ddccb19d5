"""Gemma: zero-centred norms, GeGLU, embeddings times sqrt(hidden size), and a tied head.

Gemma 1 has the names of Llama. Gemma 2 has norms around sub-layers, soft caps of scores and logits, and sliding windows
in every other layer. Gemma 3 has no caps, but norms of queries and keys, and windows in five of six layers, whose
rotary positions have a base of their own.
"""

from collections.abc import Mapping
from typing import Any

from megajax.checkpoint.weights.name_mapping import Row
from megajax.interop.huggingface import decoders
from megajax.interop.huggingface.decoders import LAYER, MIXER, gated, outer_rows
from megajax.interop.huggingface.families import llama
from megajax.interop.huggingface.family import Settings, activation_name, layers_of, norm
from megajax.interop.huggingface.rotary import ROPE, layered_rope, layered_rope_settings, rope, ropes_of
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
GEMMA2: Mapping[str, Any] = GEMMA | {
    "hidden_size": 2304,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "intermediate_size": 9216,
    "hidden_activation": "gelu_pytorch_tanh",
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "attn_logit_softcapping": 50.0,
    "final_logit_softcapping": 30.0,
}
GEMMA3: Mapping[str, Any] = GEMMA2 | {
    "vocab_size": 262208,
    "max_position_embeddings": 131072,
    "sliding_window_pattern": 6,
    "attn_logit_softcapping": None,
    "final_logit_softcapping": None,
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


def _sandwiched(
    settings: Settings, full: RopeConfig, local: RopeConfig, every: int, qk_norm: RMSNormConfig | None = None
) -> DecoderConfig:
    """Gemma 2 and 3. full, local: rotary positions; every: the layer of so many without a window, the last of them."""
    mixer = AttentionConfig(
        heads=settings.count("num_attention_heads"),
        kv_heads=settings.count("num_key_value_heads"),
        head_dim=settings.count("head_dim"),
        bias=settings.take("attention_bias", False),
        qk_norm=qk_norm,
        scale=settings.count("query_pre_attn_scalar") ** -0.5,
        score_cap=settings.take("attn_logit_softcapping", kind=float),
    )
    mlp = decoders.gated_mlp(settings, activation="hidden_activation")
    return decoders.decoder(
        settings,
        mixer,
        lambda _: mlp,
        slides=lambda layer: (layer + 1) % every != 0,
        rope_of=lambda _, slides: local if slides else full,
        zero_centred=True,
        norm_placement="sandwich",
        logit_cap=settings.take("final_logit_softcapping", kind=float),
        width_scaling=_scaling(settings),
    )


def _read_gemma2(settings: Settings) -> DecoderConfig:
    settings.assume(GEMMA2)
    positions = rope(settings, settings.peek("max_position_embeddings"))
    return _sandwiched(settings, positions, positions, 2)


def _read_gemma3(settings: Settings) -> DecoderConfig:
    """transformers does not cap scores, whatever attn_logit_softcapping says."""
    settings.assume(GEMMA3)
    settings.only("attn_logit_softcapping", None)
    full, local = layered_rope(settings, settings.peek("max_position_embeddings"), base=1e6, local_base=1e4)
    norm = RMSNormConfig(epsilon=settings.peek("rms_norm_eps"), zero_centred=True)
    return _sandwiched(settings, full, local, settings.count("sliding_window_pattern"), norm)


def _write_gemma2(cfg: Any) -> dict[str, Any]:
    first = layers_of(cfg)[0]
    settings = decoders.write(cfg, "sliding_window", "layer_types")
    return {
        **{name: value for name, value in settings.items() if name != "hidden_act"},
        "hidden_activation": activation_name(first.mlp.activation),
        "query_pre_attn_scalar": round((first.mixer.scale or first.mixer.size(cfg.hidden) ** -0.5) ** -2),
        "attn_logit_softcapping": first.mixer.score_cap,
        "final_logit_softcapping": cfg.logit_cap,
    }


def _write_gemma3(cfg: Any) -> dict[str, Any]:
    full, local = ropes_of(cfg, full=RopeConfig(base=1e6), local=RopeConfig(base=1e4))
    settings = {name: value for name, value in _write_gemma2(cfg).items() if name not in ROPE}
    return {
        **settings,
        **layered_rope_settings(full, local, RopeConfig(base=local.base)),
        "rope_local_base_freq": local.base,
    }


def _rows_sandwiched(cfg: DecoderConfig) -> list[Row]:
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
        "gemma2",
        "Gemma2ForCausalLM",
        read=_read_gemma2,
        write=_write_gemma2,
        rows=_rows_sandwiched,
        unused=frozenset({"hidden_act"}),
    ),
    decoders.family(
        "gemma3_text",
        "Gemma3ForCausalLM",
        read=_read_gemma3,
        write=_write_gemma3,
        rows=_rows_sandwiched,
        unused=frozenset({"hidden_act"}),
    ),
]
