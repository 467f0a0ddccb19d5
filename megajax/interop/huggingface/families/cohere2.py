"""Cohere 2 (Command R7B, Command A): parallel sub-layers with one LayerNorm; only sliding layers have RoPE."""

from dataclasses import replace
from typing import Any

from megajax.checkpoint.weights.name_mapping import Row
from megajax.interop.huggingface import decoders
from megajax.interop.huggingface.decoders import LAYER, MIXER, gated, outer_rows
from megajax.interop.huggingface.family import Settings, norm
from megajax.interop.huggingface.rotary import rope_settings, ropes_of
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
    "sliding_window": 4096,
    "sliding_window_pattern": 4,
    "logit_scale": 0.0625,
}
UNUSED = frozenset({
    # Notes on the architecture that transformers does not read.
    "layer_switch", "order_of_interleaved_layers", "position_embedding_type", "rotary_pct", "use_embedding_sharing",
    "use_gated_activation", "use_parallel_block",
})  # fmt: skip


def _read(settings: Settings) -> DecoderConfig:
    settings.assume(DEFAULTS)
    windowed, every = bool(settings.remaining["sliding_window"]), settings.count("sliding_window_pattern")
    mixer = decoders.attention(settings, bias=settings.take("attention_bias", False))
    mlp, rope = decoders.gated_mlp(settings), replace(mixer.rope or RopeConfig(), interleaved=True)
    return decoders.decoder(
        settings,
        mixer,
        lambda _: mlp,
        slides=lambda layer: (layer + 1) % every != 0,
        rope_of=lambda _, slides: rope if slides and windowed else None,
        norm_placement="parallel",
        norm=LayerNormConfig(epsilon=settings.need("layer_norm_eps"), bias=False),
        width_scaling=WidthScalingConfig(
            base_hidden=settings.peek("hidden_size"), score_power=0.5, output=settings.need("logit_scale", float)
        ),
    )


def _write(cfg: Any) -> dict[str, Any]:
    _, local = ropes_of(cfg, full=None, local=None)
    settings = decoders.write(cfg, "sliding_window", "layer_types")
    epsilon = settings.pop("rms_norm_eps")
    return {
        **settings,
        **rope_settings(local or RopeConfig()),
        "layer_norm_eps": epsilon,
        "logit_scale": cfg.logit_factor(),
    }


def _rows(cfg: DecoderConfig) -> list[Row]:
    block_norm = norm(f"{LAYER}.input_layernorm", "stack.*.norm")
    return [*outer_rows(cfg), *MIXER, *block_norm, *gated(f"{LAYER}.mlp", "stack.*.mlp")]


FAMILIES = [decoders.family("cohere2", "Cohere2ForCausalLM", read=_read, write=_write, rows=_rows, unused=UNUSED)]
