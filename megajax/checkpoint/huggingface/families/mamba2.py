"""Mamba-2. in_proj makes the gate, x, b, c and the steps, one after another; the convolution is over x, b and c."""

from collections.abc import Sequence
from typing import Any

from megajax.checkpoint.huggingface.family import Family, Names, Settings, written
from megajax.checkpoint.huggingface.state_space import LAYER, LENGTH, MIXER, RENAMED, UNUSED, ends, exact, step_limit
from megajax.checkpoint.weights.tensor_table import Row
from megajax.layers.config import Mamba2Config, MixerBlockConfig, RMSNormConfig, StackConfig
from megajax.models.config import DecoderConfig

MIXER_SETTINGS: Names = {
    "heads": ("num_heads", 128),
    "head_dim": ("head_dim", 64),
    "state": ("state_size", 128),
    "groups": ("n_groups", 8),
    "conv_kernel": ("conv_kernel", 4),
    "conv_bias": ("use_conv_bias", True),
    "bias": ("use_bias", False),
    "norm_epsilon": ("layer_norm_epsilon", 1e-5),
    "dt_min": ("time_step_min", 0.001),
    "dt_max": ("time_step_max", 0.1),
    "dt_floor": ("time_step_floor", 1e-4),
    "chunk": ("chunk_size", 256),
}


def model(given: Settings) -> DecoderConfig:
    """The model of a config.json."""
    hidden, expand = given.take("hidden_size", 4096), given.take("expand", 2, float)
    given.only("hidden_act", "silu", "swish")
    mixer = Mamba2Config(**given.fields(MIXER_SETTINGS), dt_limit=step_limit(given))
    if mixer.inner != expand * hidden:
        given.refuse("num_heads", mixer.heads, f"with head_dim={mixer.head_dim} it is not {expand} x {hidden}")
    norm, layers = RMSNormConfig(epsilon=mixer.norm_epsilon), given.layers(default=64)
    return DecoderConfig(
        hidden=hidden,
        vocabulary_size=given.take("vocab_size", 32768),
        sequence_length=given.take("max_position_embeddings", LENGTH),
        stack=StackConfig(pattern=(MixerBlockConfig(mixer=mixer, norm=norm),), repeats=layers),
        norm=norm,
        tied=given.take("tie_word_embeddings", False),
        residual="float32" if given.take("residual_in_fp32", True) else "compute",
    )


def settings(cfg: Any) -> dict[str, Any]:
    """The config.json of a model."""
    mixer = cfg.stack.pattern[0].mixer
    return {
        "model_type": "mamba2",
        "architectures": ["Mamba2ForCausalLM"],
        "hidden_size": cfg.hidden,
        "expand": exact(mixer.inner / cfg.hidden),
        "num_hidden_layers": cfg.stack.layers(),
        "vocab_size": cfg.vocabulary_size,
        "max_position_embeddings": cfg.sequence_length,
        "hidden_act": "silu",
        **written(mixer, MIXER_SETTINGS),
        "time_step_limit": list(mixer.dt_limit),
        "residual_in_fp32": cfg.residual == "float32",
        "tie_word_embeddings": cfg.tied,
    }


def rows(cfg: DecoderConfig) -> Sequence[Row]:
    """The table."""
    return [*ends(cfg), Row(f"{LAYER}.norm.weight", "stack.*.mixer_norm.gain"), *MIXER]


FAMILIES = [
    Family(
        name="mamba2",
        model_types=("mamba2",),
        model=model,
        settings=settings,
        rows=rows,
        unused=UNUSED,
        renamed=RENAMED,
        heads={"lm_head.weight": "backbone.embeddings.weight"},
    )
]
