"""A model config as Megatron-LM's arguments: the reverse of `conversion.model_config` in this folder."""

from collections.abc import Mapping
from typing import Any

from megajax.config.errors import UserError
from megajax.interop.megatron.flags.model import SINKS
from megajax.interop.megatron.flags.moe import LOSSES, SCORES
from megajax.layers.attention.config import AttentionConfig
from megajax.layers.attention.latent_config import LatentAttentionConfig
from megajax.layers.mlp.config import DenseMLPConfig, GatedMLPConfig
from megajax.layers.moe.config import MoEConfig
from megajax.layers.norm.config import IdentityNormConfig, L2NormConfig, LayerNormConfig
from megajax.layers.position.config import Llama3ScalingConfig, RopeConfig, YarnScalingConfig
from megajax.models.bert.config import BertConfig
from megajax.models.decoder.config import DecoderConfig
from megajax.models.t5.config import T5Config


def script_of(model: DecoderConfig) -> str:
    """The script of Megatron-LM that trains this kind of model."""
    if isinstance(model, T5Config):
        return "pretrain_t5.py"
    return "pretrain_bert.py" if isinstance(model, BertConfig) else "pretrain_gpt.py"


def arguments(model: DecoderConfig) -> dict[str, Any]:
    """The arguments of a model whose layers differ only in windows, rotation and experts.

    Settings that have no argument are left out: the caller reads the arguments back and compares. Raises UserError for
    a model that no script of Megatron-LM trains from text.
    """
    if not isinstance(model, DecoderConfig | BertConfig | T5Config):
        raise UserError(f"Megatron-LM's arguments can't express the model: {type(model).__name__} reads no text")
    layers = [block for block, numbers in model.stack.stored() for _ in numbers]
    order = [number for _, numbers in model.stack.stored() for number in numbers]
    blocks = [block for _, block in sorted(zip(order, layers, strict=True), key=lambda pair: pair[0])]
    first = blocks[0].parts()
    mlps = [block.parts().get("mlp") for block in blocks]
    mixtures = [mlp for mlp in mlps if isinstance(mlp, MoEConfig)]
    dense = [mlp for mlp in mlps if mlp is not None and not isinstance(mlp, MoEConfig)]
    feed_forwards = [*dense, *(mixture.expert for mixture in mixtures)]
    return {
        "num_layers": len(blocks),
        "hidden_size": model.hidden,
        "seq_length": model.sequence_length,
        "max_position_embeddings": model.sequence_length,
        "untie_embeddings_and_output_weights": not model.tied,
        "hidden_dropout": model.dropout,
        "position_embedding_type": "learned_absolute" if model.learned_positions else "none",
        "vocab_size": model.vocabulary_size,
        "fp32_residual_connection": model.residual == "float32",
        # Models of plain torch layers may have no norm after the last layer.
        **_norm(blocks[0].norm if isinstance(model.norm, IdentityNormConfig) else model.norm),
        **_mixer(first.get("mixer"), model.hidden),
        **_windows([getattr(block.parts().get("mixer"), "window", None) for block in blocks]),
        **_rotated([getattr(block.parts().get("mixer"), "rope", None) for block in blocks]),
        **(_feed_forward(feed_forwards[0]) if feed_forwards else {}),
        **(_experts(mixtures[0], [isinstance(mlp, MoEConfig) for mlp in mlps]) if mixtures else {}),
        **_model_type_arguments(model),
    }


def _model_type_arguments(model: DecoderConfig) -> dict[str, Any]:
    """The arguments of multi-token prediction, BERT and T5."""
    args: dict[str, Any] = {}
    if model.prediction is not None:
        args |= {"mtp_num_layers": model.prediction.depth, "mtp_loss_scaling_factor": model.prediction.weight}
    if isinstance(model, BertConfig):
        args["bert_binary_head"] = model.next_sentence
    if isinstance(model, T5Config):
        layers = model.encoder.layers()
        args |= {"encoder_num_layers": layers, "num_layers": layers, "decoder_num_layers": model.stack.layers()}
        args |= {"encoder_seq_length": model.encoder_length, "seq_length": model.encoder_length}
        args |= {"decoder_seq_length": model.sequence_length}
        args["max_position_embeddings"] = max(model.encoder_length, model.sequence_length)
        relative = getattr(model.stack.stored()[0][0].parts()["mixer"], "relative", None)
        if relative is not None:
            args |= {
                "position_embedding_type": "relative",
                "relative_attention_num_buckets": relative.buckets,
                "relative_attention_max_distance": relative.distance,
            }
    return args


def _norm(norm: Any) -> dict[str, Any]:
    kind = "LayerNorm" if isinstance(norm, LayerNormConfig) else "RMSNorm"
    epsilon, centred = getattr(norm, "epsilon", 1e-5), getattr(norm, "zero_centred", False)
    return {"normalization": kind, "norm_epsilon": epsilon, "apply_layernorm_1p": centred}


def _mixer(mixer: Any, hidden: int) -> dict[str, Any]:
    sinks = {sink: softmax_type for softmax_type, sink in SINKS.items()}
    if isinstance(mixer, LatentAttentionConfig):
        return {
            "multi_latent_attention": True,
            "num_attention_heads": mixer.heads,
            "q_lora_rank": mixer.query_rank,
            "kv_lora_rank": mixer.key_value_rank,
            "qk_head_dim": mixer.content_dim,
            "qk_pos_emb_head_dim": mixer.position_dim,
            "v_head_dim": mixer.value_dim,
            "qk_layernorm": mixer.norm is not None,
            "add_bias_linear": mixer.bias,
            "attention_dropout": mixer.dropout,
            "softmax_type": sinks[mixer.sink],
            **_rope(mixer.rope, latent=True),
            "rope_type": "yarn" if isinstance(mixer.rope and mixer.rope.scaling, YarnScalingConfig) else "rope",
        }
    if not isinstance(mixer, AttentionConfig):
        return {}
    return {
        "num_attention_heads": mixer.heads,
        "group_query_attention": mixer.groups() != mixer.heads,
        "num_query_groups": mixer.groups(),
        "kv_channels": mixer.size(hidden),
        "add_bias_linear": mixer.bias,
        "add_qkv_bias": mixer.has_qkv_bias() and not mixer.bias,
        "qk_layernorm": mixer.qk_norm is not None and not isinstance(mixer.qk_norm, L2NormConfig),
        "qk_l2_norm": isinstance(mixer.qk_norm, L2NormConfig),
        "softmax_type": sinks[mixer.sink],
        "attention_output_gate": mixer.gate,
        "softmax_scale": mixer.scale,
        "attention_dropout": mixer.dropout,
        **_rope(mixer.rope),
    }


def _rope(rope: RopeConfig | None, *, latent: bool = False) -> dict[str, Any]:
    if rope is None:
        return {}
    args: dict[str, Any] = {
        "position_embedding_type": "rope",
        "rotary_base": int(rope.base),
        "rotary_percent": rope.fraction,
        "rotary_interleaved": rope.interleaved and not latent,
        "rotary_seq_len_interpolation_factor": None if rope.interpolation == 1 else int(rope.interpolation),
    }
    if isinstance(rope.scaling, Llama3ScalingConfig):
        args |= {"use_rope_scaling": True, "rope_scaling_factor": rope.scaling.factor}
    elif isinstance(rope.scaling, YarnScalingConfig):
        yarn, prefix = rope.scaling, "" if latent else "yarn_"
        args |= {
            "position_embedding_type": "rope" if latent else "yarn",
            "rotary_scaling_factor": yarn.factor,
            f"{prefix}original_max_position_embeddings": yarn.original,
            f"{prefix}beta_fast": yarn.fast,
            f"{prefix}beta_slow": yarn.slow,
            "mscale": yarn.mscale,
            "mscale_all_dim": yarn.mscale_all,
            "yarn_correction_range_round_to_int": yarn.rounded,
        }
    return args


def _windows(sizes: list[int | None]) -> dict[str, Any]:
    """The layers with sliding-window attention, and the size of the window."""
    window = next((size for size in sizes if size is not None), None)
    if window is None:
        return {}
    return {"window_size": (window, 0), "window_attn_skip_freq": [int(size is not None) for size in sizes]}


def _rotated(ropes: list[RopeConfig | None]) -> dict[str, Any]:
    """The layers without rotation, if others have it."""
    if None not in ropes or not any(ropes):
        return {}
    return {"no_rope_freq": [int(rope is None) for rope in ropes], **_rope(next(filter(None, ropes)))}


def _feed_forward(mlp: Any) -> dict[str, Any]:
    args: dict[str, Any] = {"ffn_hidden_size": mlp.ffn, "bias_gelu_fusion": False}
    if isinstance(mlp, GatedMLPConfig):
        quick = mlp.activation == "quick_gelu"
        kinds = {"swiglu": mlp.activation == "silu", "quick_geglu": quick}
        return args | kinds | {"activation_func_clamp_value": mlp.clamp, "glu_linear_offset": mlp.offset}
    assert isinstance(mlp, DenseMLPConfig)
    return args | {"squared_relu": mlp.activation == "squared_relu", "openai_gelu": mlp.activation == "gelu_tanh"}


def _experts(mixture: MoEConfig, has_experts: list[bool]) -> dict[str, Any]:
    router, scores = mixture.router, {setting: megatron_name for megatron_name, setting in SCORES.items()}
    losses: Mapping[str, float] = {
        megatron_name: value for megatron_name, setting in LOSSES.items() if (value := getattr(router, setting))
    }
    shared = mixture.shared
    return {
        "num_experts": mixture.experts,
        "moe_router_topk": mixture.top_k,
        "moe_ffn_hidden_size": mixture.expert.ffn,
        "moe_layer_freq": [int(is_mixture) for is_mixture in has_experts],
        "moe_router_score_function": scores[router.score],
        "moe_router_pre_softmax": router.normalise == "all",
        "moe_router_topk_scaling_factor": None if router.scale == 1 else router.scale,
        "moe_router_num_groups": router.groups,
        "moe_router_group_topk": router.chosen_groups,
        "moe_router_enable_expert_bias": router.balance_rate is not None,
        **({} if router.balance_rate is None else {"moe_router_bias_update_rate": router.balance_rate}),
        "moe_router_load_balancing_type": list(losses) or ["none"],
        "moe_aux_loss_coeff": list(losses.values()) or [0.0],
        "moe_z_loss_coeff": router.z_loss or None,
        "moe_input_jitter_eps": router.jitter or None,
        "moe_shared_expert_intermediate_size": None if shared is None else shared.mlp.ffn,
        "moe_shared_expert_gate": shared is not None and shared.gate,
        "moe_latent_size": mixture.latent,
        "moe_expert_capacity_factor": None if router.capacity is None else router.capacity.factor,
    }
