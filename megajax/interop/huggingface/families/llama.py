"""Llama 2 and 3, Mistral, Qwen 2 and Qwen 3: one table, of pre-norm blocks with rotary positions and gated layers."""

from collections.abc import Mapping
from functools import partial
from typing import Any, NamedTuple

from megajax.checkpoint.weights.tensor_table import Row
from megajax.interop.huggingface import decoders
from megajax.interop.huggingface.decoders import ATTENTION, LAYER, gated, outer_rows
from megajax.interop.huggingface.family import Settings, layers_of
from megajax.layers.configs import RMSNormConfig
from megajax.models.configs import DecoderConfig

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
WINDOWS = ("sliding_window", "use_sliding_window", "max_window_layers", "layer_types")


class Kind(NamedTuple):
    """A class of transformers."""

    architecture: str
    defaults: Mapping[str, Any]
    """Values of settings that are missing from config.json."""
    windows: tuple[str, ...] = WINDOWS
    """Names of its settings for attention windows."""


KINDS = {
    "llama": Kind("LlamaForCausalLM", COMMON | {"intermediate_size": 11008, "max_position_embeddings": 2048}, ()),
    "mistral": Kind(
        "MistralForCausalLM",
        COMMON
        | {"intermediate_size": 14336, "num_key_value_heads": 8, "max_position_embeddings": 131072}
        | {"sliding_window": 4096},
        ("sliding_window",),
    ),
    "qwen2": Kind("Qwen2ForCausalLM", QWEN),
    "qwen3": Kind("Qwen3ForCausalLM", QWEN | {"head_dim": 128}),
}


def _read(name: str, settings: Settings) -> DecoderConfig:
    settings.assume(KINDS[name].defaults)
    mixer = decoders.attention(
        settings,
        bias=name in ("llama", "qwen3") and settings.take("attention_bias", False),
        qkv_bias=True if name == "qwen2" else None,
        qk_norm=RMSNormConfig(epsilon=settings.peek("rms_norm_eps")) if name == "qwen3" else None,
    )
    mlp = decoders.gated_mlp(settings, bias=name == "llama" and settings.take("mlp_bias", False))
    # transformers' class of Llama has no windows, whatever config.json says of them.
    first = 0 if name == "llama" else settings.take("max_window_layers", 0)
    slides = None if name == "llama" else lambda layer: layer >= first
    return decoders.decoder(settings, mixer, lambda _: mlp, slides=slides)


def _write(name: str, cfg: Any) -> dict[str, Any]:
    mlp = layers_of(cfg)[0].mlp
    return {**decoders.write(cfg, *KINDS[name].windows), "mlp_bias": mlp.bias}


def rows(cfg: DecoderConfig) -> list[Row]:
    """The table, which Gemma and LLaVA have too."""
    return [*outer_rows(cfg), *ATTENTION, *gated(f"{LAYER}.mlp", "stack.*.mlp")]


FAMILIES = [
    decoders.family(
        name,
        kind.architecture,
        read=partial(_read, name),
        write=partial(_write, name),
        rows=rows,
        unused=frozenset(() if kind.windows else WINDOWS),
    )
    for name, kind in KINDS.items()
]
