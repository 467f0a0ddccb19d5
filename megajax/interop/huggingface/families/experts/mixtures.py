"""Decoders with experts in all layers but the first ones, whose parts other families have too.

OLMoE and FlexOlmo have OLMo 2's norms of queries and keys; MiniMax-M2 has them and a balanced choice of experts.
dots.llm1, Solar Open and K-EXAONE have DeepSeek-V3's experts. ERNIE 4.5 balances a choice by softmax.
"""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from megajax.checkpoint.weights.name_mapping import Row
from megajax.interop.huggingface import balanced_experts, decoders
from megajax.interop.huggingface.decoders import ATTENTION, LAYER, MIXER, experts, outer_rows
from megajax.interop.huggingface.family import Settings, layers_of, norm
from megajax.interop.huggingface.rotary import rope_settings, ropes_of
from megajax.layers.moe.config import MoEConfig, SharedExpertConfig
from megajax.layers.norm.config import RMSNormConfig
from megajax.layers.position.config import RopeConfig
from megajax.models.decoder.config import DecoderConfig

COMMON: Mapping[str, Any] = {
    **{"hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32, "max_position_embeddings": 4096},
    **{"rms_norm_eps": 1e-5, "intermediate_size": 11008, "vocab_size": 100352},
}
OLMOE = COMMON | {"hidden_size": 2048, "intermediate_size": 2048, "num_hidden_layers": 16, "num_attention_heads": 16}
OLMOE |= {"vocab_size": 50304, "num_experts": 64, "num_experts_per_tok": 8}
FLEX = COMMON | {"rms_norm_eps": 1e-6, "num_experts": 7, "num_experts_per_tok": 5}
MINIMAX = COMMON | {"vocab_size": 200064, "hidden_size": 3072, "intermediate_size": 1536, "num_hidden_layers": 62}
MINIMAX |= {"num_attention_heads": 48, "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 196608}
MINIMAX |= {"rms_norm_eps": 1e-6, "num_experts_per_tok": 8, "num_local_experts": 256}
DOTS = COMMON | {"vocab_size": 152064, "hidden_size": 4608, "intermediate_size": 10944, "num_hidden_layers": 62}
DOTS |= {"moe_intermediate_size": 1408, "max_position_embeddings": 2048, "rms_norm_eps": 1e-6, "sliding_window": 4096}
DOTS |= {"max_window_layers": 62, "norm_topk_prob": False, "routed_scaling_factor": 1.0}
SOLAR = COMMON | {"vocab_size": 196608, "num_hidden_layers": 48, "num_attention_heads": 64, "num_key_value_heads": 8}
SOLAR |= {"head_dim": 128, "max_position_embeddings": 131072, "moe_intermediate_size": 1280, "n_routed_experts": 128}
SOLAR |= {"num_experts_per_tok": 8, "n_shared_experts": 1, "routed_scaling_factor": 1.0}
EXAONE = COMMON | {"vocab_size": 102400, "intermediate_size": 16384, "max_position_embeddings": 2048}
EXAONE |= {"sliding_window": 4096, "sliding_window_pattern": 4, "moe_intermediate_size": 1024, "num_experts": 64}
EXAONE |= {"num_experts_per_tok": 8, "num_shared_experts": 1, "routed_scaling_factor": 2.5, "first_k_dense_replace": 1}
ERNIE = COMMON | {"vocab_size": 103424, "hidden_size": 2560, "intermediate_size": 12288, "num_hidden_layers": 28}
ERNIE |= {"num_attention_heads": 20, "num_key_value_heads": 4, "max_position_embeddings": 131072, "moe_k": 6}
ERNIE |= {"moe_intermediate_size": 1536, "moe_num_experts": 64, "moe_num_shared_experts": 2, "moe_layer_interval": 1}
ERNIE |= {"moe_layer_start_index": 1, "moe_layer_end_index": -1, "tie_word_embeddings": True}
BASES = {"flex_olmo": 500000.0, "minimax_m2": 5000000.0, "solar_open": 1000000.0}
"""Defaults of rope_theta other than 10000."""
EXPERTS = {"num_experts": "n_routed_experts", "num_shared_experts": "n_shared_experts"}
"""Settings of K-EXAONE by the names that DeepSeek's experts have."""


def _read_olmoe(name: str, defaults: Mapping[str, Any], settings: Settings) -> DecoderConfig:
    """OLMoE, FlexOlmo and MiniMax-M2."""
    settings.assume(defaults)
    balanced, head_dim = name == "minimax_m2", settings.take("head_dim", kind=int)
    rotated = settings.take("rotary_dim", kind=int)
    if head_dim is not None:
        settings.remaining["head_dim"] = head_dim
        if rotated is not None:
            settings.assume({"partial_rotary_factor": rotated / head_dim})
    mixer = decoders.attention(
        settings,
        base=BASES.get(name, 10000.0),
        partial=balanced,
        bias=not balanced and settings.take("attention_bias", False),
        qk_norm=RMSNormConfig(epsilon=settings.peek("rms_norm_eps")),
        qk_norm_over="heads",
    )
    router = decoders.router(settings)
    if balanced:
        router = replace(router, score="sigmoid", balance_rate=0.001)
    elif not settings.take("norm_topk_prob", False):
        router = replace(router, normalise="all")
    count = settings.count("num_local_experts" if balanced else "num_experts")
    moe = MoEConfig(
        experts=count, top_k=settings.count("num_experts_per_tok"), expert=decoders.gated_mlp(settings), router=router
    )
    if balanced and moe.top_k == 1:
        balanced_experts.refuse_single(settings)
    return decoders.decoder(settings, mixer, lambda _: moe, norm_placement="output" if name == "flex_olmo" else "pre")


def _write_olmoe(name: str, cfg: Any) -> dict[str, Any]:
    moe = decoders.feed_forwards(cfg).moe
    settings = decoders.write(cfg, moe=moe)
    if name == "minimax_m2":
        return {**settings, "num_local_experts": moe.experts}
    return {**settings, "num_experts": moe.experts, "norm_topk_prob": moe.router.normalise == "chosen"}


def _rows_olmoe(name: str, cfg: DecoderConfig) -> list[Row]:
    if name == "minimax_m2":
        tensor = f"{LAYER}.block_sparse_moe"
        bias = Row(f"{tensor}.e_score_correction_bias", "stack.*.mlp.load.sum", index=(0,))
        return [*outer_rows(cfg), *ATTENTION, *experts(tensor, ("w1", "w3", "w2")), bias]
    if name == "olmoe":
        return [*outer_rows(cfg), *ATTENTION, *experts(f"{LAYER}.mlp")]
    norms = {"attention": "mixer", "feedforward": "mlp"}.items()
    rows = [row for theirs, field in norms for row in norm(f"{LAYER}.post_{theirs}_layernorm", f"stack.*.{field}_norm")]
    return [*outer_rows(cfg), *MIXER, *rows, *experts(f"{LAYER}.mlp")]


def _read_balanced(name: str, defaults: Mapping[str, Any], settings: Settings) -> DecoderConfig:
    """Those with DeepSeek-V3's experts."""
    settings.assume(defaults)
    exaone, solar = name == "exaone_moe", name == "solar_open"
    windows: dict[str, Any] = {}
    bias = not exaone and settings.take("attention_bias", False)
    mixer = decoders.attention(
        settings,
        base=BASES.get(name, 10000.0),
        partial=solar,
        bias=bias and not solar,
        qkv_bias=bias if solar else None,
        qk_norm=None if solar else RMSNormConfig(epsilon=settings.peek("rms_norm_eps")),
    )
    if name == "dots1":
        first = settings.take("max_window_layers", 0)
        windows = {"slides": lambda layer: layer >= first}
    if exaone:
        windowed, every = bool(settings.remaining["sliding_window"]), settings.count("sliding_window_pattern")
        windows = {"slides": lambda layer: (layer + 1) % every != 0}
        windows["rope_of"] = lambda _, slides: mixer.rope if slides or not windowed else None
        for name_there, name_here in EXPERTS.items():
            settings.remaining[name_here] = settings.remaining.pop(name_there)
    mlp, dense = decoders.gated_mlp(settings), balanced_experts.dense_layers(settings)
    moe = balanced_experts.balanced(settings, balanced_experts.experts(settings, mlp))
    return decoders.decoder(settings, mixer, lambda layer: mlp if layer < dense else moe, **windows)


def _write_balanced(name: str, cfg: Any) -> dict[str, Any]:
    sliding = () if name == "solar_open" else ("sliding_window", "layer_types")
    settings = {
        **decoders.write(cfg, *sliding, moe=decoders.feed_forwards(cfg).moe),
        **balanced_experts.write_balanced(cfg),
        "attention_bias": layers_of(cfg)[0].mixer.has_qkv_bias(),
    }
    if name == "exaone_moe":
        full, local = ropes_of(cfg, full=None, local=None)
        theirs = {field: theirs for theirs, field in EXPERTS.items()}
        kinds = balanced_experts.layer_types(settings["first_k_dense_replace"], cfg.stack.layers())
        settings = {theirs.get(setting, setting): value for setting, value in settings.items()}
        settings |= rope_settings(local or full or RopeConfig()) | {"mlp_layer_types": kinds}
    return settings


def _rows_balanced(name: str, cfg: DecoderConfig) -> list[Row]:
    place = "" if name == "exaone_moe" else "gate."
    bias = Row(f"{LAYER}.mlp.{place}e_score_correction_bias", "stack.*.mlp.load.sum", index=(0,))
    return [*outer_rows(cfg), *ATTENTION, *balanced_experts.rows(), bias]


def _read_ernie(settings: Settings) -> DecoderConfig:
    settings.assume(ERNIE)
    settings.only("use_bias", False)
    mixer = decoders.attention(settings, base=500000.0)
    mixer = replace(mixer, rope=replace(mixer.rope or RopeConfig(), interleaved=True))
    mlp, shared = decoders.gated_mlp(settings), settings.take("moe_num_shared_experts", 0)
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
    return decoders.decoder(
        settings, mixer, lambda layer: moe if first <= layer <= last and (layer + 1) % every == 0 else mlp
    )


def _write_ernie(cfg: Any) -> dict[str, Any]:
    """Layers with experts must be every second, third or so between the first and the last."""
    moe, dense, ffn = decoders.feed_forwards(cfg)
    sparse = sorted({*range(cfg.stack.layers())} - {*dense})
    return {
        **decoders.write(cfg, moe=moe),
        "intermediate_size": ffn,
        "moe_intermediate_size": moe.expert.ffn,
        "moe_num_experts": moe.experts,
        "moe_k": moe.top_k,
        "moe_num_shared_experts": 0 if moe.shared is None else moe.shared.mlp.ffn // moe.expert.ffn,
        "moe_layer_start_index": sparse[0],
        "moe_layer_end_index": sparse[-1],
        "moe_layer_interval": sparse[1] - sparse[0] if len(sparse) > 1 else 1,
    }


def _rows_ernie(cfg: DecoderConfig) -> list[Row]:
    bias = Row(f"{LAYER}.mlp.moe_statics.e_score_correction_bias", "stack.*.mlp.load.sum", index=(slice(0, 1),))
    return [*outer_rows(cfg), *ATTENTION, *balanced_experts.rows(), bias]


FAMILIES = [
    decoders.family(
        name,
        architecture,
        read=partial(read, name, defaults),
        write=partial(write, name),
        rows=partial(rows, name),
        unused=frozenset(unused),
        ignored=("mtp.*",) if name == "exaone_moe" else (),
        extra=("mtp.*",) if name == "exaone_moe" else (),
    )
    for name, architecture, defaults, read, write, rows, unused in (
        ("olmoe", "OlmoeForCausalLM", OLMOE, _read_olmoe, _write_olmoe, _rows_olmoe, ()),
        ("flex_olmo", "FlexOlmoForCausalLM", FLEX, _read_olmoe, _write_olmoe, _rows_olmoe, ()),
        (
            "minimax_m2", "MiniMaxM2ForCausalLM", MINIMAX, _read_olmoe, _write_olmoe, _rows_olmoe,
            # Settings of the released file that transformers does not read.
            ("router_jitter_noise", "attn_type_list", "layernorm_*", "mtp_*", "num_mtp_modules", "qk_norm_type",
             "scoring_func", "shared_*", "use_mtp", "use_qk_norm", "use_routing_bias"),
        ),
        ("dots1", "Dots1ForCausalLM", DOTS, _read_balanced, _write_balanced, _rows_balanced, ()),
        ("solar_open", "SolarOpenForCausalLM", SOLAR, _read_balanced, _write_balanced, _rows_balanced, ()),
        (
            "exaone_moe", "ExaoneMoeForCausalLM", EXAONE, _read_balanced, _write_balanced, _rows_balanced,
            ("attention_bias", "num_nextn_predict_layers", "router_aux_loss_coef"),
        ),
    )
] + [
    decoders.family(
        "ernie4_5_moe", "Ernie4_5_MoeForCausalLM", read=_read_ernie, write=_write_ernie, rows=_rows_ernie,
        unused=frozenset({"moe_norm_min"}),
    )
]  # fmt: skip
