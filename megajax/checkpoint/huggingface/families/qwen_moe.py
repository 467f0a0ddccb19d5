"""Qwen 2 and Qwen 3 with experts: all layers but some, with a gated shared expert in Qwen 2."""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from megajax.checkpoint.huggingface import decoders
from megajax.checkpoint.huggingface.decoders import ATTENTION, LAYER, ends, experts, gated
from megajax.checkpoint.huggingface.family import Settings
from megajax.checkpoint.huggingface.rotary import rope, window_settings, windows
from megajax.checkpoint.weights.tensor_table import Row
from megajax.layers.config import BlockConfig, MoEConfig, RMSNormConfig, SharedExpertConfig
from megajax.models.config import DecoderConfig

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
ARCHITECTURES = {"qwen2_moe": "Qwen2MoeForCausalLM", "qwen3_moe": "Qwen3MoeForCausalLM"}


def model(kind: str, given: Settings) -> DecoderConfig:
    """The model of a config.json."""
    second = kind == "qwen2_moe"
    given.assume(DEFAULTS[kind])
    layers, length = given.layers(), given.need("max_position_embeddings")
    norm = RMSNormConfig(epsilon=given.need("rms_norm_eps"))
    mixer = decoders.attention(
        given,
        bias=not second and given.take("attention_bias", False),
        qkv_bias=given.take("qkv_bias", True) if second else None,
        qk_norm=None if second else norm,
        rope=rope(given, length),
    )
    mlp, last = decoders.gated_mlp(given), given.take("max_window_layers", 0)
    shared = replace(mlp, ffn=given.need("shared_expert_intermediate_size")) if second else None
    moe = MoEConfig(
        experts=given.take("num_local_experts", given.need("num_experts")),
        top_k=given.need("num_experts_per_tok"),
        expert=replace(mlp, ffn=given.need("moe_intermediate_size")),
        router=decoders.router(given, normalise="chosen" if given.take("norm_topk_prob", False) else "all"),
        shared=None if shared is None else SharedExpertConfig(mlp=shared, gate=True),
    )
    every, dense = given.count("decoder_sparse_step"), given.take("mlp_only_layers", [])
    sizes = windows(given, layers, length, lambda layer: not second or (layer % 2 == 0 and layer < last))
    blocks = decoders.windowed(BlockConfig(mixer=mixer, mlp=moe, norm=norm), sizes)
    for layer in range(layers):
        if layer in dense or (layer + 1) % every or not moe.experts:
            blocks[layer] = replace(blocks[layer], mlp=mlp)
    return decoders.decoder(given, blocks, length)


def settings(kind: str, cfg: DecoderConfig) -> dict[str, Any]:
    """The config.json of a model as one of this model_type."""
    mixers = [block.mixer for block in decoders.layers_of(cfg)]
    moe, dense, ffn = decoders.mixture_of(cfg)
    written: dict[str, Any] = {
        **decoders.settings_of(cfg, kind, ARCHITECTURES[kind]),
        **decoders.attention_settings(mixers[0], cfg.hidden),
        **decoders.activation_setting(moe.expert),
        **decoders.router_settings(moe),
        **window_settings(mixers),
        "norm_topk_prob": moe.router.normalise == "chosen",
        "num_experts": moe.experts,
        "moe_intermediate_size": moe.expert.ffn,
        "intermediate_size": ffn,
        "mlp_only_layers": dense,
        "decoder_sparse_step": 1,
    }
    if kind == "qwen3_moe":
        return {name: value for name, value in written.items() if name not in ("layer_types", "max_window_layers")}
    return {
        **written,
        "qkv_bias": mixers[0].has_qkv_bias(),
        "shared_expert_intermediate_size": 0 if moe.shared is None else moe.shared.mlp.ffn,
    }


def rows(cfg: DecoderConfig) -> list[Row]:
    """The table."""
    shared = gated(f"{LAYER}.mlp.shared_expert", "stack.*.mlp.shared")
    gate = Row(f"{LAYER}.mlp.shared_expert_gate.weight", "stack.*.mlp.shared_gate", "g d -> d g")
    return [*ends(cfg), *ATTENTION, *gated(f"{LAYER}.mlp", "stack.*.mlp"), *experts(f"{LAYER}.mlp"), *shared, gate]


FAMILIES = [
    decoders.family(
        kind,
        model=partial(model, kind),
        settings=partial(settings, kind),
        rows=rows,
        unused=frozenset({"max_window_layers"}),
    )
    for kind in ARCHITECTURES
]
