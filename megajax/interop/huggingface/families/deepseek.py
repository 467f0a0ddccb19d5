"""DeepSeek-V2 and V3: latent attention, shared experts, first layers without experts.

V2 chooses experts by softmax within the best groups. V3 chooses them by sigmoid with a bias that balances their load,
and has multi-token prediction blocks.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

from megajax.checkpoint.weights.name_mapping import Row
from megajax.interop.huggingface import decoders
from megajax.interop.huggingface.decoders import LAYER, NORMS, experts, gated, outer_rows
from megajax.interop.huggingface.family import Settings, layers_of, linear
from megajax.interop.huggingface.rotary import rope, rope_settings
from megajax.layers.attention.latent_config import LatentAttentionConfig
from megajax.layers.mlp.config import GatedMLPConfig
from megajax.layers.moe.config import MoEConfig, RouterConfig, SharedExpertConfig
from megajax.layers.norm.config import RMSNormConfig
from megajax.models.decoder.config import DecoderConfig, PredictionConfig

V2: Mapping[str, Any] = {
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "vocab_size": 102400,
    "intermediate_size": 11008,
    "moe_intermediate_size": 1407,
    "n_routed_experts": 64,
    "n_shared_experts": 2,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "routed_scaling_factor": 1.0,
}
V3: Mapping[str, Any] = V2 | {
    "hidden_size": 7168,
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "vocab_size": 129280,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "n_group": 8,
    "topk_group": 4,
    "first_k_dense_replace": 3,
    "max_position_embeddings": 4096,
    "routed_scaling_factor": 2.5,
    "num_nextn_predict_layers": 1,
}
"""Defaults of settings that are missing in config.json."""
METHODS = {"greedy": False, "group_limited_greedy": True}
"""topk_method -> whether the experts of a token come from a limited number of groups."""
LATENTS = {
    "key_value_rank": "kv_lora_rank",
    "content_dim": "qk_nope_head_dim",
    "position_dim": "qk_rope_head_dim",
    "value_dim": "v_head_dim",
}
"""Field of LatentAttentionConfig -> setting in config.json."""
UNUSED = frozenset({
    # Settings that follow from others, and losses and layouts of training.
    "aux_loss_alpha", "ep_size", "head_dim", "moe_layer_freq", "num_key_value_heads", "output_router_logits",
    "qk_head_dim", "router_aux_loss_coef", "scoring_func", "seq_aux",
})  # fmt: skip


def _read_v2(settings: Settings) -> DecoderConfig:
    settings.assume(V2)
    mlp = decoders.gated_mlp(settings, bias=settings.take("mlp_bias", False))
    moe, limited = _experts(settings, mlp), settings.choose("topk_method", "greedy", METHODS)
    groups = _groups(settings, moe.top_k, scores=1)
    scale = settings.need("routed_scaling_factor")
    router = RouterConfig(normalise="all", scale=scale, row_loss=0.001, **(groups if limited else {}))
    return _decoder(settings, mlp, replace(moe, router=router))


def _read_v3(settings: Settings) -> DecoderConfig:
    settings.assume(V3)
    settings.only("topk_method", "noaux_tc")
    mlp = decoders.gated_mlp(settings)
    moe, normalised = _experts(settings, mlp), settings.take("norm_topk_prob", True)
    if normalised and moe.top_k == 1:
        reason = "with norm_topk_prob, MegaJAX weighs a single expert by its score, not 1"
        settings.refuse("num_experts_per_tok", 1, reason)
    router = RouterConfig(
        score="sigmoid",
        normalise="chosen" if normalised else "all",
        scale=settings.need("routed_scaling_factor"),
        balance_rate=0.001,
        row_loss=0.0001,
        **_groups(settings, moe.top_k, scores=2),
    )
    depth = settings.need("num_nextn_predict_layers")
    prediction = PredictionConfig(depth=depth, weight=0.3) if depth else None
    return _decoder(settings, mlp, replace(moe, router=router), prediction=prediction)


def _decoder(settings: Settings, mlp: GatedMLPConfig, moe: MoEConfig, **changes: Any) -> DecoderConfig:
    bias, dense = settings.take("attention_bias", False), settings.take("first_k_dense_replace", 0)
    rotation = rope(settings, settings.peek("max_position_embeddings"))
    mixer = LatentAttentionConfig(
        heads=settings.count("num_attention_heads"),
        query_rank=settings.take("q_lora_rank"),
        **{field: settings.need(name) for field, name in LATENTS.items()},
        bias=bias,
        latent_bias=bias,
        norm=RMSNormConfig(epsilon=1e-6),  # of the latents, which ignore rms_norm_eps
        rope=replace(rotation, interleaved=settings.take("rope_interleave", True)),
    )
    return decoders.decoder(settings, mixer, lambda layer: mlp if layer < dense else moe, **changes)


def _experts(settings: Settings, mlp: GatedMLPConfig) -> MoEConfig:
    """The experts, with a default router. mlp: of layers without experts."""
    ffn, shared = settings.need("moe_intermediate_size"), settings.take("n_shared_experts", 0)
    return MoEConfig(
        experts=settings.need("n_routed_experts"),
        top_k=settings.need("num_experts_per_tok", int),
        expert=replace(mlp, ffn=ffn, bias=False),
        shared=SharedExpertConfig(mlp=replace(mlp, ffn=shared * ffn)) if shared else None,
    )


def _groups(settings: Settings, top_k: int, scores: int) -> dict[str, Any]:
    """Router settings that limit the groups of a token's experts. scores: number of best scores of a group to sum."""
    groups, chosen_groups = settings.take("n_group", 1), settings.take("topk_group", 1)
    if chosen_groups >= groups:
        return {}
    group_scores = None if top_k == scores * chosen_groups else scores
    return {"groups": groups, "chosen_groups": chosen_groups, "group_scores": group_scores}


def _write(cfg: Any) -> dict[str, Any]:
    """The settings of both versions."""
    mixer = layers_of(cfg)[0].mixer
    moe, dense, ffn = decoders.feed_forwards(cfg)
    shared = 0 if moe.shared is None else moe.shared.mlp.ffn
    if dense != [*range(len(dense))] or shared % moe.expert.ffn:
        raise ValueError("layers without experts are not the first ones, or shared experts have another width")
    return {
        **decoders.model_settings(cfg, moe.expert),
        "num_attention_heads": mixer.heads,
        "num_key_value_heads": mixer.heads,
        "q_lora_rank": mixer.query_rank,
        **{name: getattr(mixer, field) for field, name in LATENTS.items()},
        "attention_bias": mixer.bias,
        **rope_settings(mixer.rope),
        "intermediate_size": ffn,
        "moe_intermediate_size": moe.expert.ffn,
        "n_routed_experts": moe.experts,
        "n_shared_experts": shared // moe.expert.ffn,
        "num_experts_per_tok": moe.top_k,
        "first_k_dense_replace": len(dense),
        "n_group": moe.router.groups or 1,
        "topk_group": moe.router.chosen_groups or 1,
        "routed_scaling_factor": moe.router.scale,
        "aux_loss_alpha": moe.router.row_loss,
    }


def _write_v2(cfg: Any) -> dict[str, Any]:
    moe, dense, _ = decoders.feed_forwards(cfg)
    mlps = [layers_of(cfg)[0].mlp] if dense else []
    mlps += [] if moe.shared is None else [moe.shared.mlp]
    return {
        **_write(cfg),
        "topk_method": "greedy" if moe.router.groups is None else "group_limited_greedy",
        "mlp_bias": any(mlp.bias for mlp in mlps),
        "norm_topk_prob": False,
    }


def _write_v3(cfg: Any) -> dict[str, Any]:
    mixer = layers_of(cfg)[0].mixer
    return {
        **_write(cfg),
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
        "norm_topk_prob": decoders.feed_forwards(cfg).moe.router.normalise == "chosen",
        "rope_interleave": mixer.rope.interleaved,
        "num_nextn_predict_layers": 0 if cfg.prediction is None else cfg.prediction.depth,
    }


def _rows_v2(cfg: DecoderConfig) -> list[Row]:
    mixer = layers_of(cfg)[0].mixer
    tensor, path, heads = f"{LAYER}.self_attn", "stack.*.mixer", {"n": mixer.heads}
    query = "q_proj" if mixer.query_rank is None else "q_b_proj"
    keys = (f"{path}.down", f"{path}.position_key"), (f"{path}.key", f"{path}.value")
    return [
        *outer_rows(cfg),
        Row(f"{tensor}.{query}.weight", f"{path}.query", "(n h) r -> r n h"),
        *linear(f"{tensor}.q_a_proj", f"{path}.query_down"),
        Row(f"{tensor}.q_a_layernorm.weight", f"{path}.query_norm.gain"),
        Row(f"{tensor}.kv_a_proj_with_mqa.weight", keys[0], "r d -> d r"),
        Row(f"{tensor}.kv_a_proj_with_mqa.bias", (f"{path}.down_bias", f"{path}.position_key_bias")),
        Row(f"{tensor}.kv_a_layernorm.weight", f"{path}.norm.gain"),
        Row(f"{tensor}.kv_b_proj.weight", keys[1], "n h r -> r n h", split="(n h) r -> n h r", axis=1, sizes=heads),
        Row(f"{tensor}.o_proj.weight", f"{path}.output", "d (n h) -> n h d"),
        Row(f"{tensor}.o_proj.bias", f"{path}.output_bias"),
        *NORMS,
        *gated(f"{LAYER}.mlp", "stack.*.mlp"),
        *experts(f"{LAYER}.mlp"),
        *gated(f"{LAYER}.mlp.shared_experts", "stack.*.mlp.shared"),
    ]


def _rows_v3(cfg: DecoderConfig) -> list[Row]:
    """The biases that balance experts are observations in the model here."""
    bias = Row(f"{LAYER}.mlp.gate.e_score_correction_bias", "stack.*.mlp.load.sum", index=(0,))
    table = [*_rows_v2(cfg), bias]
    return table + _prediction_rows(table, cfg, 0 if cfg.prediction is None else cfg.prediction.depth)


def _prediction_rows(rows: Sequence[Row], cfg: DecoderConfig, depth: int) -> list[Row]:
    """Rows of the multi-token prediction blocks, which are numbered after the layers. rows: of the layers."""
    table = []
    for number in range(depth):
        layer, block = f"model.layers.{cfg.stack.layers() + number}", f"predictions.{number}"
        halves = (f"{block}.from_embedding", f"{block}.from_state")
        table += [
            Row(f"{layer}.enorm.weight", f"{block}.embedding_norm.gain"),
            Row(f"{layer}.hnorm.weight", f"{block}.state_norm.gain"),
            Row(f"{layer}.eh_proj.weight", halves, "e d -> d e", axis=1),
            Row(f"{layer}.shared_head.norm.weight", f"{block}.norm.gain"),
        ]
        for row in rows:
            if row.tensor.startswith(LAYER):
                paths = (row.paths,) if isinstance(row.paths, str) else row.paths
                paths = tuple(path.replace("stack.*", f"{block}.block") for path in paths)
                table.append(replace(row, tensor=row.tensor.replace(LAYER, layer), paths=paths))
    return table


def without_missing_blocks(cfg: DecoderConfig, names: Collection[str]) -> DecoderConfig:
    """transformers does not save multi-token prediction blocks, even if config.json declares them."""
    has_blocks = f"model.layers.{cfg.stack.layers()}.eh_proj.weight" in names
    return cfg if has_blocks else replace(cfg, prediction=None)


FAMILIES = [
    decoders.family(
        "deepseek_v2",
        "DeepseekV2ForCausalLM",
        read=_read_v2,
        write=_write_v2,
        rows=_rows_v2,
        unused=UNUSED | {"norm_topk_prob"},  # has no effect in transformers
    ),
    decoders.family(
        "deepseek_v3",
        "DeepseekV3ForCausalLM",
        read=_read_v3,
        write=_write_v3,
        rows=_rows_v3,
        adjusted=without_missing_blocks,
        unused=UNUSED,
        # Copies of the embedding and the head, which prediction blocks share.
        ignored=("model.layers.*.embed_tokens.weight", "model.layers.*.shared_head.head.weight"),
    ),
]
