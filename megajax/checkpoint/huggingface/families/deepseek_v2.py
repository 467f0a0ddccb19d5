"""DeepSeek-V2: experts by softmax, within the groups of the best ones."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from megajax.checkpoint.huggingface import decoders, latent
from megajax.checkpoint.huggingface.family import Settings
from megajax.layers.config import RouterConfig
from megajax.models.config import DecoderConfig

DEFAULTS: Mapping[str, Any] = {
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
METHODS = {"greedy": False, "group_limited_greedy": True}
"""Whether a token's experts are from some groups only."""


def model(given: Settings) -> DecoderConfig:
    """The model of a config.json."""
    given.assume(DEFAULTS)
    length = given.need("max_position_embeddings")
    mlp = decoders.gated_mlp(given, bias=given.take("mlp_bias", False))
    moe, limited = latent.mixture(given, mlp), given.choose("topk_method", "greedy", METHODS)
    groups = latent.groups(given, moe.top_k, scores=1)
    router = RouterConfig(
        normalise="all", scale=given.need("routed_scaling_factor"), row_loss=0.001, **(groups if limited else {})
    )
    return decoders.decoder(given, latent.blocks(given, length, mlp, replace(moe, router=router)), length)


def settings(cfg: DecoderConfig) -> dict[str, Any]:
    """The config.json of a model."""
    moe, dense, _ = decoders.mixture_of(cfg)
    mlps = [decoders.layers_of(cfg)[0].mlp] * bool(dense) + ([] if moe.shared is None else [moe.shared.mlp])
    return {
        **latent.settings_of(cfg, "deepseek_v2", "DeepseekV2ForCausalLM"),
        "topk_method": "greedy" if moe.router.groups is None else "group_limited_greedy",
        "mlp_bias": any(mlp.bias for mlp in mlps),
        "norm_topk_prob": False,
        "aux_loss_alpha": moe.router.row_loss,
    }


FAMILIES = [
    decoders.family(
        "deepseek_v2",
        model=model,
        settings=settings,
        rows=latent.rows,
        # The last has no effect there.
        unused=latent.UNUSED | {"norm_topk_prob"},
    )
]
