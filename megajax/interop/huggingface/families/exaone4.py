"""EXAONE 4: OLMo 2's blocks with norms of each query and key head; full layers have no rotary positions."""

from typing import Any

from megajax.interop.huggingface import decoders
from megajax.interop.huggingface.families import olmo2
from megajax.interop.huggingface.family import Settings
from megajax.interop.huggingface.rotary import rope_settings, ropes_of
from megajax.layers.norm.config import RMSNormConfig
from megajax.layers.position.config import RopeConfig
from megajax.models.decoder.config import DecoderConfig

DEFAULTS = {
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "rms_norm_eps": 1e-5,
    "vocab_size": 102400,
    "intermediate_size": 16384,
    "max_position_embeddings": 2048,
    "sliding_window": 4096,
}


def _read(settings: Settings) -> DecoderConfig:
    """A model without a window has rotary positions in all layers."""
    settings.assume(DEFAULTS)
    windowed, pattern = bool(settings.remaining["sliding_window"]), settings.take("sliding_window_pattern", 4, object)
    mixer = decoders.attention(settings, qk_norm=RMSNormConfig(epsilon=settings.peek("rms_norm_eps")))
    mlp = decoders.gated_mlp(settings)

    def slides(layer: int) -> bool:
        """By a number of layers, or by letters, L for a window."""
        if isinstance(pattern, str):
            return windowed and pattern[layer % len(pattern)] == "L"
        return windowed and (layer + 1) % pattern != 0

    return decoders.decoder(
        settings,
        mixer,
        lambda _: mlp,
        slides=slides,
        rope_of=lambda _, slides: mixer.rope if slides or not windowed else None,
        norm_placement="output",
    )


def _write(cfg: Any) -> dict[str, Any]:
    full, local = ropes_of(cfg, full=None, local=None)
    settings = decoders.write(cfg, "sliding_window", "layer_types")
    return {**settings, **rope_settings(local or full or RopeConfig())}


FAMILIES = [decoders.family("exaone4", "Exaone4ForCausalLM", read=_read, write=_write, rows=olmo2.rows)]
