"""Decoders with experts in all layers but the first ones, whose parts other families have too.

OLMoE and FlexOlmo have OLMo 2's norms of queries and keys; MiniMax-M2 has them and a balanced choice of experts.
dots.llm1, Solar Open, K-EXAONE and GLM-4.5 have DeepSeek-V3's experts. ERNIE 4.5 balances a choice by softmax.
"""

from dataclasses import replace
from typing import Any

from megajax.interop.huggingface import balanced_experts, decoders
from megajax.interop.huggingface.decoders import LAYER, MIXER
from megajax.interop.huggingface.families.llama import EXPERTS
from megajax.interop.huggingface.families.relatives import HUNYUAN, HUNYUAN_NORMS, HUNYUAN_UNUSED, fixed_alpha
from megajax.interop.huggingface.family import Settings, layers_of
from megajax.interop.huggingface.tables import (
    BALANCED,
    BALANCED_BY_KINDS,
    FROM_LAYER,
    FUSED_MIXER,
    PLAIN,
    WEIGHTED,
    Decoder,
    Experts,
    FeedForwardOf,
    LayeredPositions,
    Positions,
    SlidingPositions,
    Windows,
    all_but_every,
    plain_experts,
    sizes,
)
from megajax.interop.weights.name_mapping import Row
from megajax.layers.mlp.config import GatedMLPConfig
from megajax.layers.moe.config import MoEConfig, SharedExpertConfig
from megajax.layers.norm.config import RMSNormConfig
from megajax.models.decoder.config import DecoderConfig, WidthScalingConfig

ERNIE = sizes(
    103424, 2560, 12288, 28, 20, 4, None, 131072, rms_norm_eps=1e-5, tie_word_embeddings=True, num_experts_per_tok=6
)
ERNIE |= {"moe_intermediate_size": 1536, "moe_num_experts": 64, "moe_num_shared_experts": 2, "moe_layer_interval": 1}
ERNIE |= {"moe_layer_start_index": 1, "moe_layer_end_index": -1}
ERNIE_BIAS = Row(f"{LAYER}.mlp.moe_statics.e_score_correction_bias", "stack.*.mlp.load.sum", index=(slice(0, 1),))


def _read_minimax(settings: Settings, mlp: GatedMLPConfig) -> FeedForwardOf:
    moe = plain_experts(settings, mlp)
    if moe.top_k == 1:
        balanced_experts.refuse_single(settings)
    moe = replace(moe, router=replace(moe.router, score="sigmoid", balance_rate=0.001))
    return lambda _: moe


def _read_ernie(settings: Settings, mlp: GatedMLPConfig) -> FeedForwardOf:
    settings.only("use_bias", False)
    shared = settings.take("moe_num_shared_experts", 0)
    expert = replace(mlp, ffn=settings.count("moe_intermediate_size"))
    moe = MoEConfig(
        experts=settings.count("moe_num_experts"),
        top_k=settings.count("num_experts_per_tok"),
        expert=expert,
        router=replace(decoders.router(settings), balance_rate=0.001),
        shared=SharedExpertConfig(mlp=replace(expert, ffn=shared * expert.ffn)) if shared else None,
    )
    first, last = settings.take("moe_layer_start_index", 0), settings.take("moe_layer_end_index", -1)
    every, last = settings.count("moe_layer_interval"), last if last >= 0 else settings.peek("num_hidden_layers")
    return lambda layer: moe if first <= layer <= last and (layer + 1) % every == 0 else mlp


def _write_ernie(cfg: DecoderConfig) -> dict[str, Any]:
    """Layers with experts must be every second, third or so between the first and the last."""
    moe, dense, ffn = decoders.feed_forwards(cfg)
    sparse = sorted({*range(cfg.stack.layers())} - {*dense}) or [cfg.stack.layers()]
    return {
        "intermediate_size": ffn,
        "moe_intermediate_size": moe.expert.ffn,
        "moe_num_experts": moe.experts,
        "moe_num_shared_experts": 0 if moe.shared is None else moe.shared.mlp.ffn // moe.expert.ffn,
        "moe_layer_start_index": sparse[0],
        "moe_layer_end_index": sparse[-1],
        "moe_layer_interval": sparse[1] - sparse[0] if len(sparse) > 1 else 1,
    }


def _qk_norm(settings: Settings) -> dict[str, Any]:
    normalised = settings.take("use_qk_norm", False)
    return {"qk_norm": RMSNormConfig(epsilon=settings.peek("rms_norm_eps"))} if normalised else {}


def _read_hunyuan(settings: Settings, mlp: GatedMLPConfig) -> FeedForwardOf:
    """Lists have a number for each layer. All layers have a shared expert of an expert's width."""
    for name in ("num_experts", "num_experts_per_tok"):
        values = settings.remaining.get(name)
        if isinstance(values, list):
            if len({*values}) > 1:
                settings.refuse(name, values, "only one number for all layers is supported")
            settings.remaining[name] = values[0]
    moe = plain_experts(settings, mlp)
    moe = replace(moe, shared=SharedExpertConfig(mlp=mlp))
    return lambda _: moe


def _sigmoid(settings: Settings) -> None:
    settings.only("score_func", "sigmoid")
    settings.only("route_norm", True)


def _mup(settings: Settings) -> dict[str, Any]:
    hidden, scaled = settings.peek("hidden_size"), settings.take("mup_enabled", False)
    scaling = WidthScalingConfig(base_hidden=hidden, score_power=0.5, embedding=hidden**0.5)
    return {"width_scaling": scaling} if scaled else {}


def _read_mellum(settings: Settings, mlp: GatedMLPConfig) -> FeedForwardOf:
    normalised = settings.take("norm_topk_prob", True)
    moe = plain_experts(settings, replace(mlp, ffn=settings.count("moe_intermediate_size")))
    moe = replace(moe, router=replace(moe.router, normalise="chosen" if normalised else "all"))
    dense = balanced_experts.dense_layers(settings, by_kinds=True)
    return lambda layer: mlp if layer in dense else moe


def _write_mellum(cfg: DecoderConfig) -> dict[str, Any]:
    moe, _, ffn = decoders.feed_forwards(cfg)
    widths = {"intermediate_size": ffn, "moe_intermediate_size": moe.expert.ffn}
    return {**WEIGHTED.write(cfg), **widths, **balanced_experts.layer_kinds(cfg)}


GATE = Row(f"{LAYER}.self_attn.gate_proj.weight", "stack.*.mixer.gate", "(n h) d -> d n h")
WITH_PREDICTION: dict[str, Any] = {
    "experts": BALANCED,
    "mixer": _qk_norm,
    "model": lambda settings: {"prediction": balanced_experts.prediction(settings)},
    "written": lambda cfg: {"use_qk_norm": layers_of(cfg)[0].mixer.qk_norm is not None},
    "finish": balanced_experts.with_prediction,
    "unused": ("output_router_logits", "router_aux_loss_coef"),
    "parts": {"adjusted": balanced_experts.without_missing_blocks, "ignored": balanced_experts.COPIES},
}
"""Of GLM-4.5 and Sarvam."""
FAMILIES = [
    table.family()
    for table in (
        Decoder(
            "olmoe", "OlmoeForCausalLM", sizes(50304, 2048, 2048, 16, 16, None, None, 4096, rms_norm_eps=1e-5)
            | {"num_experts": 64, "num_experts_per_tok": 8},
            bias="attention_bias", qk_norm="heads", experts=WEIGHTED,
            mixer=lambda settings: {"qkv_clip": settings.take("clip_qkv", kind=float)},
            written=lambda cfg: {"clip_qkv": layers_of(cfg)[0].mixer.qkv_clip},
        ),
        Decoder(
            "flex_olmo", "FlexOlmoForCausalLM", sizes(100352, 4096, 11008, 32, 32, None, None, 4096)
            | {"num_experts": 7, "num_experts_per_tok": 5},
            bias="attention_bias", qk_norm="heads", placement="output", experts=WEIGHTED,
            positions=Positions(base=500000.0),
        ),
        Decoder(
            "minimax_m2", "MiniMaxM2ForCausalLM", sizes(200064, 3072, 1536, 62, 48, 8, 128, 196608)
            | {"num_experts": 256, "num_experts_per_tok": 8},
            {"num_local_experts": "num_experts"},
            EXPERTS | {"mlp.gate.e_score": "block_sparse_moe.e_score"}, qk_norm="heads", prepare=decoders.rotary_dim,
            positions=Positions(base=5000000.0, fraction=1.0),
            experts=Experts(_read_minimax, PLAIN.write, [balanced_experts.BIAS]),
            # Settings of the released file that transformers does not read.
            unused=("router_jitter_noise", "attn_type_list", "layernorm_*", "mtp_*", "num_mtp_modules", "qk_norm_type",
                    "scoring_func", "shared_*", "use_mtp", "use_qk_norm", "use_routing_bias"),
        ),
        Decoder(
            "dots1", "Dots1ForCausalLM", sizes(152064, 4608, 10944, 62, 32, None, None, 2048, sliding_window=4096)
            | {"moe_intermediate_size": 1408, "max_window_layers": 62, "norm_topk_prob": False}
            | {"routed_scaling_factor": 1.0},
            bias="attention_bias", qk_norm="head", windows=FROM_LAYER, experts=BALANCED,
        ),
        Decoder(
            "solar_open", "SolarOpenForCausalLM", sizes(196608, 4096, 11008, 48, 64, 8, 128, 131072, rms_norm_eps=1e-5)
            | {"moe_intermediate_size": 1280, "n_routed_experts": 128, "num_experts_per_tok": 8, "n_shared_experts": 1}
            | {"routed_scaling_factor": 1.0},
            qkv_bias="attention_bias", positions=Positions(base=1000000.0, fraction=1.0), experts=BALANCED,
        ),
        Decoder(
            "exaone_moe", "ExaoneMoeForCausalLM", sizes(102400, 4096, 16384, 32, 32, None, None, 2048)
            | {"rms_norm_eps": 1e-5, "sliding_window": 4096, "sliding_window_pattern": 4}
            | {"moe_intermediate_size": 1024}
            | {"n_routed_experts": 64, "num_experts_per_tok": 8, "n_shared_experts": 1, "routed_scaling_factor": 2.5}
            | {"first_k_dense_replace": 1},
            {"num_experts": "n_routed_experts", "num_shared_experts": "n_shared_experts"},
            {"mlp.gate.e_score": "mlp.e_score"}, qk_norm="head", windows=all_but_every("sliding_window_pattern"),
            positions=SlidingPositions(), experts=BALANCED_BY_KINDS,
            unused=("attention_bias", "num_nextn_predict_layers", "router_aux_loss_coef"),
            parts={"ignored": ("mtp.*",), "extra": ("mtp.*",)},
        ),
        Decoder(
            "glm4_moe", "Glm4MoeForCausalLM", sizes(151552, 4096, 10944, 46, 96, 8, None, 131072, rms_norm_eps=1e-5)
            | {"moe_intermediate_size": 1408, "n_routed_experts": 128, "n_shared_experts": 1, "num_experts_per_tok": 8}
            | {"first_k_dense_replace": 1, "routed_scaling_factor": 1.0, "num_nextn_predict_layers": 1},
            qkv_bias="attention_bias", positions=Positions(fraction=0.5), **WITH_PREDICTION,
        ),
        Decoder(
            "hunyuan_v1_moe", "HunYuanMoEV1ForCausalLM", HUNYUAN | {"num_experts": 1, "num_experts_per_tok": 1},
            {"moe_topk": "num_experts_per_tok"},
            HUNYUAN_NORMS | {"mlp.gate.weight": "mlp.gate.wg.weight", "mlp.shared_experts": "mlp.shared_mlp"},
            bias="attention_bias", qk_norm="head", mixer=lambda _: {"qk_norm_after_rope": True},
            prepare=fixed_alpha, experts=Experts(_read_hunyuan, PLAIN.write),
            unused=(*HUNYUAN_UNUSED, "moe_*", "n_group", "topk_group", "num_shared_expert", "use_mixed_mlp_moe",
                    "group_limited_greedy", "capacity_factor", "routed_scaling_factor", "norm_topk_prob"),
        ),
        Decoder(
            "sarvam_moe", "Glm4MoeForCausalLM", sizes(262144, 4096, 8192, 19, 64, 4, 64, 131072)
            | {"moe_intermediate_size": 1024, "n_routed_experts": 128, "n_shared_experts": 1, "num_experts_per_tok": 6}
            | {"first_k_dense_replace": 1, "routed_scaling_factor": 2.5, "num_nextn_predict_layers": 0}
            | {"use_qk_norm": True},
            {"num_experts": "n_routed_experts", "num_shared_experts": "n_shared_experts"}
            | {"use_qkv_bias": "attention_bias", "num_mtp_layers": "num_nextn_predict_layers"},
            {"model.embed_tokens": "model.word_embeddings", "self_attn.qkv_proj": "attention.query_key_value"}
            | {"self_attn.o_proj": "attention.dense", "self_attn.q_norm": "attention.query_layernorm"}
            | {"self_attn.k_norm": "attention.key_layernorm", "e_score_correction_bias": "expert_bias"},
            mixer_rows=FUSED_MIXER, qkv_bias="attention_bias", positions=Positions(base=8e6, fraction=1.0),
            **WITH_PREDICTION,
        ),
        Decoder(
            "afmoe", "AfmoeForCausalLM", sizes(200192, 2048, 6144, 32, 16, None, 128, 16384, rms_norm_eps=1e-5)
            | {"moe_intermediate_size": 1408, "n_routed_experts": 64, "n_shared_experts": 2, "num_experts_per_tok": 6}
            | {"first_k_dense_replace": 1, "routed_scaling_factor": 1.0, "sliding_window": 1024}
            | {"global_attn_every_n_layers": 4},
            {"num_experts": "n_routed_experts", "num_shared_experts": "n_shared_experts"}
            | {"num_dense_layers": "first_k_dense_replace", "route_scale": "routed_scaling_factor"},
            {"pre_feedforward_layernorm": "pre_mlp_layernorm", "post_feedforward_layernorm": "post_mlp_layernorm"}
            | {"mlp.gate.weight": "mlp.router.gate.weight", "mlp.gate.e_score_correction_bias": "mlp.expert_bias"},
            bias="attention_bias", qk_norm="head", placement="sandwich", positions=SlidingPositions(always=True),
            windows=all_but_every("global_attn_every_n_layers"), mixer=lambda _: {"gate": True}, prepare=_sigmoid,
            model=_mup, experts=BALANCED, mixer_rows=[*MIXER, GATE],
            written=lambda cfg: {"mup_enabled": cfg.width_scaling is not None},
            unused=("load_balance_coeff", "num_expert_groups", "num_limited_groups", "use_grouped_mm"),
        ),
        Decoder(
            "mellum", "MellumForCausalLM", sizes(98304, 2304, 7168, 28, 32, 4, 128, 131072, sliding_window=1024)
            | {"moe_intermediate_size": 896, "num_experts": 64, "num_experts_per_tok": 8},
            {"num_local_experts": "num_experts"}, bias="attention_bias", qk_norm="head",
            positions=LayeredPositions(base=500000.0, local=10000.0), windows=Windows(lambda _: lambda layer: False),
            experts=Experts(_read_mellum, _write_mellum),
            unused=("mtp_*", "num_mtp_layers", "num_nextn_predict_layers"),
            parts={"ignored": ("mtp.*",), "extra": ("mtp.*",)},
        ),
        Decoder(
            "ernie4_5_moe", "Ernie4_5_MoeForCausalLM", ERNIE, {"moe_k": "num_experts_per_tok"},
            unused=("moe_norm_min",), positions=Positions(base=500000.0, interleaved=True),
            experts=Experts(_read_ernie, _write_ernie, [ERNIE_BIAS]),
        ),
    )
]  # fmt: skip
