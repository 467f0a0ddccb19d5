"""gpt-oss: sinks, biases everywhere, windows in every other layer, all experts of a layer in one tensor."""

from typing import Any

from megajax.checkpoint.weights.name_mapping import Row
from megajax.interop.huggingface import decoders
from megajax.interop.huggingface.decoders import ATTENTION, LAYER, outer_rows
from megajax.interop.huggingface.family import Settings, layers_of
from megajax.layers.mlp.config import GatedMLPConfig
from megajax.layers.moe.config import MoEConfig
from megajax.models.decoder.config import DecoderConfig

DEFAULTS = {
    "hidden_size": 2880,
    "num_hidden_layers": 36,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "attention_bias": True,
    "rms_norm_eps": 1e-5,
    "vocab_size": 201088,
    "intermediate_size": 2880,
    "max_position_embeddings": 131072,
    "sliding_window": 128,
    "num_local_experts": 128,
    "num_experts_per_tok": 4,
    "swiglu_limit": 7.0,
}
YARN = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}
"""Default of rope_parameters."""


def _read(settings: Settings) -> DecoderConfig:
    settings.assume(DEFAULTS)
    if not settings.remaining.get("rope_parameters") and not settings.remaining.get("rope_scaling"):
        settings.remaining["rope_parameters"] = YARN
    settings.only("swiglu_alpha", 1.702)
    ffn, limit = settings.need("intermediate_size"), settings.need("swiglu_limit")
    moe = MoEConfig(
        experts=settings.need("num_local_experts"),
        top_k=settings.need("num_experts_per_tok"),
        expert=GatedMLPConfig(ffn=ffn, activation="quick_gelu", bias=True, clamp=limit, offset=1.0),
        router=decoders.router(settings, bias=True),
    )
    mixer = decoders.attention(settings, bias=settings.take("attention_bias", False), sink="learned", base=150000.0)
    return decoders.decoder(settings, mixer, lambda _: moe, slides=lambda layer: layer % 2 == 0)


def _write(cfg: Any) -> dict[str, Any]:
    moe = decoders.feed_forwards(cfg).moe
    settings = decoders.write(cfg, "sliding_window", "layer_types", moe=moe)
    if layers_of(cfg)[0].mixer.rope.scaling is None:  # the default in transformers is YaRN
        settings["rope_parameters"] = {"rope_type": "default"}
    return {**settings, "hidden_act": "silu", "num_local_experts": moe.experts, "swiglu_limit": moe.expert.clamp}


def _rows(cfg: DecoderConfig) -> list[Row]:
    """In the fused tensor, columns of gate and up alternate."""
    tensor, path = f"{LAYER}.mlp", "stack.*.mlp"
    gate_up, two = (f"{path}.experts.gate", f"{path}.experts.up"), {"two": 2}
    biases = tuple(f"{matrix}_bias" for matrix in gate_up)
    up = f"{tensor}.experts.gate_up_proj"
    return [
        *outer_rows(cfg),
        *ATTENTION,
        Row(f"{LAYER}.self_attn.sinks", "stack.*.mixer.core.sink"),
        Row(f"{tensor}.router.weight", f"{path}.router", "e d -> d e"),
        Row(f"{tensor}.router.bias", f"{path}.router_bias"),
        Row(up, gate_up, "e d f 1 -> e d f", split="e d (f two) -> e d f two", axis=3, sizes=two),
        Row(f"{up}_bias", biases, "e f 1 -> e f", split="e (f two) -> e f two", axis=2, sizes=two),
        Row(f"{tensor}.experts.down_proj", f"{path}.experts.down"),
        Row(f"{tensor}.experts.down_proj_bias", f"{path}.experts.down_bias"),
    ]


FAMILIES = [
    decoders.family(
        "gpt_oss",
        "GptOssForCausalLM",
        read=_read,
        write=_write,
        rows=_rows,
        # hidden_act has no effect in transformers; the others are duplicates.
        unused=frozenset({"hidden_act", "experts_per_token", "initial_context_length"}),
    )
]
