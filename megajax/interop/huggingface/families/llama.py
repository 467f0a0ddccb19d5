"""Llama 2 and 3 and their relatives: pre-norm blocks with rotary positions and gated layers.

Mistral, Qwen 2, Qwen 3 and Gemma 1 have the same table. Mixtral is Mistral with experts. Phi-3 has queries, keys and
values in one tensor, and gate and up in another.
"""

from collections.abc import Mapping
from functools import partial
from typing import Any, NamedTuple

from megajax.checkpoint.weights.name_mapping import Row
from megajax.interop.huggingface import decoders
from megajax.interop.huggingface.decoders import ATTENTION, LAYER, NORMS, experts, gated, outer_rows
from megajax.interop.huggingface.family import Settings, layers_of
from megajax.layers.moe.config import MoEConfig
from megajax.layers.norm.config import RMSNormConfig
from megajax.layers.position.config import LongRopeScalingConfig
from megajax.models.decoder.config import DecoderConfig

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
MISTRAL: Mapping[str, Any] = COMMON | {
    "intermediate_size": 14336,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
}
MIXTRAL: Mapping[str, Any] = MISTRAL | {"rms_norm_eps": 1e-5, "num_local_experts": 8, "num_experts_per_tok": 2}
PHI3: Mapping[str, Any] = COMMON | {
    "hidden_size": 3072,
    "rms_norm_eps": 1e-5,
    "vocab_size": 32064,
    "intermediate_size": 8192,
    "max_position_embeddings": 4096,
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
    "mistral": Kind("MistralForCausalLM", MISTRAL | {"sliding_window": 4096}, ("sliding_window",)),
    "ministral": Kind("MinistralForCausalLM", MISTRAL | {"sliding_window": 4096}, ("sliding_window", "layer_types")),
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
    """The table, which LLaVA and Gemma 1 have too."""
    return [*outer_rows(cfg), *ATTENTION, *gated(f"{LAYER}.mlp", "stack.*.mlp")]


def _read_mixtral(settings: Settings) -> DecoderConfig:
    settings.assume(MIXTRAL)
    moe = MoEConfig(
        experts=settings.need("num_local_experts"),
        top_k=settings.need("num_experts_per_tok"),
        expert=decoders.gated_mlp(settings),
        router=decoders.router(settings),
    )
    return decoders.decoder(settings, decoders.attention(settings, base=1e6), lambda _: moe, slides=lambda _: True)


def _write_mixtral(cfg: Any) -> dict[str, Any]:
    moe = decoders.feed_forwards(cfg).moe
    return {**decoders.write(cfg, "sliding_window", moe=moe), "num_local_experts": moe.experts}


def _rows_mixtral(cfg: DecoderConfig) -> list[Row]:
    return [*outer_rows(cfg), *ATTENTION, *experts(f"{LAYER}.block_sparse_moe", ("w1", "w3", "w2"))]


def _read_phi3(settings: Settings) -> DecoderConfig:
    settings.assume(PHI3)
    original = settings.take("original_max_position_embeddings", kind=int)
    for name in ("rope_scaling", "rope_parameters"):
        positions = settings.remaining.get(name)
        if original is not None and isinstance(positions, dict) and "long_factor" in positions:
            settings.remaining[name] = {"original_max_position_embeddings": original, **positions}
    mlp = decoders.gated_mlp(settings)
    return decoders.decoder(settings, decoders.attention(settings, partial=True), lambda _: mlp, slides=lambda _: True)


def _write_phi3(cfg: Any) -> dict[str, Any]:
    settings, scaling = decoders.write(cfg, "sliding_window"), layers_of(cfg)[0].mixer.rope.scaling
    if isinstance(scaling, LongRopeScalingConfig):
        settings["original_max_position_embeddings"] = scaling.original
    return settings


def _rows_phi3(cfg: DecoderConfig) -> list[Row]:
    inner = tuple(f"stack.*.mixer.{name}" for name in ("query", "key", "value"))
    return [
        *outer_rows(cfg),
        Row(f"{LAYER}.self_attn.qkv_proj.weight", inner, "(n h) d -> d n h"),
        Row(f"{LAYER}.self_attn.o_proj.weight", "stack.*.mixer.output", "d (n h) -> n h d"),
        *NORMS,
        Row(f"{LAYER}.mlp.gate_up_proj.weight", ("stack.*.mlp.gate", "stack.*.mlp.up"), "o i -> i o"),
        Row(f"{LAYER}.mlp.down_proj.weight", "stack.*.mlp.down", "o i -> i o"),
    ]


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
] + [
    decoders.family(name, architecture, read=read, write=write, rows=rows, unused=frozenset({unused} - {""}))
    for name, architecture, read, write, rows, unused in (
        ("mixtral", "MixtralForCausalLM", _read_mixtral, _write_mixtral, _rows_mixtral, "router_jitter_noise"),
        ("phi3", "Phi3ForCausalLM", _read_phi3, _write_phi3, _rows_phi3, ""),
    )
]
