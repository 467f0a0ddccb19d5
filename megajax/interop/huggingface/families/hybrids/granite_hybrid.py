"""Granite 4 hybrids: Mamba-2 in most layers, attention in the others, usually without rotary positions.

All layers have Granite's factors, and experts with a shared one, or only the latter as their feed-forward.
"""

from dataclasses import replace
from typing import Any

from megajax.checkpoint.weights.name_mapping import Row
from megajax.interop.huggingface import decoders
from megajax.interop.huggingface.decoders import ATTENTION, LAYER, outer_rows
from megajax.interop.huggingface.families import granite
from megajax.interop.huggingface.families.hybrids import mamba
from megajax.interop.huggingface.family import Names, Settings, layers_of, to_settings
from megajax.interop.huggingface.rotary import FULL
from megajax.layers.mamba.config import Mamba2Config
from megajax.layers.mlp.config import GatedMLPConfig
from megajax.layers.moe.config import FeedForwardConfig, MoEConfig
from megajax.models.decoder.config import DecoderConfig

LINEAR = "linear_attention"
OLDER = {"mamba": LINEAR, "attention": FULL}
"""Names of the types of layers before transformers 5."""
MAMBA: Names = {
    "heads": ("mamba_n_heads", 128),
    "head_dim": ("mamba_d_head", 64),
    "state": ("mamba_d_state", 256),
    "groups": ("mamba_n_groups", 1),
    "conv_kernel": ("mamba_d_conv", 4),
    "conv_bias": ("mamba_conv_bias", True),
    "bias": ("mamba_proj_bias", False),
    "chunk": ("mamba_chunk_size", 256),
}


def _read(settings: Settings) -> DecoderConfig:
    settings.assume(granite.MOE | {"mamba_expand": 2, "shared_intermediate_size": 1024})
    inner, epsilon = settings.take("mamba_expand") * settings.peek("hidden_size"), settings.peek("rms_norm_eps")
    if settings.remaining.get("mamba_d_head", "auto") == "auto":
        settings.remaining["mamba_d_head"] = int(inner) // settings.take("mamba_n_heads", 128)
    state_space = Mamba2Config(**settings.fields(MAMBA), norm_epsilon=epsilon, dt_limit=mamba.step_limit(settings))
    if state_space.inner != inner:
        settings.refuse(
            "mamba_n_heads", state_space.heads, f"with mamba_d_head={state_space.head_dim} they are not {inner} wide"
        )
    attention = granite.attention(settings)
    if settings.take("position_embedding_type", kind=str) != "rope":
        attention = replace(attention, rope=None)
    if kinds := settings.take("layer_types", kind=list):
        settings.remaining["layer_types"] = [OLDER.get(kind, kind) for kind in kinds]
    kinds = decoders.layer_types(settings, settings.peek("num_hidden_layers"), LINEAR, lambda _: True)
    shared, feed_forward = settings.count("shared_intermediate_size"), None
    if settings.peek("num_local_experts"):
        feed_forward = granite.experts(settings, shared)
    mlp: FeedForwardConfig = feed_forward or replace(decoders.gated_mlp(settings), ffn=shared)
    mixers = [state_space if kind == LINEAR else attention for kind in kinds]
    return decoders.decoder(settings, mixers, lambda _: mlp, **granite.factors(settings))


def _write(cfg: Any) -> dict[str, Any]:
    blocks = layers_of(cfg)
    mixers, mlp = [block.mixer for block in blocks], blocks[0].mlp
    state_space = next((mixer for mixer in mixers if isinstance(mixer, Mamba2Config)), None)
    if state_space is None:
        raise ValueError("no layer is a Mamba-2")
    experts = {"num_local_experts": 0, "num_experts_per_tok": 0, "shared_intermediate_size": 0}
    if isinstance(mlp, GatedMLPConfig):
        experts["shared_intermediate_size"] = mlp.ffn
    return {
        **experts,
        **granite.write(cfg, mlp if isinstance(mlp, MoEConfig) else None),
        **to_settings(state_space, MAMBA),
        "mamba_expand": state_space.inner / cfg.hidden
        if state_space.inner % cfg.hidden
        else state_space.inner // cfg.hidden,
        "time_step_limit": list(state_space.dt_limit),
        "layer_types": [LINEAR if isinstance(mixer, Mamba2Config) else FULL for mixer in mixers],
        "position_embedding_type": None if decoders.attention_mixers(cfg)[0].rope is None else "rope",
    }


def _rows(cfg: DecoderConfig) -> list[Row]:
    mlp = layers_of(cfg)[0].mlp
    feed_forward = granite.expert_rows()
    if isinstance(mlp, GatedMLPConfig):
        feed_forward = granite.fused(f"{LAYER}.shared_mlp", "stack.*.mlp")
    return [
        *outer_rows(cfg),
        *[replace(row, requires="stack.*.mixer.query") if ".self_attn." in row.tensor else row for row in ATTENTION],
        *[
            replace(
                row, tensor=row.tensor.replace(f"{mamba.LAYER}.mixer", f"{LAYER}.mamba"), requires="stack.*.mixer.a_log"
            )
            for row in mamba.MAMBA2_ROWS
        ],
        *feed_forward,
    ]


FAMILIES = [
    decoders.family(
        "granitemoehybrid", "GraniteMoeHybridForCausalLM", read=_read, write=_write, rows=_rows,
        unused=frozenset({
            # Positions that no layer has, and settings of experts of a model without them.
            "rope_theta", "rope_scaling", "rope_parameters", "num_local_experts", "num_experts_per_tok",
            "output_router_logits", "router_aux_loss_coef",
            # Settings that transformers does not read.
            "init_method", "normalization_function",
        }),
    )
]  # fmt: skip
