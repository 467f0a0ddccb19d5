"""Granite: Llama with fixed factors on embeddings, sub-layers, scores and logits; with experts in Granite MoE.

All experts of a layer are in one tensor, with gate and up fused.
"""

from functools import partial
from typing import Any

from megajax.checkpoint.weights.name_mapping import Row
from megajax.interop.huggingface import decoders
from megajax.interop.huggingface.decoders import ATTENTION, LAYER, outer_rows
from megajax.interop.huggingface.families import llama
from megajax.interop.huggingface.family import Settings, layers_of
from megajax.layers.attention.config import AttentionConfig
from megajax.layers.mlp.config import GatedMLPConfig
from megajax.layers.moe.config import MoEConfig, SharedExpertConfig
from megajax.layers.norm.config import FixedScaleConfig
from megajax.models.decoder.config import DecoderConfig, WidthScalingConfig

DEFAULTS = {**llama.COMMON, "intermediate_size": 11008, "max_position_embeddings": 2048}
MOE = DEFAULTS | {"num_local_experts": 8, "num_experts_per_tok": 2}


def attention(settings: Settings) -> AttentionConfig:
    """Attention with a factor on scores."""
    bias, scale = settings.take("attention_bias", False), settings.take("attention_multiplier", 1.0)
    return decoders.attention(settings, bias=bias, scale=scale)


def factors(settings: Settings) -> dict[str, Any]:
    """Fields of a decoder and its blocks: the factors on embeddings, sub-layers and logits."""
    divisor = settings.take("logits_scaling", 1.0)
    if divisor <= 0:
        settings.refuse("logits_scaling", divisor, "must be above 0")
        divisor = 1.0
    scaling = WidthScalingConfig(
        base_hidden=settings.peek("hidden_size"),
        score_power=0.5,
        embedding=settings.take("embedding_multiplier", 1.0),
        output=1 / divisor,
    )
    scale = FixedScaleConfig(factor=settings.take("residual_multiplier", 1.0))
    return {"layer_scale": scale, "width_scaling": scaling}


def experts(settings: Settings, shared: int) -> MoEConfig:
    """shared: width of the shared expert; 0: there is none."""
    expert = decoders.gated_mlp(settings)
    return MoEConfig(
        experts=settings.count("num_local_experts"),
        top_k=settings.count("num_experts_per_tok"),
        expert=expert,
        router=decoders.router(settings),
        shared=SharedExpertConfig(mlp=GatedMLPConfig(ffn=shared, activation=expert.activation)) if shared else None,
    )


def _read(settings: Settings) -> DecoderConfig:
    settings.assume(DEFAULTS)
    mixer, mlp = attention(settings), decoders.gated_mlp(settings, bias=settings.take("mlp_bias", False))
    return decoders.decoder(settings, mixer, lambda _: mlp, **factors(settings))


def _read_moe(name: str, settings: Settings) -> DecoderConfig:
    settings.assume(MOE)
    shared = settings.take("shared_intermediate_size", 0) if name == "granitemoeshared" else 0
    mixer, moe = attention(settings), experts(settings, shared)
    return decoders.decoder(settings, mixer, lambda _: moe, **factors(settings))


def write(cfg: Any, moe: MoEConfig | None = None) -> dict[str, Any]:
    """The settings of all of them. moe: of a model with experts."""
    mixer, scaling = decoders.attention_mixers(cfg)[0], cfg.width_scaling
    settings = decoders.write(cfg, moe=moe)
    settings |= {} if moe is None else {"num_local_experts": moe.experts}
    settings |= {} if moe is None or moe.shared is None else {"shared_intermediate_size": moe.shared.mlp.ffn}
    return {
        **settings,
        "attention_multiplier": mixer.scale,
        "residual_multiplier": layers_of(cfg)[0].layer_scale.factor,
        "embedding_multiplier": scaling.embedding,
        "logits_scaling": round(1 / cfg.logit_factor(), 12),
    }


def _write(cfg: Any) -> dict[str, Any]:
    return {**write(cfg), "mlp_bias": layers_of(cfg)[0].mlp.bias}


def _write_moe(cfg: Any) -> dict[str, Any]:
    return write(cfg, decoders.feed_forwards(cfg).moe)


def fused(tensor: str, path: str) -> list[Row]:
    """A gated feed-forward layer in two tensors."""
    up = Row(f"{tensor}.input_linear.weight", (f"{path}.gate", f"{path}.up"), "o i -> i o")
    return [up, Row(f"{tensor}.output_linear.weight", f"{path}.down", "o i -> i o")]


def expert_rows() -> list[Row]:
    """The router, the experts and the shared one."""
    tensor, path = f"{LAYER}.block_sparse_moe", "stack.*.mlp.experts"
    return [
        Row(f"{tensor}.router.layer.weight", "stack.*.mlp.router", "e d -> d e"),
        Row(f"{tensor}.input_linear.weight", (f"{path}.gate", f"{path}.up"), "e f d -> e d f", axis=1),
        Row(f"{tensor}.output_linear.weight", f"{path}.down", "e d f -> e f d"),
        *fused(f"{LAYER}.shared_mlp", "stack.*.mlp.shared"),
    ]


def _rows(cfg: DecoderConfig) -> list[Row]:
    return [*outer_rows(cfg), *ATTENTION, *expert_rows()]


FAMILIES = [decoders.family("granite", "GraniteForCausalLM", read=_read, write=_write, rows=llama.rows)] + [
    decoders.family(name, architecture, read=partial(_read_moe, name), write=_write_moe, rows=_rows)
    for name, architecture in (
        ("granitemoe", "GraniteMoeForCausalLM"),
        ("granitemoeshared", "GraniteMoeSharedForCausalLM"),
    )
]
