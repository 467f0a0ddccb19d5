"""Qwen 2 and Qwen 3 with experts: all layers but some, with a gated shared expert in Qwen 2."""

from dataclasses import replace
from functools import partial
from typing import Any

from megajax.interop.huggingface import decoders
from megajax.interop.huggingface.decoders import LAYER
from megajax.interop.huggingface.family import Settings
from megajax.interop.huggingface.tables import EVERYWHERE, Decoder, Experts, FeedForwardOf, Slides, Windows, sizes
from megajax.interop.weights.name_mapping import Row
from megajax.layers.mlp.config import GatedMLPConfig
from megajax.layers.moe.config import MoEConfig, SharedExpertConfig
from megajax.models.decoder.config import DecoderConfig

COMMON = {"use_sliding_window": False, "sliding_window": 4096, "decoder_sparse_step": 1}
WINDOWS = ("sliding_window", "use_sliding_window")


def _slides(settings: Settings) -> Slides:
    last = settings.take("max_window_layers", 0)
    return lambda layer: layer % 2 == 0 and layer < last


def _read(shared: bool, normalised: bool, settings: Settings, mlp: GatedMLPConfig) -> FeedForwardOf:
    """shared: whether there is a gated shared expert; normalised: default of norm_topk_prob."""
    shared_mlp = replace(mlp, ffn=settings.need("shared_expert_intermediate_size")) if shared else None
    moe = MoEConfig(
        experts=settings.take("num_local_experts", settings.need("num_experts")),
        top_k=settings.need("num_experts_per_tok"),
        expert=replace(mlp, ffn=settings.need("moe_intermediate_size")),
        router=decoders.router(settings, normalise="chosen" if settings.take("norm_topk_prob", normalised) else "all"),
        shared=None if shared_mlp is None else SharedExpertConfig(mlp=shared_mlp, gate=True),
    )
    every, dense = settings.count("decoder_sparse_step"), settings.take("mlp_only_layers", [])
    return lambda layer: mlp if layer in dense or (layer + 1) % every or not moe.experts else moe


def _write(cfg: DecoderConfig) -> dict[str, Any]:
    moe, dense, ffn = decoders.feed_forwards(cfg)
    return {
        "norm_topk_prob": moe.router.normalise == "chosen",
        "num_experts": moe.experts,
        "moe_intermediate_size": moe.expert.ffn,
        "intermediate_size": ffn,
        "mlp_only_layers": dense,
        "decoder_sparse_step": 1,
    }


def _write_shared(cfg: DecoderConfig) -> dict[str, Any]:
    shared = decoders.feed_forwards(cfg).moe.shared
    return {**_write(cfg), "shared_expert_intermediate_size": 0 if shared is None else shared.mlp.ffn}


def shared_experts(*, normalised: bool) -> Experts:
    """Experts with a gated shared one. normalised: default of norm_topk_prob."""
    gate = Row(f"{LAYER}.mlp.shared_expert_gate.weight", "stack.*.mlp.shared_gate", "g d -> d g")
    return Experts(partial(_read, True, normalised), _write_shared, [gate])


TENSORS = {"mlp.shared_experts": "mlp.shared_expert"}
TABLES = [
    Decoder(
        "qwen2_moe", "Qwen2MoeForCausalLM", COMMON | sizes(151936, 2048, 5632, 24, 16, 16, None, 32768)
        | {"moe_intermediate_size": 1408, "shared_expert_intermediate_size": 5632, "num_experts": 60, "qkv_bias": True}
        | {"num_experts_per_tok": 4, "max_window_layers": 28},
        tensors=TENSORS, qkv_bias="qkv_bias", experts=shared_experts(normalised=False),
        windows=Windows(_slides, (*WINDOWS, "max_window_layers", "layer_types")),
    ),
    Decoder(
        "qwen3_moe", "Qwen3MoeForCausalLM", COMMON | sizes(151936, 2048, 6144, 24, 32, 4, None, 32768)
        | {"moe_intermediate_size": 768, "num_experts": 128, "num_experts_per_tok": 8},
        bias="attention_bias", qk_norm="head", experts=Experts(partial(_read, False, False), _write),
        windows=EVERYWHERE._replace(names=WINDOWS), unused=("max_window_layers",),
    ),
]  # fmt: skip
FAMILIES = [table.family() for table in TABLES]
