"""Nemotron-H: Mamba-2, attention without positions, and MLPs, each a layer, in any order."""

from dataclasses import replace
from math import inf
from typing import Any

from megajax.checkpoint.weights.name_mapping import Row
from megajax.interop.huggingface.families.mamba import (
    KINDS,
    LAYER,
    MAMBA2,
    MAMBA2_ROWS,
    RENAMED,
    letter,
    model_settings,
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
from megajax.layers.attention.config import AttentionConfig
from megajax.layers.block.config import BlockConfig
from megajax.layers.mamba.config import Mamba2Config
from megajax.layers.mlp.config import DenseMLPConfig
from megajax.layers.norm.config import RMSNormConfig
from megajax.layers.stack.config import stack_of
from megajax.models.decoder.config import DecoderConfig

UNUSED = frozenset({
    "attention_bias", "expand", "hidden_dropout", "mamba_proj_bias", "mamba_ssm_cache_dtype", "mtp_*",
    "num_hidden_layers", "num_logits_to_keep", "num_query_groups", "rescale_prenorm_residual", "rms_norm_eps",
    "sliding_window", "tie_word_embeddings", "time_step_limit", "use_mamba_kernels",
    # Of experts, which are refused by the type of a layer.
    "moe_*", "n_*", "norm_topk_prob", "num_experts_per_tok", "routed_scaling_factor", "topk_group",
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
LEAST_STEP = 1e-9
"""time_step_min for no lower bound: transformers takes its logarithm."""


def _read(settings: Settings) -> DecoderConfig:
    settings.only("mamba_hidden_act", "silu", "swish")
    settings.only("num_nextn_predict_layers", 0)
    mamba = Mamba2Config(**settings.fields(MAMBA))
    # transformers keeps steps above time_step_min, whatever time_step_limit says.
    mamba = replace(mamba, dt_limit=(0.0 if mamba.dt_min <= LEAST_STEP else mamba.dt_min, inf))
    attention = AttentionConfig(**settings.fields(ATTENTION))
    activation: Any = settings.activation("mlp_hidden_act", "relu2")
    mlp = DenseMLPConfig(**settings.fields(MLP), activation=activation)
    norm = RMSNormConfig(epsilon=mamba.norm_epsilon)
    blocks: dict[str, BlockConfig] = {
        "M": BlockConfig(mixer=mamba, norm=norm),
        "*": BlockConfig(mixer=attention, norm=norm),
        "-": BlockConfig(mlp=mlp, norm=norm),
    }
    return DecoderConfig(
        hidden=settings.take("hidden_size", 4096),
        vocabulary_size=settings.take("vocab_size", 131072),
        sequence_length=settings.take("max_position_embeddings", 4096),
        stack=stack_of([blocks[letter] for letter in pattern(settings)]),
        norm=norm,
        residual="float32" if settings.take("residual_in_fp32", False) else "compute",
    )


def _write(cfg: Any) -> dict[str, Any]:
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
    return {
        **model_settings(cfg),
        "hybrid_override_pattern": letters,
        "layers_block_type": [KINDS[letter] for letter in letters],
        **parts,
    }


def _rows(cfg: DecoderConfig) -> list[Row]:
    heads = attention(f"{LAYER}.mixer", "stack.*.mixer", ("q_proj", "k_proj", "v_proj", "o_proj"))
    return [
        *outer_rows(cfg),
        *norm(f"{LAYER}.norm", "stack.*.mlp_norm"),
        *[replace(row, requires="stack.*.mixer.a_log") for row in MAMBA2_ROWS],
        *[replace(row, requires="stack.*.mixer.query") for row in heads],
        *linear(f"{LAYER}.mixer.up_proj", "stack.*.mlp.up"),
        *linear(f"{LAYER}.mixer.down_proj", "stack.*.mlp.down"),
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
    )
]
