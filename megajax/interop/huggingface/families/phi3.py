"""Phi-3: Llama's blocks with queries, keys and values in one tensor, and gate and up in another."""

from typing import Any

from megajax.checkpoint.weights.tensor_table import Row
from megajax.interop.huggingface import decoders
from megajax.interop.huggingface.decoders import LAYER, NORMS, outer_rows
from megajax.interop.huggingface.family import Settings
from megajax.models.configs import DecoderConfig

DEFAULTS = {
    "hidden_size": 3072,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "rms_norm_eps": 1e-5,
    "vocab_size": 32064,
    "intermediate_size": 8192,
    "max_position_embeddings": 4096,
}


def _read(settings: Settings) -> DecoderConfig:
    settings.assume(DEFAULTS)
    mlp = decoders.gated_mlp(settings)
    return decoders.decoder(settings, decoders.attention(settings, partial=True), lambda _: mlp, slides=lambda _: True)


def _write(cfg: Any) -> dict[str, Any]:
    return decoders.write(cfg, "sliding_window")


def _rows(cfg: DecoderConfig) -> list[Row]:
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
        "phi3",
        "Phi3ForCausalLM",
        read=_read,
        write=_write,
        rows=_rows,
        unused=frozenset({"original_max_position_embeddings"}),
    )
]
