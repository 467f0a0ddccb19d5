"""Mamba, the first: in_proj makes x and the gate, x_proj what steps are made of, b and c."""

from collections.abc import Sequence
from math import ceil
from typing import Any

from megajax.checkpoint.huggingface.family import Family, Names, Settings, written
from megajax.checkpoint.huggingface.state_space import LAYER, LENGTH, RENAMED, UNUSED, ends, exact
from megajax.checkpoint.weights.tensor_table import Row
from megajax.layers.config import Mamba1Config, MixerBlockConfig, RMSNormConfig, StackConfig
from megajax.models.config import DecoderConfig

MIXER_SETTINGS: Names = {
    "state": ("state_size", 16),
    "conv_kernel": ("conv_kernel", 4),
    "conv_bias": ("use_conv_bias", True),
    "bias": ("use_bias", False),
    "dt_min": ("time_step_min", 0.001),
    "dt_max": ("time_step_max", 0.1),
    "dt_floor": ("time_step_floor", 1e-4),
}


def model(given: Settings) -> DecoderConfig:
    """The model of a config.json."""
    hidden, rank = given.take("hidden_size", 768), given.take("time_step_rank", "auto", object)
    given.only("hidden_act", "silu", "swish")
    mixer = Mamba1Config(
        inner=int(given.take("expand", 2, float) * hidden),
        rank=ceil(hidden / 16) if rank == "auto" else rank,
        **given.fields(MIXER_SETTINGS),
    )
    norm = RMSNormConfig(epsilon=given.take("layer_norm_epsilon", 1e-5))
    layers = given.layers(default=32)
    return DecoderConfig(
        hidden=hidden,
        vocabulary_size=given.take("vocab_size", 50280),
        sequence_length=given.take("max_position_embeddings", LENGTH),
        stack=StackConfig(pattern=(MixerBlockConfig(mixer=mixer, norm=norm),), repeats=layers),
        norm=norm,
        tied=given.take("tie_word_embeddings", True),
        residual="float32" if given.take("residual_in_fp32", True) else "compute",
    )


def settings(cfg: Any) -> dict[str, Any]:
    """The config.json of a model."""
    mixer = cfg.stack.pattern[0].mixer
    return {
        "model_type": "mamba",
        "architectures": ["MambaForCausalLM"],
        "hidden_size": cfg.hidden,
        "intermediate_size": mixer.inner,
        "expand": exact(mixer.inner / cfg.hidden),
        "time_step_rank": mixer.rank,
        "num_hidden_layers": cfg.stack.layers(),
        "vocab_size": cfg.vocabulary_size,
        "max_position_embeddings": cfg.sequence_length,
        "hidden_act": "silu",
        **written(mixer, MIXER_SETTINGS),
        "layer_norm_epsilon": cfg.norm.epsilon,
        "residual_in_fp32": cfg.residual == "float32",
        "tie_word_embeddings": cfg.tied,
    }


MIXER, OURS = f"{LAYER}.mixer", "stack.*.mixer"


def rows(cfg: DecoderConfig) -> Sequence[Row]:
    """The table."""
    return [
        *ends(cfg),
        Row(f"{LAYER}.norm.weight", "stack.*.mixer_norm.gain"),
        Row(f"{MIXER}.in_proj.weight", (f"{OURS}.in_x", f"{OURS}.in_z"), "o i -> i o"),
        Row(f"{MIXER}.in_proj.bias", (f"{OURS}.in_x_bias", f"{OURS}.in_z_bias")),
        Row(f"{MIXER}.conv1d.weight", f"{OURS}.conv_x.kernel", "i 1 k -> k i"),
        Row(f"{MIXER}.conv1d.bias", f"{OURS}.conv_x.bias"),
        Row(f"{MIXER}.x_proj.weight", (f"{OURS}.down_dt", f"{OURS}.down_b", f"{OURS}.down_c"), "o i -> i o"),
        Row(f"{MIXER}.dt_proj.weight", f"{OURS}.up_dt", "o i -> i o"),
        Row(f"{MIXER}.dt_proj.bias", f"{OURS}.dt_bias"),
        Row(f"{MIXER}.A_log", f"{OURS}.a_log"),
        Row(f"{MIXER}.D", f"{OURS}.skip"),
        Row(f"{MIXER}.out_proj.weight", f"{OURS}.output", "o i -> i o"),
        Row(f"{MIXER}.out_proj.bias", f"{OURS}.output_bias"),
    ]


FAMILIES = [
    Family(
        name="mamba",
        model_types=("mamba",),
        model=model,
        settings=settings,
        rows=rows,
        unused=UNUSED,
        renamed=RENAMED,
        heads={"lm_head.weight": "backbone.embeddings.weight"},
    )
]
