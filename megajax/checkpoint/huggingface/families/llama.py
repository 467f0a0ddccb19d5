"""Llama 2 and 3, Mistral, Qwen 2 and Qwen 3: one table, of pre-norm blocks with rotary positions and gated layers."""

from collections.abc import Mapping
from functools import partial
from typing import Any

from megajax.checkpoint.huggingface import decoders
from megajax.checkpoint.huggingface.decoders import ATTENTION, LAYER, ends, gated, layers_of
from megajax.checkpoint.huggingface.family import Settings
from megajax.checkpoint.huggingface.rotary import rope, window_settings, windows
from megajax.checkpoint.weights.tensor_table import Row
from megajax.layers.config import BlockConfig, RMSNormConfig
from megajax.models.config import DecoderConfig

ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
COMMON: Mapping[str, Any] = {
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "rms_norm_eps": 1e-6,
    "vocab_size": 32000,
}
QWEN: Mapping[str, Any] = COMMON | {
    "vocab_size": 151936,
    "intermediate_size": 22016,
    "num_key_value_heads": 32,
    "max_position_embeddings": 32768,
    "use_sliding_window": False,
    "sliding_window": 4096,
    "max_window_layers": 28,
}
DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "llama": COMMON | {"intermediate_size": 11008, "max_position_embeddings": 2048},
    "mistral": COMMON
    | {"intermediate_size": 14336, "num_key_value_heads": 8, "max_position_embeddings": 131072, "sliding_window": 4096},
    "qwen2": QWEN,
    "qwen3": QWEN | {"head_dim": 128},
}
"""Of the classes of transformers, for settings that config.json does not have."""


def model(kind: str, given: Settings) -> DecoderConfig:
    """The model of a config.json."""
    given.assume(DEFAULTS[kind])
    layers, length = given.layers(), given.need("max_position_embeddings")
    norm = RMSNormConfig(epsilon=given.need("rms_norm_eps"))
    mixer = decoders.attention(
        given,
        bias=kind in ("llama", "qwen3") and given.take("attention_bias", False),
        qkv_bias=True if kind == "qwen2" else None,
        qk_norm=norm if kind == "qwen3" else None,
        rope=rope(given, length),
    )
    mlp = decoders.gated_mlp(given, bias=kind == "llama" and given.take("mlp_bias", False))
    block = BlockConfig(mixer=mixer, mlp=mlp, norm=norm)
    if kind == "llama":  # transformers' class has no windows, whatever config.json says of them
        return decoders.decoder(given, [block] * layers, length)
    first = given.take("max_window_layers", 0)
    sizes = windows(given, layers, length, lambda layer: layer >= first)
    return decoders.decoder(given, decoders.windowed(block, sizes), length)


def settings(kind: str, cfg: DecoderConfig) -> dict[str, Any]:
    """The config.json of a model as one of this model_type."""
    blocks = layers_of(cfg)
    mixer, mlp = blocks[0].mixer, blocks[0].mlp
    written = window_settings([block.mixer for block in blocks])
    return {
        **decoders.settings_of(cfg, kind, ARCHITECTURES[kind]),
        **decoders.attention_settings(mixer, cfg.hidden),
        **decoders.activation_setting(mlp),
        "intermediate_size": mlp.ffn,
        "mlp_bias": mlp.bias,
        **({name: written[name] for name in WINDOWS[kind]}),
    }


WINDOWS: Mapping[str, tuple[str, ...]] = {
    "llama": (),
    "mistral": ("sliding_window",),
    "qwen2": ("sliding_window", "use_sliding_window", "max_window_layers", "layer_types"),
    "qwen3": ("sliding_window", "use_sliding_window", "max_window_layers", "layer_types"),
}
"""Settings of windows that a class has."""
UNUSED: Mapping[str, frozenset[str]] = {kind: frozenset() for kind in ARCHITECTURES} | {
    "llama": frozenset({"sliding_window", "use_sliding_window", "max_window_layers", "layer_types"})
}


def rows(cfg: DecoderConfig) -> list[Row]:
    """The table."""
    return [*ends(cfg), *ATTENTION, *gated(f"{LAYER}.mlp", "stack.*.mlp")]


FAMILIES = [
    decoders.family(kind, model=partial(model, kind), settings=partial(settings, kind), rows=rows, unused=UNUSED[kind])
    for kind in ARCHITECTURES
]
