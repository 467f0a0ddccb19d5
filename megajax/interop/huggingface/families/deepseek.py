"""DeepSeek-V2 and V3, Moonlight, Kimi K2 and GLM-4.7-Flash: latent attention, shared experts, dense layers first.

V2 chooses experts by softmax within the best groups. V3 chooses them by sigmoid with a bias that balances their load,
and has multi-token prediction blocks.
"""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from megajax.interop.huggingface import balanced_experts, decoders
from megajax.interop.huggingface.decoders import LAYER, NORMS, outer_rows
from megajax.interop.huggingface.family import Settings, layers_of, linear
from megajax.interop.huggingface.rotary import rope, rope_settings
from megajax.interop.huggingface.tables import sizes
from megajax.interop.weights.name_mapping import Row
from megajax.layers.attention.latent_config import LatentAttentionConfig
from megajax.layers.mlp.config import GatedMLPConfig
from megajax.layers.moe.config import MoEConfig, RouterConfig
from megajax.layers.norm.config import RMSNormConfig
from megajax.layers.position.config import RopeConfig
from megajax.models.decoder.config import DecoderConfig

LATENT = {"q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}
V2 = sizes(102400, 4096, 11008, 32, 32, None, None, 2048, routed_scaling_factor=1.0) | LATENT
V2 |= {"moe_intermediate_size": 1407, "n_routed_experts": 64, "n_shared_experts": 2}
V3 = sizes(129280, 7168, 18432, 61, 128, None, None, 4096, routed_scaling_factor=2.5) | LATENT
V3 |= {"moe_intermediate_size": 2048, "n_routed_experts": 256, "n_shared_experts": 1, "num_experts_per_tok": 8}
V3 |= {"n_group": 8, "topk_group": 4, "first_k_dense_replace": 3, "num_nextn_predict_layers": 1}
GLM = V3 | sizes(154880, 2048, 10240, 47, 20, None, None, 202752, rms_norm_eps=1e-5, routed_scaling_factor=1.8)
GLM |= {"moe_intermediate_size": 1536, "n_routed_experts": 64, "num_experts_per_tok": 4, "n_group": 1, "topk_group": 1}
GLM |= {"q_lora_rank": 768, "qk_nope_head_dim": 192, "v_head_dim": 256, "first_k_dense_replace": 1}
SARVAM = V3 | sizes(262144, 4096, 16384, 32, 64, None, None, 4096, n_routed_experts=128, first_k_dense_replace=1)
SARVAM |= {"q_lora_rank": None, "n_group": 1, "topk_group": 1, "num_nextn_predict_layers": 0}
YOUTU = sizes(128256, 2048, 6144, 32, 16, None, None, 131072, tie_word_embeddings=True) | LATENT
METHODS = {"greedy": False, "group_limited_greedy": True}
"""topk_method -> whether the experts of a token come from a limited number of groups."""
LATENTS = {"key_value_rank": "kv_lora_rank", "content_dim": "qk_nope_head_dim", "position_dim": "qk_rope_head_dim"}
LATENTS |= {"value_dim": "v_head_dim"}
"""Field of LatentAttentionConfig -> setting in config.json."""
UNUSED = frozenset({
    # Settings that follow from others, and losses and layouts of training.
    "aux_loss_alpha", "ep_size", "head_dim", "moe_layer_freq", "num_key_value_heads", "output_router_logits",
    "qk_head_dim", "router_aux_loss_coef", "scoring_func", "seq_aux",
})  # fmt: skip


def _read_v2(settings: Settings) -> DecoderConfig:
    settings.assume(V2)
    mlp = decoders.gated_mlp(settings, bias=settings.take("mlp_bias", False))
    moe, limited = balanced_experts.experts(settings, mlp), settings.choose("topk_method", "greedy", METHODS)
    groups = balanced_experts.groups(settings, moe.top_k, scores=1)
    scale = settings.need("routed_scaling_factor")
    router = RouterConfig(normalise="all", scale=scale, row_loss=0.001, **(groups if limited else {}))
    return _decoder(settings, mlp, replace(moe, router=router))


def _read_v3(defaults: Mapping[str, Any], by_kinds: bool, settings: Settings) -> DecoderConfig:
    settings.assume(defaults)
    settings.only("topk_method", "noaux_tc")
    mlp = decoders.gated_mlp(settings)
    moe = balanced_experts.balanced(settings, balanced_experts.experts(settings, mlp))
    ahead = balanced_experts.prediction(settings)
    return _decoder(settings, mlp, moe, by_kinds=by_kinds, prediction=ahead)


def _decoder(
    settings: Settings, mlp: GatedMLPConfig, moe: MoEConfig, *, by_kinds: bool = False, **changes: Any
) -> DecoderConfig:
    dense = balanced_experts.dense_layers(settings, by_kinds=by_kinds)
    return decoders.decoder(settings, _mixer(settings), lambda layer: mlp if layer in dense else moe, **changes)


def _mixer(settings: Settings) -> LatentAttentionConfig:
    rotation = rope(settings, settings.peek("max_position_embeddings"))
    rotation = replace(rotation, interleaved=settings.take("rope_interleave", True))
    return latent_attention(settings, rotation, settings.take("attention_bias", False))


def latent_attention(settings: Settings, rotation: RopeConfig | None, bias: bool = False) -> LatentAttentionConfig:
    """The attention of all these families, and of Kimi Linear."""
    return LatentAttentionConfig(
        heads=settings.count("num_attention_heads"),
        query_rank=settings.take("q_lora_rank"),
        **{field: settings.need(name) for field, name in LATENTS.items()},
        bias=bias,
        latent_bias=bias,
        norm=RMSNormConfig(epsilon=1e-6),  # of the latents, which ignore rms_norm_eps
        rope=rotation,
    )


def write_latent(mixer: LatentAttentionConfig) -> dict[str, Any]:
    """The settings of `latent_attention`."""
    return {
        "num_attention_heads": mixer.heads,
        "num_key_value_heads": mixer.heads,
        "q_lora_rank": mixer.query_rank,
        **{name: getattr(mixer, field) for field, name in LATENTS.items()},
        "attention_bias": mixer.bias,
        **rope_settings(mixer.rope),
    }


def _write(cfg: DecoderConfig, experts: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of both versions. experts: those of the experts."""
    mixer, moe = layers_of(cfg)[0].mixer, decoders.feed_forwards(cfg).moe
    return {
        **decoders.model_settings(cfg, moe.expert),
        **write_latent(mixer),
        **experts,
        "aux_loss_alpha": moe.router.row_loss,
    }


def _write_v2(cfg: DecoderConfig) -> dict[str, Any]:
    moe, dense, _ = decoders.feed_forwards(cfg)
    mlps = [layers_of(cfg)[0].mlp] if dense else []
    mlps += [] if moe.shared is None else [moe.shared.mlp]
    return {
        **_write(cfg, balanced_experts.write(cfg)),
        "topk_method": "greedy" if moe.router.groups is None else "group_limited_greedy",
        "mlp_bias": any(mlp.bias for mlp in mlps),
        "norm_topk_prob": False,
    }


def _write_v3(by_kinds: bool, cfg: DecoderConfig) -> dict[str, Any]:
    return {
        **_write(cfg, balanced_experts.write_balanced(cfg, by_kinds=by_kinds)),
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
        "rope_interleave": layers_of(cfg)[0].mixer.rope.interleaved,
    }


def _read_dense(settings: Settings) -> DecoderConfig:
    """Youtu: no experts."""
    settings.assume(YOUTU)
    mlp, mixer = decoders.gated_mlp(settings), _mixer(settings)
    return decoders.decoder(settings, mixer, lambda _: mlp)


def _write_dense(cfg: DecoderConfig) -> dict[str, Any]:
    block = layers_of(cfg)[0]
    rotated = {"rope_interleave": block.mixer.rope.interleaved}
    return {**decoders.model_settings(cfg, block.mlp), **write_latent(block.mixer), **rotated}


def latent_rows(mixer: LatentAttentionConfig) -> list[Row]:
    """The tensors of `latent_attention`."""
    tensor, path, heads = f"{LAYER}.self_attn", "stack.*.mixer", {"n": mixer.heads}
    query = "q_proj" if mixer.query_rank is None else "q_b_proj"
    keys = (f"{path}.down", f"{path}.position_key"), (f"{path}.key", f"{path}.value")
    return [
        Row(f"{tensor}.{query}.weight", f"{path}.query", "(n h) r -> r n h"),
        *linear(f"{tensor}.q_a_proj", f"{path}.query_down"),
        Row(f"{tensor}.q_a_layernorm.weight", f"{path}.query_norm.gain"),
        Row(f"{tensor}.kv_a_proj_with_mqa.weight", keys[0], "r d -> d r"),
        Row(f"{tensor}.kv_a_proj_with_mqa.bias", (f"{path}.down_bias", f"{path}.position_key_bias")),
        Row(f"{tensor}.kv_a_layernorm.weight", f"{path}.norm.gain"),
        Row(f"{tensor}.kv_b_proj.weight", keys[1], "n h r -> r n h", split="(n h) r -> n h r", axis=1, sizes=heads),
        Row(f"{tensor}.o_proj.weight", f"{path}.output", "d (n h) -> n h d"),
        Row(f"{tensor}.o_proj.bias", f"{path}.output_bias"),
    ]


def _rows_v2(cfg: DecoderConfig) -> list[Row]:
    return [*outer_rows(cfg), *latent_rows(layers_of(cfg)[0].mixer), *NORMS, *balanced_experts.rows()]


def _rows_v3(cfg: DecoderConfig) -> list[Row]:
    return balanced_experts.with_prediction([*_rows_v2(cfg), balanced_experts.BIAS], cfg)


FAMILIES = [
    decoders.family(
        "deepseek_v2",
        "DeepseekV2ForCausalLM",
        read=_read_v2,
        write=_write_v2,
        rows=_rows_v2,
        unused=UNUSED | {"norm_topk_prob"},  # has no effect in transformers
    ),
] + [
    decoders.family(
        name,
        architecture,
        other_types=other_types,
        read=partial(_read_v3, defaults, by_kinds),
        write=partial(_write_v3, by_kinds),
        rows=_rows_v3,
        adjusted=balanced_experts.without_missing_blocks,
        unused=UNUSED,
        ignored=balanced_experts.COPIES,
    )
    for name, architecture, other_types, defaults, by_kinds in (
        ("deepseek_v3", "DeepseekV3ForCausalLM", ("kimi_k2",), V3, False),
        ("glm4_moe_lite", "Glm4MoeLiteForCausalLM", (), GLM, True),
        ("sarvam_mla", "DeepseekV3ForCausalLM", (), SARVAM, False),
    )
] + [
    decoders.family(
        "youtu", "YoutuForCausalLM", read=_read_dense, write=_write_dense, rows=_rows_v2,
        unused=UNUSED | {"embedding_initializer_range", "mlp_bias"},
    )
]  # fmt: skip
