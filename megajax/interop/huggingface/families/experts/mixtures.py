"""Decoders with experts in all layers but the first ones, whose parts other families have too.

OLMoE and FlexOlmo have OLMo 2's norms of queries and keys; MiniMax-M2 has them and a balanced choice of experts.
dots.llm1, Solar Open, K-EXAONE and GLM-4.5 have DeepSeek-V3's experts. ERNIE 4.5 balances a choice by softmax.
"""

from dataclasses import replace
from typing import Any

from megajax.checkpoint.weights.name_mapping import Row
from megajax.interop.huggingface import balanced_experts, decoders
from megajax.interop.huggingface.decoders import LAYER
from megajax.interop.huggingface.families.llama import EXPERTS
from megajax.interop.huggingface.family import Settings, layers_of
from megajax.interop.huggingface.tables import (
    BALANCED,
    BALANCED_BY_KINDS,
    FROM_LAYER,
    PLAIN,
    WEIGHTED,
    Decoder,
    Experts,
    FeedForwardOf,
    Positions,
    SlidingPositions,
    all_but_every,
    sizes,
)
from megajax.layers.mlp.config import GatedMLPConfig
from megajax.layers.moe.config import MoEConfig, SharedExpertConfig
from megajax.layers.norm.config import RMSNormConfig

ERNIE = sizes(103424, 2560, 12288, 28, 20, 4, None, 131072, rms_norm_eps=1e-5, tie_word_embeddings=True, moe_k=6)
ERNIE |= {"moe_intermediate_size": 1536, "moe_num_experts": 64, "moe_num_shared_experts": 2, "moe_layer_interval": 1}
ERNIE |= {"moe_layer_start_index": 1, "moe_layer_end_index": -1}
ERNIE_BIAS = Row(f"{LAYER}.mlp.moe_statics.e_score_correction_bias", "stack.*.mlp.load.sum", index=(slice(0, 1),))


def _read_minimax(settings: Settings, mlp: GatedMLPConfig) -> FeedForwardOf:
    moe: Any = PLAIN.read(settings, mlp)(0)
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
        top_k=settings.count("moe_k"),
        expert=expert,
        router=replace(decoders.router(settings), balance_rate=0.001),
        shared=SharedExpertConfig(mlp=replace(expert, ffn=shared * expert.ffn)) if shared else None,
    )
    first, last = settings.take("moe_layer_start_index", 0), settings.take("moe_layer_end_index", -1)
    every, last = settings.count("moe_layer_interval"), last if last >= 0 else settings.peek("num_hidden_layers")
    return lambda layer: moe if first <= layer <= last and (layer + 1) % every == 0 else mlp


def _write_ernie(cfg: Any) -> dict[str, Any]:
    """Layers with experts must be every second, third or so between the first and the last."""
    moe, dense, ffn = decoders.feed_forwards(cfg)
    sparse = sorted({*range(cfg.stack.layers())} - {*dense})
    return {
        "intermediate_size": ffn,
        "moe_intermediate_size": moe.expert.ffn,
        "moe_num_experts": moe.experts,
        "moe_k": moe.top_k,
        "moe_num_shared_experts": 0 if moe.shared is None else moe.shared.mlp.ffn // moe.expert.ffn,
        "moe_layer_start_index": sparse[0],
        "moe_layer_end_index": sparse[-1],
        "moe_layer_interval": sparse[1] - sparse[0] if len(sparse) > 1 else 1,
    }


def _qk_norm(settings: Settings) -> dict[str, Any]:
    normalised = settings.take("use_qk_norm", False)
    return {"qk_norm": RMSNormConfig(epsilon=settings.peek("rms_norm_eps"))} if normalised else {}


FAMILIES = [
    table.family()
    for table in (
        Decoder(
            "olmoe", "OlmoeForCausalLM", sizes(50304, 2048, 2048, 16, 16, None, None, 4096, rms_norm_eps=1e-5)
            | {"num_experts": 64, "num_experts_per_tok": 8},
            bias="attention_bias", qk_norm="heads", experts=WEIGHTED,
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
            qkv_bias="attention_bias", positions=Positions(fraction=0.5), experts=BALANCED, mixer=_qk_norm,
            model=lambda settings: {"prediction": balanced_experts.prediction(settings)},
            written=lambda cfg: {"use_qk_norm": layers_of(cfg)[0].mixer.qk_norm is not None},
            finish=balanced_experts.with_prediction, unused=("output_router_logits", "router_aux_loss_coef"),
            parts={"adjusted": balanced_experts.without_missing_blocks, "ignored": balanced_experts.COPIES},
        ),
        Decoder(
            "ernie4_5_moe", "Ernie4_5_MoeForCausalLM", ERNIE, unused=("moe_norm_min",),
            positions=Positions(base=500000.0, interleaved=True),
            experts=Experts(_read_ernie, _write_ernie, [ERNIE_BIAS]),
        ),
    )
]  # fmt: skip
