"""DeepSeek-V3: experts by sigmoid with a bias that balances them, and blocks that predict further tokens."""

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

from megajax.checkpoint.huggingface import decoders, latent
from megajax.checkpoint.huggingface.decoders import LAYER
from megajax.checkpoint.huggingface.family import Settings
from megajax.checkpoint.weights.tensor_table import Row
from megajax.layers.config import RouterConfig
from megajax.models.config import DecoderConfig, PredictionConfig

DEFAULTS: Mapping[str, Any] = {
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
    "rms_norm_eps": 1e-6,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "routed_scaling_factor": 2.5,
    "num_nextn_predict_layers": 1,
}


def model(given: Settings) -> DecoderConfig:
    """The model of a config.json."""
    given.assume(DEFAULTS)
    given.only("topk_method", "noaux_tc")
    length, mlp = given.need("max_position_embeddings"), decoders.gated_mlp(given)
    moe, normalised = latent.mixture(given, mlp), given.take("norm_topk_prob", True)
    if normalised and moe.top_k == 1:
        given.refuse("num_experts_per_tok", 1, "with norm_topk_prob, ours weighs a single expert by its score, not 1")
    router = RouterConfig(
        score="sigmoid",
        normalise="chosen" if normalised else "all",
        scale=given.need("routed_scaling_factor"),
        balance_rate=0.001,
        row_loss=0.0001,
        **latent.groups(given, moe.top_k, scores=2),
    )
    blocks, depth = (
        latent.blocks(given, length, mlp, replace(moe, router=router)),
        given.need("num_nextn_predict_layers"),
    )
    prediction = PredictionConfig(depth=depth, weight=0.3) if depth else None
    return decoders.decoder(given, blocks, length, prediction=prediction)


def settings(cfg: DecoderConfig) -> dict[str, Any]:
    """The config.json of a model."""
    moe, _, _ = decoders.mixture_of(cfg)
    return {
        **latent.settings_of(cfg, "deepseek_v3", "DeepseekV3ForCausalLM"),
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
        "norm_topk_prob": moe.router.normalise == "chosen",
        "rope_interleave": decoders.layers_of(cfg)[0].mixer.rope.interleaved,
        "num_nextn_predict_layers": 0 if cfg.prediction is None else cfg.prediction.depth,
        "aux_loss_alpha": moe.router.row_loss,
    }


def rows(cfg: DecoderConfig) -> list[Row]:
    """The table. The biases that balance experts are observations of ours."""
    bias = Row(f"{LAYER}.mlp.gate.e_score_correction_bias", "stack.*.mlp.load.sum", inside=(0,))
    table = [*latent.rows(cfg), bias]
    return table + latent.further(table, cfg, 0 if cfg.prediction is None else cfg.prediction.depth)


def adjusted(cfg: DecoderConfig, names: Collection[str]) -> DecoderConfig:
    """transformers saves no blocks that predict further tokens, whatever config.json says of them."""
    there = f"model.layers.{cfg.stack.layers()}.eh_proj.weight" in names
    return cfg if there else replace(cfg, prediction=None)


FAMILIES = [
    decoders.family(
        "deepseek_v3",
        model=model,
        settings=settings,
        rows=rows,
        adjusted=adjusted,
        unused=latent.UNUSED,
        # Copies of the tables, which blocks that predict further tokens share.
        ignored=("model.layers.*.embed_tokens.weight", "model.layers.*.shared_head.head.weight"),
    )
]
