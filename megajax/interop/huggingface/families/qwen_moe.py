"""Qwen 2 and Qwen 3 with experts: all layers but some, with a gated shared expert in Qwen 2."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from megajax.checkpoint.weights.name_mapping import Row
from megajax.interop.huggingface import decoders
from megajax.interop.huggingface.decoders import ATTENTION, LAYER, experts, gated, outer_rows
from megajax.interop.huggingface.family import Settings, layers_of
from megajax.layers.mlp.config import GatedMLPConfig
from megajax.layers.moe.config import FeedForwardConfig, MoEConfig, SharedExpertConfig
from megajax.layers.norm.config import RMSNormConfig
from megajax.models.decoder.config import DecoderConfig

COMMON: Mapping[str, Any] = {
    "hidden_size": 2048,
    "num_hidden_layers": 24,
    "rms_norm_eps": 1e-6,
    "vocab_size": 151936,
    "max_position_embeddings": 32768,
    "use_sliding_window": False,
    "sliding_window": 4096,
    "decoder_sparse_step": 1,
}
DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "qwen2_moe": COMMON
    | {"num_attention_heads": 16, "num_key_value_heads": 16, "intermediate_size": 5632, "moe_intermediate_size": 1408}
    | {"shared_expert_intermediate_size": 5632, "num_experts": 60, "num_experts_per_tok": 4, "max_window_layers": 28},
    "qwen3_moe": COMMON
    | {"num_attention_heads": 32, "num_key_value_heads": 4, "intermediate_size": 6144, "moe_intermediate_size": 768}
    | {"num_experts": 128, "num_experts_per_tok": 8},
}


def _read(name: str, settings: Settings) -> DecoderConfig:
    second = name == "qwen2_moe"
    settings.assume(DEFAULTS[name])
    mixer = decoders.attention(
        settings,
        bias=not second and settings.take("attention_bias", False),
        qkv_bias=settings.take("qkv_bias", True) if second else None,
        qk_norm=None if second else RMSNormConfig(epsilon=settings.peek("rms_norm_eps")),
    )
    mlp, last = decoders.gated_mlp(settings), settings.take("max_window_layers", 0)

    def slides(layer: int) -> bool:
        return not second or (layer % 2 == 0 and layer < last)

    return decoders.decoder(settings, mixer, feed_forward(settings, mlp, shared=second), slides=slides)


def feed_forward(
    settings: Settings, mlp: GatedMLPConfig, *, shared: bool, normalised: bool = False
) -> Callable[[int], FeedForwardConfig]:
    """Number of a layer -> its feed-forward config: `mlp`, or experts.

    shared: whether there is a gated shared expert; normalised: default of norm_topk_prob.
    """
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


def _write(name: str, cfg: Any) -> dict[str, Any]:
    moe = decoders.feed_forwards(cfg).moe
    windows = ("sliding_window", "use_sliding_window")
    second: dict[str, Any] = {}
    if name == "qwen2_moe":
        windows += ("max_window_layers", "layer_types")
        second["qkv_bias"] = layers_of(cfg)[0].mixer.has_qkv_bias()
        second["shared_expert_intermediate_size"] = 0 if moe.shared is None else moe.shared.mlp.ffn
    return {**decoders.write(cfg, *windows, moe=moe), **write_experts(cfg), **second}


def write_experts(cfg: Any) -> dict[str, Any]:
    """The settings of `feed_forward`, without the shared expert."""
    moe, dense, ffn = decoders.feed_forwards(cfg)
    return {
        "norm_topk_prob": moe.router.normalise == "chosen",
        "num_experts": moe.experts,
        "moe_intermediate_size": moe.expert.ffn,
        "intermediate_size": ffn,
        "mlp_only_layers": dense,
        "decoder_sparse_step": 1,
    }


FEED_FORWARD = [
    *gated(f"{LAYER}.mlp", "stack.*.mlp"),
    *experts(f"{LAYER}.mlp"),
    *gated(f"{LAYER}.mlp.shared_expert", "stack.*.mlp.shared"),
    Row(f"{LAYER}.mlp.shared_expert_gate.weight", "stack.*.mlp.shared_gate", "g d -> d g"),
]
"""Layers without experts, and experts with a shared one."""


def _rows(cfg: DecoderConfig) -> list[Row]:
    return [*outer_rows(cfg), *ATTENTION, *FEED_FORWARD]


FAMILIES = [
    decoders.family(
        name,
        architecture,
        read=partial(_read, name),
        write=partial(_write, name),
        rows=_rows,
        unused=frozenset({"max_window_layers"}),
    )
    for name, architecture in (("qwen2_moe", "Qwen2MoeForCausalLM"), ("qwen3_moe", "Qwen3MoeForCausalLM"))
]
