"""Kimi Linear: gated delta nets that decay by channel, latent attention without rotation, DeepSeek's experts."""

from typing import Any

from megajax.interop.huggingface import balanced_experts, decoders
from megajax.interop.huggingface.decoders import LAYER, NORMS, outer_rows
from megajax.interop.huggingface.families.deepseek import LATENT, latent_attention, latent_rows, write_latent
from megajax.interop.huggingface.family import Names, Settings, layers_of, to_settings
from megajax.interop.huggingface.rotary import FULL, LINEAR
from megajax.interop.huggingface.tables import renamed, sizes
from megajax.interop.weights.name_mapping import Row
from megajax.layers.attention.latent_config import LatentAttentionConfig
from megajax.layers.delta.config import KimiDeltaConfig
from megajax.models.decoder.config import DecoderConfig

DEFAULTS = sizes(163840, 2304, 9216, 27, 32, None, None, 1048576, rms_norm_eps=1e-5, routed_scaling_factor=2.446)
DEFAULTS |= {"moe_intermediate_size": 1024, "n_routed_experts": 256, "num_experts_per_tok": 8, "n_shared_experts": 1}
DEFAULTS |= LATENT | {"q_lora_rank": None, "num_nextn_predict_layers": 0}
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
    settings.rename(PUBLISHED)
    settings.assume(DEFAULTS)
    settings.remaining["tie_word_embeddings"] = False  # transformers never ties the head of this class
    settings.only("mla_use_nope", True)
    settings.only("moe_router_activation_func", "sigmoid")
    settings.only("attention_bias", False)
    settings.only("hidden_act", "silu", "swish")  # which convolutions have too
    kinds, dense = _kinds(settings), balanced_experts.dense_layers(settings, 1, by_kinds=True)
    mlp, epsilon = decoders.gated_mlp(settings), settings.peek("rms_norm_eps")
    moe = balanced_experts.balanced(settings, balanced_experts.experts(settings, mlp))
    sizes = settings.fields(DELTA)
    delta = KimiDeltaConfig(**sizes, key_dim=sizes["head_dim"], norm_epsilon=epsilon)
    attention = latent_attention(settings, None)
    return decoders.decoder(
        settings,
        [delta if kind == LINEAR else attention for kind in kinds],
        lambda layer: mlp if layer in dense else moe,
        prediction=balanced_experts.prediction(settings),
    )


def _write(cfg: DecoderConfig) -> dict[str, Any]:
    mixers, moe = [block.mixer for block in layers_of(cfg)], decoders.feed_forwards(cfg).moe
    delta = next((mixer for mixer in mixers if isinstance(mixer, KimiDeltaConfig)), None)
    latent = next((mixer for mixer in mixers if isinstance(mixer, LatentAttentionConfig)), None)
    if delta is None or latent is None:
        raise ValueError("the layers are not both gated delta nets that decay by channel and latent attention")
    experts = balanced_experts.write_balanced(cfg, by_kinds=True)
    settings: dict[str, Any] = {**decoders.model_settings(cfg, moe.expert), **experts}
    theirs = {name: published for published, name in PUBLISHED.items()}
    return {
        **{theirs.get(name, name): value for name, value in settings.items()},
        **write_latent(latent),
        **to_settings(delta, DELTA),
        "layer_types": [LINEAR if isinstance(mixer, KimiDeltaConfig) else FULL for mixer in mixers],
    }


OF_DELTA = {
    **{f"{name}_proj.weight": (f"in_{name}", "(n h) d -> d n h") for name in "qkv"},
    **{f"{name}_conv1d.weight": (f"conv_{name}.kernel", "(n h) 1 k -> k n h") for name in "qkv"},
    **{f"{tensor}_a_proj.weight": (f"{name}_down", "r d -> d r") for tensor, name in (("f", "a"), ("g", "z"))},
    **{f"{tensor}_b_proj.weight": (f"{name}_up", "(n h) r -> r n h") for tensor, name in (("f", "a"), ("g", "z"))},
    "b_proj.weight": ("in_b", "n d -> d n"),
    "dt_bias": ("dt_bias", "(n h) -> n h"),
    "A_log": ("a_log", "1 1 n 1 -> n"),
    "o_norm.weight": ("norm_gain", ""),
}
"""Tensor of a gated delta net -> weight, and the pattern from the one to the other."""
EXPERTS = {"mlp.experts": "block_sparse_moe.experts", "mlp.shared": "block_sparse_moe.shared"}
EXPERTS |= {"mlp.gate.": "block_sparse_moe.gate."}
MATRICES = {f"mlp.experts.{{expert}}.{name}_proj": f"block_sparse_moe.experts.{{expert}}.{name_here}"
            for name, name_here in (("gate", "w1"), ("up", "w3"), ("down", "w2"))}  # fmt: skip


def _rows(cfg: DecoderConfig) -> list[Row]:
    latent = (block.mixer for block in layers_of(cfg) if isinstance(block.mixer, LatentAttentionConfig))
    tensor, path = f"{LAYER}.self_attn", "stack.*.mixer"
    return [
        *outer_rows(cfg),
        *(Row(f"{tensor}.{name}", f"{path}.{name_here}", pattern, requires=f"{path}.a_log")
          for name, (name_here, pattern) in OF_DELTA.items()),
        *latent_rows(next(latent, LatentAttentionConfig(heads=1))),
        *NORMS,
        *renamed([*balanced_experts.rows(), balanced_experts.BIAS], EXPERTS | MATRICES),
    ]  # fmt: skip


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
