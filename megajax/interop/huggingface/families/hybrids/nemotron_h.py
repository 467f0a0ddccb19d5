"""Nemotron-H: Mamba-2, attention without positions, and MLPs, each a layer, in any order.

Nemotron 3 (Nano and Super) has layers with experts, chosen as DeepSeek-V3's. An expert is an MLP of two matrices; in
Super, the experts read and write a narrower latent of the token, but not the router and the shared expert.
"""

from collections.abc import Mapping
from dataclasses import replace
from math import inf
from typing import Any

from megajax.interop.huggingface import balanced_experts
from megajax.interop.huggingface.families.hybrids.mamba import (
    KINDS,
    LAYER,
    MAMBA2,
    MAMBA2_ROWS,
    RENAMED,
    letter,
    model_settings,
    of_hybrids,
    outer_rows,
    pattern,
)
from megajax.interop.huggingface.family import (
    Family,
    Names,
    Settings,
    activation_name,
    attention,
    layers_of,
    linear,
    norm,
    to_settings,
)
from megajax.interop.weights.name_mapping import Row
from megajax.layers.attention.config import AttentionConfig
from megajax.layers.block.config import BlockConfig
from megajax.layers.mamba.config import Mamba2Config
from megajax.layers.mlp.config import DenseMLPConfig
from megajax.layers.moe.config import MoEConfig, SharedExpertConfig
from megajax.layers.norm.config import RMSNormConfig
from megajax.layers.stack.config import stack_of
from megajax.models.decoder.config import DecoderConfig

UNUSED = frozenset({
    "attention_bias", "expand", "hidden_dropout", "mamba_proj_bias", "mamba_ssm_cache_dtype", "mtp_*",
    "num_hidden_layers", "num_logits_to_keep", "num_query_groups", "rescale_prenorm_residual", "rms_norm_eps",
    "sliding_window", "tie_word_embeddings", "time_step_limit", "use_mamba_kernels",
    # Of experts, in models without them, and of blocks that predict further tokens, which transformers does not read.
    "moe_*", "n_*", "norm_topk_prob", "num_experts_per_tok", "routed_scaling_factor", "topk_group",
    "num_nextn_predict_layers", "output_router_logits",
})  # fmt: skip
"""About initial values, experts, and what transformers does not read."""
MAMBA: Names = {
    **MAMBA2,
    "heads": ("mamba_num_heads", 128),
    "head_dim": ("mamba_head_dim", 64),
    "state": ("ssm_state_size", 128),
    "chunk": ("chunk_size", 128),
}
HEADS: Names = {"heads": ("num_attention_heads", 32), "kv_heads": ("num_key_value_heads", 8)}
ATTENTION: Names = {**HEADS, "head_dim": ("head_dim", 128)}
MLP: Names = {"ffn": ("intermediate_size", 21504), "bias": ("mlp_bias", False)}
EXPERTS: Mapping[str, Any] = {
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 7688,
    "moe_shared_expert_intermediate_size": 7688,
    "routed_scaling_factor": 1.0,
}
LEAST_STEP = 1e-9
"""time_step_min for no lower bound: transformers takes its logarithm."""


def _read(settings: Settings) -> DecoderConfig:
    settings.only("mamba_hidden_act", "silu", "swish")
    mamba = Mamba2Config(**settings.fields(MAMBA))
    # transformers keeps steps above time_step_min, whatever time_step_limit says.
    mamba = replace(mamba, dt_limit=(0.0 if mamba.dt_min <= LEAST_STEP else mamba.dt_min, inf))
    attention = AttentionConfig(**settings.fields(ATTENTION))
    activation = settings.activation("mlp_hidden_act", "relu2")
    mlp = DenseMLPConfig(**settings.fields(MLP), activation=activation)
    norm, letters = RMSNormConfig(epsilon=mamba.norm_epsilon), pattern(settings)
    blocks: dict[str, BlockConfig] = {
        "M": BlockConfig(mixer=mamba, norm=norm),
        "*": BlockConfig(mixer=attention, norm=norm),
        "-": BlockConfig(mlp=mlp, norm=norm),
    }
    if "E" in letters:
        blocks["E"] = BlockConfig(mlp=_experts(settings, mlp), norm=norm)
    return DecoderConfig(
        hidden=settings.take("hidden_size", 4096),
        vocabulary_size=settings.take("vocab_size", 131072),
        sequence_length=settings.take("max_position_embeddings", 4096),
        stack=stack_of([blocks[letter] for letter in letters]),
        norm=norm,
        residual="float32" if settings.take("residual_in_fp32", False) else "compute",
    )


def _experts(settings: Settings, mlp: DenseMLPConfig) -> MoEConfig:
    """mlp: of layers without experts. The latent's matrices have no biases."""
    settings.assume(EXPERTS)
    latent = settings.take("moe_latent_size", kind=int)
    if latent is not None and mlp.bias:
        settings.refuse("mlp_bias", True, f"only false is supported with moe_latent_size={latent}")
    moe = MoEConfig(
        experts=settings.count("n_routed_experts"),
        top_k=settings.count("num_experts_per_tok"),
        expert=replace(mlp, ffn=settings.count("moe_intermediate_size"), bias=False),
        shared=SharedExpertConfig(mlp=replace(mlp, ffn=settings.count("moe_shared_expert_intermediate_size"))),
        latent=latent,
    )
    return balanced_experts.balanced(settings, moe)


def _write(cfg: DecoderConfig) -> dict[str, Any]:
    blocks = layers_of(cfg)
    letters = "".join(map(letter, blocks))
    kinds = dict(zip(letters, blocks, strict=True))
    parts: dict[str, Any] = {}
    if "M" in kinds:
        mamba = kinds["M"].mixer
        parts |= {**to_settings(mamba, MAMBA), "time_step_min": max(mamba.dt_limit[0], LEAST_STEP)}
    if "*" in kinds:
        mixer = kinds["*"].mixer
        parts |= to_settings(replace(mixer, kv_heads=mixer.groups(), head_dim=mixer.size(cfg.hidden)), ATTENTION)
    if "-" in kinds:
        mlp = kinds["-"].mlp
        parts |= {**to_settings(mlp, MLP), "mlp_hidden_act": activation_name(mlp.activation)}
    if "E" in kinds:
        moe = kinds["E"].mlp
        parts |= {
            **balanced_experts.experts_settings(moe),
            "norm_topk_prob": moe.router.normalise == "chosen",
            "moe_shared_expert_intermediate_size": moe.shared.mlp.ffn,
            "moe_latent_size": moe.latent,
            "mlp_bias": moe.shared.mlp.bias,
            "mlp_hidden_act": activation_name(moe.expert.activation),
        }
    return {
        **model_settings(cfg),
        "hybrid_override_pattern": letters,
        "layers_block_type": [KINDS[letter] for letter in letters],
        **parts,
    }


def _rows(cfg: DecoderConfig) -> list[Row]:
    heads = attention(f"{LAYER}.mixer", "stack.*.mixer", ("q_proj", "k_proj", "v_proj", "o_proj"))
    mixer, mlp = f"{LAYER}.mixer", "stack.*.mlp"
    mlps = {"": "", ".shared_experts": ".shared", ".experts.{expert}": ".experts"}
    return [
        *outer_rows(cfg),
        *norm(f"{LAYER}.norm", "stack.*.mlp_norm"),
        *of_hybrids(MAMBA2_ROWS, mixer),
        *[replace(row, requires="stack.*.mixer.query") for row in heads],
        *[row for name, path in mlps.items() for row in linear(f"{mixer}{name}.up_proj", f"{mlp}{path}.up")],
        *[row for name, path in mlps.items() for row in linear(f"{mixer}{name}.down_proj", f"{mlp}{path}.down")],
        Row(f"{mixer}.gate.weight", f"{mlp}.router", "e d -> d e"),
        Row(f"{mixer}.gate.e_score_correction_bias", f"{mlp}.load.sum", index=(0,)),
        Row(f"{mixer}.fc1_latent_proj.weight", f"{mlp}.latent_down", "l d -> d l"),
        Row(f"{mixer}.fc2_latent_proj.weight", f"{mlp}.latent_up", "d l -> l d"),
    ]


FAMILIES = [
    Family(
        name="nemotron_h",
        architecture="NemotronHForCausalLM",
        task="CAUSAL_LM",
        read=_read,
        write=_write,
        rows=_rows,
        unused=UNUSED,
        renamed=((r"^model\.", "backbone."), *RENAMED),
        ignored=("mtp.*",),
        extra=("mtp.*",),
        extra_settings=("num_nextn_predict_layers",),
    )
]
