"""GLM-4.5: DeepSeek-V3's experts with grouped queries, of which half of each head is rotated."""

from typing import Any

from megajax.checkpoint.weights.name_mapping import Row
from megajax.interop.huggingface import balanced_experts, decoders
from megajax.interop.huggingface.decoders import ATTENTION, outer_rows
from megajax.interop.huggingface.family import Settings, layers_of
from megajax.layers.norm.config import RMSNormConfig
from megajax.models.decoder.config import DecoderConfig

DEFAULTS = {
    "hidden_size": 4096,
    "num_hidden_layers": 46,
    "num_attention_heads": 96,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-5,
    "vocab_size": 151552,
    "intermediate_size": 10944,
    "moe_intermediate_size": 1408,
    "max_position_embeddings": 131072,
    "partial_rotary_factor": 0.5,
    "n_routed_experts": 128,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 1.0,
    "num_nextn_predict_layers": 1,
}


def _read(settings: Settings) -> DecoderConfig:
    settings.assume(DEFAULTS)
    normalised, epsilon = settings.take("use_qk_norm", False), settings.peek("rms_norm_eps")
    mixer = decoders.attention(
        settings,
        partial=True,
        qkv_bias=True if settings.take("attention_bias", False) else None,
        qk_norm=RMSNormConfig(epsilon=epsilon) if normalised else None,
    )
    mlp, dense = decoders.gated_mlp(settings), settings.need("first_k_dense_replace", int)
    moe = balanced_experts.balanced(settings, balanced_experts.experts(settings, mlp))
    prediction = balanced_experts.prediction(settings)
    return decoders.decoder(settings, mixer, lambda layer: mlp if layer < dense else moe, prediction=prediction)


def _write(cfg: Any) -> dict[str, Any]:
    mixer = layers_of(cfg)[0].mixer
    return {
        **decoders.write(cfg, moe=decoders.feed_forwards(cfg).moe),
        **balanced_experts.write_balanced(cfg),
        "attention_bias": mixer.has_qkv_bias(),
        "use_qk_norm": mixer.qk_norm is not None,
        "partial_rotary_factor": mixer.rope.fraction,
    }


def _rows(cfg: DecoderConfig) -> list[Row]:
    return balanced_experts.balanced_rows([*outer_rows(cfg), *ATTENTION, *balanced_experts.rows()], cfg)


FAMILIES = [
    decoders.family(
        "glm4_moe",
        "Glm4MoeForCausalLM",
        read=_read,
        write=_write,
        rows=_rows,
        adjusted=balanced_experts.without_missing_blocks,
        unused=frozenset({"output_router_logits", "router_aux_loss_coef"}),
        ignored=balanced_experts.COPIES,
    )
]
