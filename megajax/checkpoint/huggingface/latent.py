"""What the versions of DeepSeek share: latent attention, shared experts, first layers without experts."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from megajax.checkpoint.huggingface import decoders
from megajax.checkpoint.huggingface.decoders import LAYER, NORMS, ends, experts, gated
from megajax.checkpoint.huggingface.family import Settings
from megajax.checkpoint.huggingface.rotary import rope, rope_settings
from megajax.checkpoint.huggingface.rows import linear
from megajax.checkpoint.weights.tensor_table import Row
from megajax.layers.config import (
    BlockConfig,
    GatedMLPConfig,
    LatentAttentionConfig,
    MoEConfig,
    RMSNormConfig,
    SharedExpertConfig,
)
from megajax.models.config import DecoderConfig

LATENT_NORM = RMSNormConfig(epsilon=1e-6)
"""Of the latents, whatever rms_norm_eps says."""
UNUSED = frozenset({
    # What follows from others, and losses and layouts of training.
    "aux_loss_alpha", "ep_size", "head_dim", "moe_layer_freq", "num_key_value_heads", "output_router_logits",
    "qk_head_dim", "router_aux_loss_coef", "scoring_func", "seq_aux",
})  # fmt: skip


def blocks(given: Settings, length: int, mlp: GatedMLPConfig, moe: MoEConfig) -> list[BlockConfig]:
    """The layers, the first of which have an MLP."""
    layers, norm = given.layers(), RMSNormConfig(epsilon=given.need("rms_norm_eps"))
    block, dense = (
        BlockConfig(mixer=attention(given, length), mlp=moe, norm=norm),
        given.take("first_k_dense_replace", 0),
    )
    return [replace(block, mlp=mlp) if layer < dense else block for layer in range(layers)]


def attention(given: Settings, length: int) -> LatentAttentionConfig:
    """Latent attention."""
    bias = given.take("attention_bias", False)
    return LatentAttentionConfig(
        heads=given.count("num_attention_heads"),
        query_rank=given.take("q_lora_rank"),
        key_value_rank=given.need("kv_lora_rank"),
        content_dim=given.need("qk_nope_head_dim"),
        position_dim=given.need("qk_rope_head_dim"),
        value_dim=given.need("v_head_dim"),
        bias=bias,
        latent_bias=bias,
        norm=LATENT_NORM,
        rope=replace(rope(given, length), interleaved=given.take("rope_interleave", True)),
    )


def mixture(given: Settings, mlp: GatedMLPConfig) -> MoEConfig:
    """The experts, with a router to be replaced. mlp: of layers without experts."""
    ffn, shared = given.need("moe_intermediate_size"), given.take("n_shared_experts", 0)
    return MoEConfig(
        experts=given.need("n_routed_experts"),
        top_k=given.need("num_experts_per_tok", int),
        expert=replace(mlp, ffn=ffn, bias=False),
        shared=SharedExpertConfig(mlp=replace(mlp, ffn=shared * ffn)) if shared else None,
    )


def groups(given: Settings, top_k: int, scores: int) -> dict[str, Any]:
    """Groups that a token's experts are from. scores: how many best scores of a group are summed."""
    number, chosen = given.take("n_group", 1), given.take("topk_group", 1)
    if chosen >= number:
        return {}
    summed = None if top_k == scores * chosen else scores
    return {"groups": number, "chosen_groups": chosen, "group_scores": summed}


def settings_of(cfg: DecoderConfig, kind: str, architecture: str) -> dict[str, Any]:
    """What config.json says of both versions."""
    mixer, (moe, dense, ffn) = decoders.layers_of(cfg)[0].mixer, decoders.mixture_of(cfg)
    shared = 0 if moe.shared is None else moe.shared.mlp.ffn
    if dense != [*range(len(dense))] or shared % moe.expert.ffn:
        raise ValueError("layers without experts are not the first, or shared experts are not as wide as others")
    return {
        **decoders.settings_of(cfg, kind, architecture),
        **decoders.activation_setting(moe.expert),
        "num_attention_heads": mixer.heads,
        "num_key_value_heads": mixer.heads,
        "q_lora_rank": mixer.query_rank,
        "kv_lora_rank": mixer.key_value_rank,
        "qk_nope_head_dim": mixer.content_dim,
        "qk_rope_head_dim": mixer.position_dim,
        "v_head_dim": mixer.value_dim,
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
    }


def rows(cfg: DecoderConfig) -> list[Row]:
    """The table of both versions."""
    mixer = decoders.layers_of(cfg)[0].mixer
    theirs, ours, heads = f"{LAYER}.self_attn", "stack.*.mixer", {"n": mixer.heads}
    query = "q_proj" if mixer.query_rank is None else "q_b_proj"
    keys = (f"{ours}.down", f"{ours}.position_key"), (f"{ours}.key", f"{ours}.value")
    return [
        *ends(cfg),
        Row(f"{theirs}.{query}.weight", f"{ours}.query", "(n h) r -> r n h"),
        *linear(f"{theirs}.q_a_proj", f"{ours}.query_down"),
        Row(f"{theirs}.q_a_layernorm.weight", f"{ours}.query_norm.gain"),
        Row(f"{theirs}.kv_a_proj_with_mqa.weight", keys[0], "r d -> d r"),
        Row(f"{theirs}.kv_a_proj_with_mqa.bias", (f"{ours}.down_bias", f"{ours}.position_key_bias")),
        Row(f"{theirs}.kv_a_layernorm.weight", f"{ours}.norm.gain"),
        Row(f"{theirs}.kv_b_proj.weight", keys[1], "n h r -> r n h", cut="(n h) r -> n h r", axis=1, sizes=heads),
        Row(f"{theirs}.o_proj.weight", f"{ours}.output", "d (n h) -> n h d"),
        Row(f"{theirs}.o_proj.bias", f"{ours}.output_bias"),
        *NORMS,
        *gated(f"{LAYER}.mlp", "stack.*.mlp"),
        *experts(f"{LAYER}.mlp"),
        *gated(f"{LAYER}.mlp.shared_experts", "stack.*.mlp.shared"),
    ]


def further(rows: Sequence[Row], cfg: DecoderConfig, depth: int) -> list[Row]:
    """The table of blocks that predict further tokens, which are numbered behind the layers. rows: of all."""
    made = []
    for number in range(depth):
        layer, ours = f"model.layers.{cfg.stack.layers() + number}", f"predictions.{number}"
        halves = (f"{ours}.from_embedding", f"{ours}.from_state")
        made += [
            Row(f"{layer}.enorm.weight", f"{ours}.embedding_norm.gain"),
            Row(f"{layer}.hnorm.weight", f"{ours}.state_norm.gain"),
            Row(f"{layer}.eh_proj.weight", halves, "e d -> d e", axis=1),
            Row(f"{layer}.shared_head.norm.weight", f"{ours}.norm.gain"),
        ]
        for row in rows:
            if row.theirs.startswith(LAYER):
                paths = (row.ours,) if isinstance(row.ours, str) else row.ours
                paths = tuple(path.replace("stack.*", f"{ours}.block") for path in paths)
                made.append(replace(row, theirs=row.theirs.replace(LAYER, layer), ours=paths))
    return made
