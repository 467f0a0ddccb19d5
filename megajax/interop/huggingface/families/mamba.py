"""Mamba and Mamba-2.

In Mamba, in_proj computes x and the gate, x_proj the low-rank input of dt, b and c. For Mamba-2, see `state_space`.
"""

from math import ceil
from typing import Any

from megajax.checkpoint.weights.tensor_table import Row
from megajax.interop.huggingface.family import Family, Names, Settings, to_settings
from megajax.interop.huggingface.state_space import (
    LAYER,
    MAMBA2,
    MAMBA2_ROWS,
    RENAMED,
    UNUSED,
    model_settings,
    outer_rows,
    step_limit,
)
from megajax.layers.configs import Mamba1Config, Mamba2Config, MixerBlockConfig, MixerConfig, RMSNormConfig, StackConfig
from megajax.models.configs import DecoderConfig

MAMBA: Names = {
    "state": ("state_size", 16),
    **{name: MAMBA2[name] for name in ("conv_kernel", "conv_bias", "bias", "dt_min", "dt_max", "dt_floor")},
}
LENGTH = 2048
"""Default sequence length: transformers has no setting for it; MegaJAX writes max_position_embeddings."""


def _read_mamba(settings: Settings) -> DecoderConfig:
    settings.assume({"hidden_size": 768, "num_hidden_layers": 32, "vocab_size": 50280, "tie_word_embeddings": True})
    hidden, rank = settings.peek("hidden_size"), settings.take("time_step_rank", "auto", object)
    mixer = Mamba1Config(
        inner=int(settings.take("expand", 2, float) * hidden),
        rank=ceil(hidden / 16) if rank == "auto" else rank,
        **settings.fields(MAMBA),
    )
    return _decoder(settings, mixer, settings.take("layer_norm_epsilon", 1e-5))


def _read_mamba2(settings: Settings) -> DecoderConfig:
    settings.assume({"hidden_size": 4096, "num_hidden_layers": 64, "vocab_size": 32768, "tie_word_embeddings": False})
    hidden, expand = settings.peek("hidden_size"), settings.take("expand", 2, float)
    mixer = Mamba2Config(**settings.fields(MAMBA2), dt_limit=step_limit(settings))
    if mixer.inner != expand * hidden:
        settings.refuse("num_heads", mixer.heads, f"with head_dim={mixer.head_dim} it is not {expand} x {hidden}")
    return _decoder(settings, mixer, mixer.norm_epsilon)


def _decoder(settings: Settings, mixer: MixerConfig, epsilon: float) -> DecoderConfig:
    settings.only("hidden_act", "silu", "swish")
    norm = RMSNormConfig(epsilon=epsilon)
    return DecoderConfig(
        hidden=settings.need("hidden_size"),
        vocabulary_size=settings.need("vocab_size"),
        sequence_length=settings.take("max_position_embeddings", LENGTH),
        stack=StackConfig(pattern=(MixerBlockConfig(mixer=mixer, norm=norm),), repeats=settings.layers()),
        norm=norm,
        tied=settings.need("tie_word_embeddings"),
        residual="float32" if settings.take("residual_in_fp32", True) else "compute",
    )


def _write(cfg: Any) -> dict[str, Any]:
    expand = cfg.stack.pattern[0].mixer.inner / cfg.hidden
    return {
        **model_settings(cfg),
        "hidden_act": "silu",
        "expand": int(expand) if expand == int(expand) else expand,
        "tie_word_embeddings": cfg.tied,
    }


def _write_mamba(cfg: Any) -> dict[str, Any]:
    mixer = cfg.stack.pattern[0].mixer
    sizes = {"intermediate_size": mixer.inner, "time_step_rank": mixer.rank}
    return {**_write(cfg), **sizes, **to_settings(mixer, MAMBA)}


def _write_mamba2(cfg: Any) -> dict[str, Any]:
    mixer = cfg.stack.pattern[0].mixer
    return {**_write(cfg), **to_settings(mixer, MAMBA2), "time_step_limit": list(mixer.dt_limit)}


def _rows_mamba(cfg: DecoderConfig) -> list[Row]:
    tensor, path = f"{LAYER}.mixer", "stack.*.mixer"
    return [
        *outer_rows(cfg),
        Row(f"{tensor}.in_proj.weight", (f"{path}.in_x", f"{path}.in_z"), "o i -> i o"),
        Row(f"{tensor}.in_proj.bias", (f"{path}.in_x_bias", f"{path}.in_z_bias")),
        Row(f"{tensor}.conv1d.weight", f"{path}.conv_x.kernel", "i 1 k -> k i"),
        Row(f"{tensor}.conv1d.bias", f"{path}.conv_x.bias"),
        Row(f"{tensor}.x_proj.weight", (f"{path}.down_dt", f"{path}.down_b", f"{path}.down_c"), "o i -> i o"),
        Row(f"{tensor}.dt_proj.weight", f"{path}.up_dt", "o i -> i o"),
        Row(f"{tensor}.dt_proj.bias", f"{path}.dt_bias"),
        Row(f"{tensor}.A_log", f"{path}.a_log"),
        Row(f"{tensor}.D", f"{path}.skip"),
        Row(f"{tensor}.out_proj.weight", f"{path}.output", "o i -> i o"),
        Row(f"{tensor}.out_proj.bias", f"{path}.output_bias"),
    ]


def _rows_mamba2(cfg: DecoderConfig) -> list[Row]:
    return [*outer_rows(cfg), *MAMBA2_ROWS]


FAMILIES = [
    Family(
        name=name,
        architecture=architecture,
        task="CAUSAL_LM",
        read=read,
        write=write,
        rows=rows,
        unused=UNUSED,
        renamed=RENAMED,
        heads={"lm_head.weight": "backbone.embeddings.weight"},
    )
    for name, architecture, read, write, rows in (
        ("mamba", "MambaForCausalLM", _read_mamba, _write_mamba, _rows_mamba),
        ("mamba2", "Mamba2ForCausalLM", _read_mamba2, _write_mamba2, _rows_mamba2),
    )
]
