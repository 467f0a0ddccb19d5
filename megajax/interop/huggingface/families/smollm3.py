"""SmolLM3: Llama without rotary positions in every fourth layer."""

from typing import Any

from megajax.interop.huggingface import decoders
from megajax.interop.huggingface.families import llama
from megajax.interop.huggingface.family import Settings, layers_of
from megajax.interop.huggingface.rotary import rope_settings
from megajax.layers.position.config import RopeConfig
from megajax.models.decoder.config import DecoderConfig

DEFAULTS = {
    "hidden_size": 2048,
    "num_hidden_layers": 36,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-6,
    "vocab_size": 128256,
    "intermediate_size": 11008,
    "max_position_embeddings": 32768,
    "tie_word_embeddings": True,
    "use_sliding_window": False,
    "no_rope_layer_interval": 4,
}
BASE = 2e6
"""Default of rope_theta."""


def _read(settings: Settings) -> DecoderConfig:
    """no_rope_layers: 1 for each layer that has rotary positions."""
    settings.assume(DEFAULTS)
    mixer = decoders.attention(settings, base=BASE, bias=settings.take("attention_bias", False))
    mlp = decoders.gated_mlp(settings, bias=settings.take("mlp_bias", False))
    every, layers = settings.count("no_rope_layer_interval"), settings.peek("num_hidden_layers")
    rotated = settings.take("no_rope_layers", [(layer + 1) % every for layer in range(layers)])
    if len(rotated) != layers:
        settings.refuse("no_rope_layers", f"({len(rotated)} layers)", f"num_hidden_layers={layers}")
        rotated = [1] * layers
    return decoders.decoder(
        settings,
        mixer,
        lambda _: mlp,
        slides=lambda layer: not rotated[layer],
        rope_of=lambda layer, _: mixer.rope if rotated[layer] else None,
    )


def _write(cfg: Any) -> dict[str, Any]:
    blocks = layers_of(cfg)
    ropes = [block.mixer.rope for block in blocks]
    return {
        **decoders.write(cfg, "sliding_window", "use_sliding_window", "layer_types"),
        **rope_settings(next((rope for rope in ropes if rope is not None), RopeConfig(base=BASE))),
        "no_rope_layers": [int(rope is not None) for rope in ropes],
        "mlp_bias": blocks[0].mlp.bias,
    }


FAMILIES = [decoders.family("smollm3", "SmolLM3ForCausalLM", read=_read, write=_write, rows=llama.rows)]
