"""Phi-3: Llama's blocks with queries, keys and values in one tensor, and gate and up in another."""

from typing import Any

from megajax.checkpoint.huggingface import decoders
from megajax.checkpoint.huggingface.decoders import LAYER, NORMS, ends
from megajax.checkpoint.huggingface.family import Settings
from megajax.checkpoint.huggingface.rotary import rope, window_settings, windows
from megajax.checkpoint.weights.tensor_table import Row
from megajax.layers.config import BlockConfig, RMSNormConfig
from megajax.models.config import DecoderConfig

DEFAULTS = {
    "hidden_size": 3072,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "rms_norm_eps": 1e-5,
    "vocab_size": 32064,
    "intermediate_size": 8192,
    "max_position_embeddings": 4096,
}


def model(given: Settings) -> DecoderConfig:
    """The model of a config.json."""
    given.assume(DEFAULTS)
    layers, length = given.layers(), given.need("max_position_embeddings")
    mixer = decoders.attention(given, rope=rope(given, length, partial=True))
    norm = RMSNormConfig(epsilon=given.need("rms_norm_eps"))
    block = BlockConfig(mixer=mixer, mlp=decoders.gated_mlp(given), norm=norm)
    return decoders.decoder(given, decoders.windowed(block, windows(given, layers, length, lambda _: True)), length)


def settings(cfg: DecoderConfig) -> dict[str, Any]:
    """The config.json of a model."""
    blocks = decoders.layers_of(cfg)
    return {
        **decoders.settings_of(cfg, "phi3", "Phi3ForCausalLM"),
        **decoders.attention_settings(blocks[0].mixer, cfg.hidden),
        **decoders.activation_setting(blocks[0].mlp),
        "intermediate_size": blocks[0].mlp.ffn,
        "sliding_window": window_settings([block.mixer for block in blocks])["sliding_window"],
    }


def rows(cfg: DecoderConfig) -> list[Row]:
    """The table."""
    inner = tuple(f"stack.*.mixer.{name}" for name in ("query", "key", "value"))
    return [
        *ends(cfg),
        Row(f"{LAYER}.self_attn.qkv_proj.weight", inner, "(n h) d -> d n h"),
        Row(f"{LAYER}.self_attn.o_proj.weight", "stack.*.mixer.output", "d (n h) -> n h d"),
        *NORMS,
        Row(f"{LAYER}.mlp.gate_up_proj.weight", ("stack.*.mlp.gate", "stack.*.mlp.up"), "o i -> i o"),
        Row(f"{LAYER}.mlp.down_proj.weight", "stack.*.mlp.down", "o i -> i o"),
    ]


FAMILIES = [
    decoders.family(
        "phi3",
        model=model,
        settings=settings,
        rows=rows,
        unused=frozenset({"original_max_position_embeddings"}),
    )
]
