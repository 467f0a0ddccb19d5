"""Llama 4 (text): layers with rotary positions attend within chunks, every fourth layer attends to all tokens without.

Queries and keys of the former are normalised, queries of the latter get a factor by position. The sigmoid of an
expert's logit multiplies the expert's input. Layers with experts and without may alternate.
"""

from dataclasses import replace
from typing import Any

from megajax.checkpoint.weights.name_mapping import Row
from megajax.interop.huggingface import decoders
from megajax.interop.huggingface.decoders import ATTENTION, LAYER, gated, outer_rows
from megajax.interop.huggingface.family import Settings, layers_of
from megajax.interop.huggingface.rotary import FULL, rope_settings
from megajax.layers.attention.config import AttentionConfig
from megajax.layers.mlp.config import GatedMLPConfig
from megajax.layers.moe.config import FeedForwardConfig, MoEConfig, SharedExpertConfig
from megajax.layers.norm.config import L2NormConfig
from megajax.layers.position.config import RopeConfig, TemperatureConfig
from megajax.models.decoder.config import DecoderConfig

DEFAULTS = {
    "hidden_size": 5120,
    "num_hidden_layers": 48,
    "num_attention_heads": 40,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "rms_norm_eps": 1e-5,
    "vocab_size": 202048,
    "intermediate_size": 8192,
    "intermediate_size_mlp": 16384,
    "max_position_embeddings": 131072,
    "num_local_experts": 16,
    "num_experts_per_tok": 1,
    "interleave_moe_layer_step": 1,
    "no_rope_layer_interval": 4,
    "attention_chunk_size": 8192,
    "floor_scale": 8192,
}
BASE = 500000.0
"""Default of rope_theta."""
CHUNKED = "chunked_attention"


def _read(settings: Settings) -> DecoderConfig:
    """no_rope_layers: 1 for each layer that has rotary positions."""
    settings.assume(DEFAULTS)
    layers, length = settings.peek("num_hidden_layers"), settings.peek("max_position_embeddings")
    every, step = settings.count("no_rope_layer_interval"), settings.count("interleave_moe_layer_step")
    rotated = settings.take("no_rope_layers", kind=list) or [int((layer + 1) % every != 0) for layer in range(layers)]
    if len(rotated) != layers:
        settings.refuse("no_rope_layers", f"({len(rotated)} layers)", f"num_hidden_layers={layers}")
        rotated = [1] * layers
    chunk = settings.take("attention_chunk_size", kind=int)
    kinds = decoders.layer_types(settings, layers, CHUNKED, lambda layer: bool(chunk and rotated[layer]))
    epsilon = settings.peek("rms_norm_eps")
    norm = L2NormConfig(epsilon=epsilon) if settings.take("use_qk_norm", True) else None
    scale, floor = settings.take("attn_scale", 0.1), settings.count("floor_scale")
    tuned = settings.take("attn_temperature_tuning", True, object)  # a number in the first releases
    temperature = TemperatureConfig(scale=scale, length=floor) if tuned else None
    mixer = decoders.attention(settings, base=BASE, bias=settings.take("attention_bias", False))
    rope = None if mixer.rope is None else replace(mixer.rope, interleaved=True)
    if norm is not None and rope is not None and rope.scaling is not None and rope.scaling.magnitude() != 1:
        settings.refuse("use_qk_norm", True, "only positions that keep the length of queries and keys are supported")

    def mixer_of(layer: int) -> AttentionConfig:
        size = chunk if kinds[layer] == CHUNKED and chunk is not None and chunk < length else None
        if rotated[layer]:
            return replace(mixer, chunk=size, rope=rope, qk_norm=norm)
        return replace(mixer, chunk=size, rope=None, temperature=temperature)

    mlp, with_experts = decoders.gated_mlp(settings), settings.take("moe_layers", [*range(step - 1, layers, step)])
    mixers = [mixer_of(layer) for layer in range(layers)]
    return decoders.decoder(settings, mixers, _feed_forward(settings, mlp, with_experts))


def _feed_forward(settings: Settings, mlp: GatedMLPConfig, with_experts: list[int]) -> Any:
    """Number of a layer -> its feed-forward. mlp: of an expert."""
    moe = MoEConfig(
        experts=settings.count("num_local_experts"),
        top_k=settings.count("num_experts_per_tok"),
        expert=mlp,
        router=decoders.router(settings, score="sigmoid", normalise="all"),
        shared=SharedExpertConfig(mlp=mlp),
        weigh="inputs",
    )
    dense = replace(mlp, ffn=settings.count("intermediate_size_mlp"))

    def feed_forward(layer: int) -> FeedForwardConfig:
        return moe if layer in with_experts else dense

    return feed_forward


def _write(cfg: Any) -> dict[str, Any]:
    mixers, (moe, dense, ffn) = [block.mixer for block in layers_of(cfg)], decoders.feed_forwards(cfg)
    ropes, chunks = [mixer.rope for mixer in mixers], [mixer.chunk for mixer in mixers]
    temperatures = [mixer.temperature for mixer in mixers if mixer.temperature is not None]
    temperature = next(iter(temperatures), TemperatureConfig())
    return {
        **decoders.write(cfg, moe=moe),
        **rope_settings(next((rope for rope in ropes if rope is not None), RopeConfig(base=BASE))),
        "num_local_experts": moe.experts,
        "intermediate_size_mlp": ffn,
        "moe_layers": [layer for layer in range(len(mixers)) if layer not in dense],
        "no_rope_layers": [int(rope is not None) for rope in ropes],
        "attention_chunk_size": next((chunk for chunk in chunks if chunk is not None), None),
        "layer_types": [FULL if chunk is None else CHUNKED for chunk in chunks],
        "use_qk_norm": any(mixer.qk_norm is not None for mixer in mixers),
        "attn_temperature_tuning": bool(temperatures),
        "attn_scale": temperature.scale,
        "floor_scale": temperature.length,
    }


def _rows(cfg: DecoderConfig) -> list[Row]:
    tensor, path = f"{LAYER}.feed_forward", "stack.*.mlp"
    return [
        *outer_rows(cfg),
        *ATTENTION,
        *gated(tensor, path),
        *gated(f"{tensor}.shared_expert", f"{path}.shared"),
        Row(f"{tensor}.router.weight", f"{path}.router", "e d -> d e"),
        Row(f"{tensor}.experts.gate_up_proj", (f"{path}.experts.gate", f"{path}.experts.up"), axis=2),
        Row(f"{tensor}.experts.down_proj", f"{path}.experts.down"),
    ]


FAMILIES = [
    decoders.family(
        "llama4_text",
        "Llama4ForCausalLM",
        read=_read,
        write=_write,
        rows=_rows,
        unused=frozenset({"router_jitter_noise", "for_llm_compressor"}),
    )
]
