"""Mixtures with a choice of experts or a form of their own: DBRX and Phi-3.5-MoE."""

from dataclasses import replace
from typing import Any

from megajax.interop.huggingface.families.llama import EXPERTS, longrope
from megajax.interop.huggingface.family import Settings, layers_of
from megajax.interop.huggingface.rotary import rope_settings
from megajax.interop.huggingface.tables import (
    EVERYWHERE,
    FUSED_MIXER,
    PLAIN,
    Decoder,
    Experts,
    FeedForwardOf,
    Positions,
    one_group,
    plain_experts,
    sizes,
)
from megajax.interop.weights.name_mapping import Row
from megajax.layers.mlp.config import GatedMLPConfig
from megajax.layers.norm.config import LayerNormConfig
from megajax.models.decoder.config import DecoderConfig

DBRX = sizes(32000, 2048, None, 24, 16, None, None, 2048, rms_norm_eps=1e-5, attn_config={}, ffn_config={})
IN_DBRX = "transformer.blocks.{layer}.ffn.experts.mlp"


def _dbrx(settings: Settings) -> None:
    """Settings of attention and of experts are mappings of their own."""
    one_group(settings)
    attention, experts = settings.part("attn_config"), settings.part("ffn_config")
    settings.remaining["num_key_value_heads"] = attention.take("kv_n_heads", 1)
    settings.remaining["qkv_clip"] = attention.take("clip_qkv", kind=float)
    settings.remaining["hidden_act"] = experts.part("ffn_act_fn").take("name", "silu")
    settings.remaining["intermediate_size"] = experts.take("ffn_hidden_size", 3584)
    settings.remaining["num_experts"] = experts.take("moe_num_experts", 4)
    settings.remaining["num_experts_per_tok"] = experts.take("moe_top_k", 1)
    powers = experts.remaining.pop("moe_normalize_expert_weights", 1.0)
    if powers not in (1, None):
        experts.refuse("moe_normalize_expert_weights", powers, "only 1 or null is supported")
    settings.remaining["norm_topk_prob"] = powers is not None
    # The published files have the base of positions here only, where transformers 5.24 does not read it.
    base = attention.take("rope_theta", kind=float)
    if base is not None and not settings.remaining.keys() & {"rope_theta", "rope_parameters"}:
        settings.remaining["rope_theta"] = base
    attention.close(("attn_pdrop",))
    experts.close(("hidden_size", "moe_jitter_eps", "moe_loss_weight", "uniform_expert_assignment"))


def _read_dbrx(settings: Settings, mlp: GatedMLPConfig) -> FeedForwardOf:
    moe = plain_experts(settings, mlp)
    normalised = settings.take("norm_topk_prob", True)
    moe = replace(moe, router=replace(moe.router, normalise="chosen" if normalised else "all"))
    return lambda _: moe


def _write_dbrx(cfg: DecoderConfig) -> dict[str, Any]:
    block = layers_of(cfg)[0]
    experts = {
        "ffn_act_fn": {"name": block.mlp.expert.activation},
        "ffn_hidden_size": block.mlp.expert.ffn,
        "moe_num_experts": block.mlp.experts,
        "moe_top_k": block.mlp.top_k,
        "moe_normalize_expert_weights": 1.0 if block.mlp.router.normalise == "chosen" else None,
    }
    attention = {"kv_n_heads": block.mixer.groups(), "clip_qkv": block.mixer.qkv_clip}
    return {"attn_config": attention | {"rope_theta": block.mixer.rope.base}, "ffn_config": experts}


def _matrices(cfg: DecoderConfig) -> dict[str, Any]:
    """Matrices of all experts lie below one another."""
    return {"sizes": {"e": layers_of(cfg)[0].mlp.experts}}


def _dbrx_rows(rows: list[Row], cfg: DecoderConfig) -> list[Row]:
    path, up = "stack.*.mlp", "(e f) d -> e d f"
    return [
        *rows,
        Row(f"{IN_DBRX.partition('.experts')[0]}.router.layer.weight", f"{path}.router", "e d -> d e"),
        Row(f"{IN_DBRX}.w1", f"{path}.experts.gate", up, **_matrices(cfg)),
        Row(f"{IN_DBRX}.v1", f"{path}.experts.up", up, **_matrices(cfg)),
        Row(f"{IN_DBRX}.w2", f"{path}.experts.down", "(e f) d -> e f d", **_matrices(cfg)),
    ]


def _magnitudes(settings: Settings) -> None:
    """Phi-3.5-MoE's factors on rotated heads, for short and for long texts."""
    longrope(settings)
    for name in ("rope_scaling", "rope_parameters"):
        positions = settings.remaining.get(name)
        if isinstance(positions, dict) and "short_mscale" in positions:
            positions = dict(positions)
            short, long = positions.pop("short_mscale"), positions.pop("long_mscale", None)
            if short != long:
                settings.refuse("long_mscale", long, f"only the value of short_mscale={short} is supported")
            settings.remaining[name] = positions | {"attention_factor": short}
    settings.only("num_experts_per_tok", 2)
    settings.remaining["num_experts_per_tok"] = 2


def _read_phi(settings: Settings, mlp: GatedMLPConfig) -> FeedForwardOf:
    moe = plain_experts(settings, mlp)
    moe = replace(moe, router=replace(moe.router, sparse_mixer=settings.need("router_jitter_noise", float)))
    return lambda _: moe


def _write_phi(cfg: DecoderConfig) -> dict[str, Any]:
    block = layers_of(cfg)[0]
    scaling = rope_settings(block.mixer.rope)["rope_scaling"]
    if scaling and (factor := scaling.pop("attention_factor", None)) is not None:
        scaling |= {"short_mscale": factor, "long_mscale": factor}
    head = {"lm_head_bias": cfg.head_bias, "rope_scaling": scaling}
    return {**PLAIN.write(cfg), "router_jitter_noise": block.mlp.router.sparse_mixer, **head}


TABLES = [
    Decoder(
        "dbrx", "DbrxForCausalLM", DBRX,
        {"d_model": "hidden_size", "n_heads": "num_attention_heads", "n_layers": "num_hidden_layers"}
        | {"max_seq_len": "max_position_embeddings"},
        {"model.embed_tokens": "transformer.wte", "model.norm": "transformer.norm_f"}
        | {"input_layernorm": "norm_attn_norm.norm_1", "post_attention_layernorm": "norm_attn_norm.norm_2"}
        | {"model.layers": "transformer.blocks", "self_attn.qkv_proj": "norm_attn_norm.attn.Wqkv"}
        | {"self_attn.o_proj": "norm_attn_norm.attn.out_proj"},
        norm=LayerNormConfig(bias=False), prepare=_dbrx, mixer_rows=FUSED_MIXER, mlp_rows=(), finish=_dbrx_rows,
        mixer=lambda settings: {"qkv_clip": settings.take("qkv_clip", kind=float)},
        experts=Experts(_read_dbrx, _write_dbrx), unused=("emb_pdrop",),
    ),
    Decoder(
        "phimoe", "PhimoeForCausalLM", sizes(32064, 4096, 6400, 32, 32, 8, None, 131072, rms_norm_eps=1e-5)
        | {"num_experts": 16, "num_experts_per_tok": 2, "router_jitter_noise": 0.01},
        {"num_local_experts": "num_experts"}, EXPERTS, bias="attention_bias", norm=LayerNormConfig(),
        positions=Positions(base=1e6), windows=EVERYWHERE, prepare=_magnitudes,
        experts=Experts(_read_phi, _write_phi), unused=("input_jitter_noise",),
        model=lambda settings: {"head_bias": settings.take("lm_head_bias", False)},
    ),
]  # fmt: skip
FAMILIES = [table.family() for table in TABLES]
