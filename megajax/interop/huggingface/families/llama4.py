"""Llama 4 (text): layers with rotary positions attend within chunks, every fourth layer attends to all tokens without.

Queries and keys of the former are normalised, queries of the latter get a factor by position. The sigmoid of an
expert's logit multiplies the expert's input. Layers with experts and without may alternate.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from megajax.interop.huggingface import decoders
from megajax.interop.huggingface.decoders import LAYER, gated
from megajax.interop.huggingface.family import Settings, layers_of
from megajax.interop.huggingface.rotary import FULL
from megajax.interop.huggingface.tables import Decoder, Experts, FeedForwardOf, LayerPositions, sizes
from megajax.interop.weights.name_mapping import Row
from megajax.layers.attention.config import AttentionConfig
from megajax.layers.mlp.config import GatedMLPConfig
from megajax.layers.moe.config import MoEConfig, SharedExpertConfig
from megajax.layers.norm.config import L2NormConfig
from megajax.layers.position.config import TemperatureConfig
from megajax.models.decoder.config import DecoderConfig

DEFAULTS = sizes(202048, 5120, 8192, 48, 40, 8, 128, 131072, rms_norm_eps=1e-5, intermediate_size_mlp=16384)
DEFAULTS |= {"num_local_experts": 16, "num_experts_per_tok": 1, "interleave_moe_layer_step": 1}
DEFAULTS |= {"no_rope_layer_interval": 4, "attention_chunk_size": 8192, "floor_scale": 8192}
CHUNKED = "chunked_attention"


def _mixers(settings: Settings, attention: Sequence[AttentionConfig]) -> list[AttentionConfig]:
    ropes, length = [mixer.rope for mixer in attention], settings.peek("max_position_embeddings")
    chunk = settings.take("attention_chunk_size", kind=int)
    kinds = decoders.layer_types(settings, len(ropes), CHUNKED, lambda layer: bool(chunk and ropes[layer]))
    norm = L2NormConfig(epsilon=settings.peek("rms_norm_eps")) if settings.take("use_qk_norm", True) else None
    scaling = next((rope.scaling for rope in ropes if rope is not None), None)
    if norm is not None and scaling is not None and scaling.magnitude() != 1:
        settings.refuse("use_qk_norm", True, "only positions that keep the length of queries and keys are supported")
    scale, floor = settings.take("attn_scale", 0.1), settings.count("floor_scale")
    tuned = settings.take("attn_temperature_tuning", True, object)  # a number in the first releases
    temperature = TemperatureConfig(scale=scale, length=floor) if tuned else None
    used = chunk if chunk is not None and chunk < length else None
    return [
        replace(
            mixer,
            chunk=used if kind == CHUNKED else None,
            qk_norm=None if mixer.rope is None else norm,
            temperature=temperature if mixer.rope is None else None,
        )
        for mixer, kind in zip(attention, kinds, strict=True)
    ]


def _read(settings: Settings, mlp: GatedMLPConfig) -> FeedForwardOf:
    """mlp: of an expert."""
    moe = MoEConfig(
        experts=settings.count("num_local_experts"),
        top_k=settings.count("num_experts_per_tok"),
        expert=mlp,
        router=decoders.router(settings, score="sigmoid", normalise="all"),
        shared=SharedExpertConfig(mlp=mlp),
        weigh="inputs",
    )
    step, layers = settings.count("interleave_moe_layer_step"), settings.peek("num_hidden_layers")
    dense = replace(mlp, ffn=settings.count("intermediate_size_mlp"))
    with_experts = settings.take("moe_layers", [*range(step - 1, layers, step)])
    return lambda layer: moe if layer in with_experts else dense


def _write(cfg: DecoderConfig) -> dict[str, Any]:
    moe, dense, ffn = decoders.feed_forwards(cfg)
    with_experts = [layer for layer in range(cfg.stack.layers()) if layer not in dense]
    return {"num_local_experts": moe.experts, "intermediate_size_mlp": ffn, "moe_layers": with_experts}


def _written(cfg: DecoderConfig) -> dict[str, Any]:
    mixers = [block.mixer for block in layers_of(cfg)]
    chunks, temperatures = [mixer.chunk for mixer in mixers], [mixer.temperature for mixer in mixers]
    temperature = next(filter(None, temperatures), TemperatureConfig())
    return {
        "attention_chunk_size": next((chunk for chunk in chunks if chunk is not None), None),
        "layer_types": [FULL if chunk is None else CHUNKED for chunk in chunks],
        "use_qk_norm": any(mixer.qk_norm is not None for mixer in mixers),
        "attn_temperature_tuning": any(temperatures),
        "attn_scale": temperature.scale,
        "floor_scale": temperature.length,
    }


TENSOR, PATH = f"{LAYER}.feed_forward", "stack.*.mlp"
TABLE = Decoder(
    "llama4_text", "Llama4ForCausalLM", DEFAULTS, bias="attention_bias", mixers=_mixers, written=_written,
    positions=LayerPositions(base=500000.0, interleaved=True), experts=Experts(_read, _write),
    mlp_rows=[
        *gated(TENSOR, PATH),
        *gated(f"{TENSOR}.shared_expert", f"{PATH}.shared"),
        Row(f"{TENSOR}.router.weight", f"{PATH}.router", "e d -> d e"),
        Row(f"{TENSOR}.experts.gate_up_proj", (f"{PATH}.experts.gate", f"{PATH}.experts.up"), axis=2),
        Row(f"{TENSOR}.experts.down_proj", f"{PATH}.experts.down"),
    ],
    unused=("router_jitter_noise", "for_llm_compressor"),
)  # fmt: skip
FAMILIES = [TABLE.family()]
