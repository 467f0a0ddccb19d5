"""Granite: Llama with fixed factors on embeddings, sub-layers, scores and logits; with experts in Granite MoE.

All experts of a layer are in one tensor, with gate and up fused.
"""

from dataclasses import dataclass, replace
from typing import Any

from megajax.interop.huggingface import decoders
from megajax.interop.huggingface.decoders import LAYER, MIXER
from megajax.interop.huggingface.family import Settings, layers_of
from megajax.interop.huggingface.tables import (
    PLACES,
    SINKS,
    Decoder,
    Experts,
    FeedForwardOf,
    Positions,
    RopeOf,
    Windows,
    sizes,
)
from megajax.interop.weights.name_mapping import Row
from megajax.layers.mlp.config import GatedMLPConfig
from megajax.layers.moe.config import MoEConfig, SharedExpertConfig
from megajax.layers.norm.config import FixedScaleConfig
from megajax.models.decoder.config import DecoderConfig, WidthScalingConfig

DEFAULTS = sizes(32000, 4096, 11008, 32, 32, None, None, 2048)
MOE = DEFAULTS | {"num_local_experts": 8, "num_experts_per_tok": 2}


def scores(settings: Settings) -> dict[str, Any]:
    """The factor on scores."""
    return {"scale": settings.take("attention_multiplier", 1.0)}


def _sinks(settings: Settings) -> dict[str, Any]:
    return {**scores(settings), "sink": "learned"}


def factors(settings: Settings) -> dict[str, Any]:
    """The factors on embeddings, sub-layers and logits."""
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


def written(cfg: DecoderConfig) -> dict[str, Any]:
    """The settings of the factors."""
    return {
        "attention_multiplier": decoders.attention_mixers(cfg)[0].scale,
        "residual_multiplier": layers_of(cfg)[0].layer_scale.factor,
        "embedding_multiplier": 1.0 if cfg.width_scaling is None else cfg.width_scaling.embedding,
        "logits_scaling": round(1 / cfg.logit_factor(), 12),
    }


def experts(settings: Settings, mlp: GatedMLPConfig, shared: int = 0) -> MoEConfig:
    """shared: width of the shared expert; 0: there is none."""
    return MoEConfig(
        experts=settings.count("num_local_experts"),
        top_k=settings.count("num_experts_per_tok"),
        expert=mlp,
        router=decoders.router(settings),
        shared=SharedExpertConfig(mlp=GatedMLPConfig(ffn=shared, activation=mlp.activation)) if shared else None,
    )


def _read(settings: Settings, mlp: GatedMLPConfig) -> FeedForwardOf:
    moe = experts(settings, mlp)
    return lambda _: moe


def _read_shared(settings: Settings, mlp: GatedMLPConfig) -> FeedForwardOf:
    moe = experts(settings, mlp, settings.take("shared_intermediate_size", 0))
    return lambda _: moe


def write_experts(cfg: DecoderConfig) -> dict[str, Any]:
    """The settings of `experts`."""
    moe = decoders.feed_forwards(cfg).moe
    shared = {} if moe.shared is None else {"shared_intermediate_size": moe.shared.mlp.ffn}
    return {"num_local_experts": moe.experts, **shared}


FUSED = [
    Row(f"{LAYER}.shared_mlp.input_linear.weight", ("stack.*.mlp.gate", "stack.*.mlp.up"), "o i -> i o"),
    Row(f"{LAYER}.shared_mlp.output_linear.weight", "stack.*.mlp.down", "o i -> i o"),
]
"""A layer without experts."""
FUSED_EXPERTS = [
    Row(f"{LAYER}.block_sparse_moe.router.layer.weight", "stack.*.mlp.router", "e d -> d e"),
    Row(f"{LAYER}.block_sparse_moe.input_linear.weight", ("stack.*.mlp.experts.gate", "stack.*.mlp.experts.up"),
        "e f d -> e d f", axis=1),
    Row(f"{LAYER}.block_sparse_moe.output_linear.weight", "stack.*.mlp.experts.down", "e d f -> e f d"),
    Row(f"{LAYER}.shared_mlp.input_linear.weight", ("stack.*.mlp.shared.gate", "stack.*.mlp.shared.up"), "o i -> i o"),
    Row(f"{LAYER}.shared_mlp.output_linear.weight", "stack.*.mlp.shared.down", "o i -> i o"),
]  # fmt: skip
"""The router, the experts and the shared one."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ThetaPositions(Positions):
    """layer_rope_theta: the base of each layer, 0 for no rotary positions."""

    def read(self, settings: Settings) -> RopeOf:
        rotation = self.rotation(settings)
        bases = settings.take("layer_rope_theta", kind=list) or [rotation.base] * settings.peek("num_hidden_layers")
        if len(bases) != settings.peek("num_hidden_layers"):
            settings.refuse("layer_rope_theta", f"({len(bases)} layers)", "must have one number for each layer")
            bases = [rotation.base] * settings.peek("num_hidden_layers")
        return lambda layer, slides: replace(rotation, base=bases[layer]) if bases[layer] else None

    def write(self, cfg: DecoderConfig) -> dict[str, Any]:
        bases = [0 if mixer.rope is None else mixer.rope.base for mixer in decoders.attention_mixers(cfg)]
        return {**Positions.write(self, cfg), "layer_rope_theta": bases}


def _logits_times(settings: Settings) -> dict[str, Any]:
    """HyperCLOVA X multiplies logits by logits_scaling."""
    factor = settings.take("logits_scaling", 1.0)
    placement = "sandwich" if settings.take("use_post_norm", True) else "pre"
    fields = factors(settings)
    scaling = replace(fields["width_scaling"], output=factor)
    return {**fields, "width_scaling": scaling, "norm_placement": placement}


def _written_times(cfg: DecoderConfig) -> dict[str, Any]:
    post = layers_of(cfg)[0].norm_placement == "sandwich"
    return {**written(cfg), "logits_scaling": cfg.logit_factor(), "use_post_norm": post}


CLOVA_NORMS = {
    "input_layernorm": "mixer_norm",
    "post_norm1": "mixer_output_norm",
    "post_attention_layernorm": "mlp_norm",
    "post_norm2": "mlp_output_norm",
}
UNFUSED = {
    "router.layer.weight": "router.weight",
    "block_sparse_moe.input_linear.weight": "block_sparse_moe.experts.gate_up_proj",
}
UNFUSED |= {"block_sparse_moe.output_linear.weight": "block_sparse_moe.experts.down_proj"}
SWA: dict[str, Any] = {
    "positions": ThetaPositions(),
    "windows": Windows(lambda _: lambda layer: layer % 4 > 0),
    "mixer_rows": [*MIXER, SINKS],
}
FACTORS: dict[str, Any] = {"bias": "attention_bias", "mixer": scores, "model": factors, "written": written}
TABLES = [
    Decoder("granite", "GraniteForCausalLM", DEFAULTS, **FACTORS, mlp_bias="mlp_bias"),
    Decoder(
        "granitemoe", "GraniteMoeForCausalLM", MOE, **FACTORS, mlp_rows=FUSED_EXPERTS,
        experts=Experts(_read, write_experts),
    ),
    Decoder(
        "granitemoeshared", "GraniteMoeSharedForCausalLM", MOE, **FACTORS, mlp_rows=FUSED_EXPERTS,
        experts=Experts(_read_shared, write_experts),
    ),
    Decoder(
        "granite_swa", "GraniteSWAForCausalLM",
        sizes(100352, 2560, 8192, 24, 20, 4, None, 8192, rms_norm_eps=1e-5, sliding_window=128)
        | {"tie_word_embeddings": True},
        **SWA, **FACTORS | {"mixer": _sinks}, mlp_bias="mlp_bias",
    ),
    Decoder(
        "granitemoe_swa", "GraniteMoeSWAForCausalLM", MOE | {"sliding_window": 128}, **SWA, tensors=UNFUSED,
        **FACTORS | {"mixer": _sinks}, mlp_rows=FUSED_EXPERTS, experts=Experts(_read_shared, write_experts),
    ),
    Decoder(
        "hyperclovax", "HyperCLOVAXForCausalLM", DEFAULTS, bias="attention_bias", mlp_bias="mlp_bias",
        norms={"pre": PLACES["pre"], "sandwich": CLOVA_NORMS}, model=_logits_times, written=_written_times,
        mixer=lambda settings: {"scale": settings.take("attention_multiplier", kind=float)},
    ),
]  # fmt: skip
FAMILIES = [table.family() for table in TABLES]
