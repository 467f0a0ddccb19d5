"""Cohere 2 (Command R7B, Command A): parallel sub-layers with one LayerNorm; only sliding layers have RoPE.

Cohere (Command R) has no windows, and RoPE in all layers.
"""

from dataclasses import replace
from typing import Any

from megajax.checkpoint.weights.name_mapping import Row
from megajax.interop.huggingface import decoders
from megajax.interop.huggingface.decoders import LAYER, MIXER, gated, outer_rows
from megajax.interop.huggingface.family import Settings, norm
from megajax.interop.huggingface.rotary import rope_settings, ropes_of
from megajax.layers.attention.config import AttentionConfig
from megajax.layers.norm.config import LayerNormConfig
from megajax.layers.position.config import RopeConfig
from megajax.models.decoder.config import DecoderConfig, WidthScalingConfig

DEFAULTS = {
    "hidden_size": 8192,
    "num_hidden_layers": 40,
    "num_attention_heads": 64,
    "layer_norm_eps": 1e-5,
    "vocab_size": 256000,
    "intermediate_size": 22528,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
    "logit_scale": 0.0625,
}
WINDOWS = {"sliding_window": 4096, "sliding_window_pattern": 4}
BASE = 500000.0
"""Default of rope_theta in Cohere 1."""
UNUSED = frozenset({
    # Notes on the architecture that transformers does not read.
    "layer_switch", "order_of_interleaved_layers", "position_embedding_type", "rotary_pct", "use_embedding_sharing",
    "use_gated_activation", "use_parallel_block",
})  # fmt: skip


def _read_first(settings: Settings) -> DecoderConfig:
    settings.assume(DEFAULTS)
    settings.only("use_qk_norm", False)
    mixer = decoders.attention(settings, base=BASE, bias=settings.take("attention_bias", False))
    rope = replace(mixer.rope or RopeConfig(), interleaved=True)
    return _decoder(settings, replace(mixer, rope=rope))


def _read(settings: Settings) -> DecoderConfig:
    settings.assume(DEFAULTS | WINDOWS)
    windowed, every = bool(settings.remaining["sliding_window"]), settings.count("sliding_window_pattern")
    mixer = decoders.attention(settings, bias=settings.take("attention_bias", False))
    rope = replace(mixer.rope or RopeConfig(), interleaved=True)
    return _decoder(
        settings,
        mixer,
        slides=lambda layer: (layer + 1) % every != 0,
        rope_of=lambda _, slides: rope if slides and windowed else None,
    )


def _decoder(settings: Settings, mixer: AttentionConfig, **windows: Any) -> DecoderConfig:
    mlp = decoders.gated_mlp(settings)
    return decoders.decoder(
        settings,
        mixer,
        lambda _: mlp,
        norm_placement="parallel",
        norm=LayerNormConfig(epsilon=settings.need("layer_norm_eps"), bias=False),
        width_scaling=WidthScalingConfig(
            base_hidden=settings.peek("hidden_size"), score_power=0.5, output=settings.need("logit_scale", float)
        ),
        **windows,
    )


def _write_first(cfg: Any, *windows: str) -> dict[str, Any]:
    settings = decoders.write(cfg, *windows)
    epsilon = settings.pop("rms_norm_eps")
    return {**settings, "layer_norm_eps": epsilon, "logit_scale": cfg.logit_factor()}


def _write(cfg: Any) -> dict[str, Any]:
    _, local = ropes_of(cfg, full=None, local=None)
    return {**_write_first(cfg, "sliding_window", "layer_types"), **rope_settings(local or RopeConfig())}


def _rows(cfg: DecoderConfig) -> list[Row]:
    block_norm = norm(f"{LAYER}.input_layernorm", "stack.*.norm")
    return [*outer_rows(cfg), *MIXER, *block_norm, *gated(f"{LAYER}.mlp", "stack.*.mlp")]


FAMILIES = [
    decoders.family("cohere2", "Cohere2ForCausalLM", read=_read, write=_write, rows=_rows, unused=UNUSED),
    decoders.family("cohere", "CohereForCausalLM", read=_read_first, write=_write_first, rows=_rows, unused=UNUSED),
]
