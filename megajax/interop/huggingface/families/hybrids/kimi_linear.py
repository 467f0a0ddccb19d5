"""Kimi Linear: gated delta nets that decay by channel, latent attention without rotation, DeepSeek's experts."""

from collections.abc import Sequence
from typing import Any

from megajax.checkpoint.weights.name_mapping import Row
from megajax.interop.huggingface import balanced_experts, decoders
from megajax.interop.huggingface.decoders import LAYER, NORMS, experts, gated, outer_rows
from megajax.interop.huggingface.families.deepseek import LATENTS
from megajax.interop.huggingface.family import Names, Settings, layers_of, to_settings
from megajax.interop.huggingface.rotary import FULL
from megajax.layers.attention.latent_config import LatentAttentionConfig
from megajax.layers.delta.config import KimiDeltaConfig
from megajax.layers.norm.config import RMSNormConfig
from megajax.models.decoder.config import DecoderConfig

DEFAULTS = {
    **{"vocab_size": 163840, "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 27},
    **{"num_attention_heads": 32, "rms_norm_eps": 1e-5, "max_position_embeddings": 1048576},
    **{"kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128},
    **{"moe_intermediate_size": 1024, "n_routed_experts": 256, "num_experts_per_tok": 8, "n_shared_experts": 1},
    **{"routed_scaling_factor": 2.446, "num_nextn_predict_layers": 0},
}
PUBLISHED = {
    "model_max_length": "max_position_embeddings",
    "moe_renormalize": "norm_topk_prob",
    "num_expert_group": "n_group",
    "num_experts": "n_routed_experts",
    "num_experts_per_token": "num_experts_per_tok",
    "num_shared_experts": "n_shared_experts",
}
"""Settings of config.json by the names that DeepSeek's experts have here."""
DELTA: Names = {
    "heads": ("linear_num_heads", 32),
    "head_dim": ("linear_head_dim", 128),
    "conv_kernel": ("linear_conv_kernel_dim", 4),
}
IN_A_FOLDER = {"num_heads": "linear_num_heads", "head_dim": "linear_head_dim"}
IN_A_FOLDER |= {"short_conv_kernel_size": "linear_conv_kernel_dim"}
"""Settings of the published linear_attn_config -> those of transformers."""
LINEAR = "linear_attention"


def _kinds(settings: Settings) -> list[str]:
    """The type of each layer. The published config.json counts layers from 1."""
    layers, published = settings.peek("num_hidden_layers"), settings.take("linear_attn_config", {}, kind=dict)
    for name, of_transformers in IN_A_FOLDER.items():
        if name in published:
            settings.remaining[of_transformers] = published[name]
    full = published.get("full_attn_layers")
    if full is None:
        return decoders.layer_types(settings, layers, LINEAR, lambda layer: layer == 0 or layer % 4 > 0)
    if sorted([*full, *published.get("kda_layers", ())]) != [*range(1, layers + 1)]:
        settings.refuse("linear_attn_config", published, f"its lists must have each of {layers} layers once, from 1")
    settings.remaining.pop("layer_types", None)
    return [FULL if layer + 1 in full else LINEAR for layer in range(layers)]


def _read(settings: Settings) -> DecoderConfig:
    for published, name in PUBLISHED.items():
        if published in settings.remaining:
            settings.remaining[name] = settings.remaining.pop(published)
    settings.assume(DEFAULTS)
    settings.only("mla_use_nope", True)
    settings.only("moe_router_activation_func", "sigmoid")
    settings.only("attention_bias", False)
    kinds, dense = _kinds(settings), balanced_experts.dense_layers(settings, 1)
    mlp, epsilon = decoders.gated_mlp(settings), settings.peek("rms_norm_eps")
    if mlp.activation != "silu":
        settings.refuse("hidden_act", mlp.activation, "only silu is supported, which convolutions have too")
    moe = balanced_experts.balanced(settings, balanced_experts.experts(settings, mlp))
    sizes = settings.fields(DELTA)
    delta = KimiDeltaConfig(**sizes, key_dim=sizes["head_dim"], norm_epsilon=epsilon)
    attention = LatentAttentionConfig(
        heads=settings.count("num_attention_heads"),
        query_rank=settings.take("q_lora_rank"),
        **{field: settings.need(name) for field, name in LATENTS.items()},
        norm=RMSNormConfig(epsilon=1e-6),  # of the latents, which ignore rms_norm_eps
        rope=None,
    )
    return decoders.decoder(
        settings,
        [delta if kind == LINEAR else attention for kind in kinds],
        lambda layer: mlp if layer < dense else moe,
        prediction=balanced_experts.prediction(settings),
    )


def _write(cfg: Any) -> dict[str, Any]:
    mixers, moe = [block.mixer for block in layers_of(cfg)], decoders.feed_forwards(cfg).moe
    delta = next((mixer for mixer in mixers if isinstance(mixer, KimiDeltaConfig)), None)
    latent = next((mixer for mixer in mixers if isinstance(mixer, LatentAttentionConfig)), None)
    if delta is None or latent is None:
        raise ValueError("the layers are not both gated delta nets that decay by channel and latent attention")
    settings: dict[str, Any] = {**decoders.model_settings(cfg, moe.expert), **balanced_experts.write_balanced(cfg)}
    settings["mlp_layer_types"] = balanced_experts.layer_types(settings.pop("first_k_dense_replace"), len(mixers))
    theirs = {name: published for published, name in PUBLISHED.items()}
    return {
        **{theirs.get(name, name): value for name, value in settings.items()},
        "num_attention_heads": latent.heads,
        "num_key_value_heads": latent.heads,
        "q_lora_rank": latent.query_rank,
        **{name: getattr(latent, field) for field, name in LATENTS.items()},
        **to_settings(delta, DELTA),
        "layer_types": [LINEAR if isinstance(mixer, KimiDeltaConfig) else FULL for mixer in mixers],
    }


def _mixer_rows(names: Sequence[str], tensors: Sequence[str], pattern: str, requires: str, end: str) -> list[Row]:
    rows = zip(names, tensors, strict=True)
    return [Row(f"{LAYER}.self_attn.{t}{end}", f"stack.*.mixer.{n}", pattern, requires=requires) for n, t in rows]


def _rows(cfg: DecoderConfig) -> list[Row]:
    latent = next((block.mixer for block in layers_of(cfg) if isinstance(block.mixer, LatentAttentionConfig)), None)
    tensor, path, moe = f"{LAYER}.self_attn", "stack.*.mixer", f"{LAYER}.block_sparse_moe"
    rate, parts = f"{path}.a_log", {"n": 1 if latent is None else latent.heads}
    keys, values = (f"{path}.down", f"{path}.position_key"), (f"{path}.key", f"{path}.value")
    query = "q_b_proj" if latent is not None and latent.query_rank is not None else "q_proj"
    projected = [f"{name}_proj" for name in "qkv"]
    return [
        *outer_rows(cfg),
        *_mixer_rows(("in_q", "in_k", "in_v"), projected, "(n h) d -> d n h", rate, ".weight"),
        *_mixer_rows(
            [f"conv_{name}.kernel" for name in "qkv"],
            [f"{name}_conv1d" for name in "qkv"],
            "(n h) 1 k -> k n h",
            rate,
            ".weight",
        ),
        *_mixer_rows(("a_down", "z_down"), ("f_a_proj", "g_a_proj"), "r d -> d r", rate, ".weight"),
        *_mixer_rows(("a_up", "z_up"), ("f_b_proj", "g_b_proj"), "(n h) r -> r n h", rate, ".weight"),
        *_mixer_rows(("in_b",), ("b_proj",), "n d -> d n", rate, ".weight"),
        *_mixer_rows(("dt_bias",), ("dt_bias",), "(n h) -> n h", rate, ""),
        *_mixer_rows(("a_log",), ("A_log",), "1 1 n 1 -> n", rate, ""),
        *_mixer_rows(("norm_gain",), ("o_norm",), "", rate, ".weight"),
        Row(f"{tensor}.{query}.weight", f"{path}.query", "(n h) r -> r n h"),
        Row(f"{tensor}.q_a_proj.weight", f"{path}.query_down", "r d -> d r"),
        Row(f"{tensor}.q_a_layernorm.weight", f"{path}.query_norm.gain"),
        Row(f"{tensor}.kv_a_proj_with_mqa.weight", keys, "r d -> d r"),
        Row(f"{tensor}.kv_a_layernorm.weight", f"{path}.norm.gain"),
        Row(f"{tensor}.kv_b_proj.weight", values, "n h r -> r n h", split="(n h) r -> n h r", axis=1, sizes=parts),
        Row(f"{tensor}.o_proj.weight", f"{path}.output", "d (n h) -> n h d"),
        *NORMS,
        *gated(f"{LAYER}.mlp", "stack.*.mlp"),
        *experts(moe, ("w1", "w3", "w2")),
        *gated(f"{moe}.shared_experts", "stack.*.mlp.shared"),
        Row(f"{moe}.gate.e_score_correction_bias", "stack.*.mlp.load.sum", index=(0,)),
    ]


FAMILIES = [
    decoders.family(
        "kimi_linear",
        "KimiLinearForCausalLM",
        read=_read,
        write=_write,
        rows=_rows,
        unused=frozenset({
            # Settings that follow from others, and positions that no layer has.
            "head_dim", "qk_head_dim", "num_key_value_heads", "moe_layer_freq", "use_grouped_topk", "rope_theta",
            "rope_scaling", "rope_parameters", "output_router_logits", "auto_map",
        }),
    )
]  # fmt: skip
