"""Settings and tensor names that families of Mamba and of its hybrids share.

in_proj computes the gate, x, b, c and dt, in this order; the convolution is over x, b and c.
"""

from math import inf
from typing import Any

from megajax.checkpoint.weights.tensor_table import Row
from megajax.interop.huggingface.family import Names, Settings
from megajax.interop.huggingface.rows import norm, tokens
from megajax.layers.configs import FeedForwardBlockConfig, Mamba2Config
from megajax.models.configs import DecoderConfig

LAYER = "backbone.layers.{layer}"
RENAMED = ((r"^(embeddings?|layers|norm_f)\.", r"backbone.\1."), (r"\.embedding\.", ".embeddings."))
"""Names without the prefix, and names in the first checkpoints."""
UNUSED = frozenset({
    "d_inner", "d_model", "fused_add_norm", "intermediate_size", "n_layer", "norm_before_gate",
    "pad_vocab_size_multiple", "rescale_prenorm_residual", "rms_norm", "ssm_cfg", "time_step_init_scheme",
    "time_step_rank", "time_step_scale", "use_associative_scan", "use_mambapy",
})  # fmt: skip
"""Settings of initial values, duplicates of sizes, and settings that transformers does not read."""

MAMBA2: Names = {
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
KINDS = {"M": "linear_attention", "*": "full_attention", "-": "mlp", "E": "moe"}
"""Letter of hybrid_override_pattern -> type of a layer."""
LETTERS = {**{kind: letter for letter, kind in KINDS.items()}, "mamba": "M", "attention": "*"}
"""The reverse, including older names of types."""


def step_limit(settings: Settings) -> tuple[float, float]:
    """time_step_limit, in which infinity may be written as {"__float__": "Infinity"}."""
    limits = settings.take("time_step_limit", (0.0, inf))
    low, high = (float(limit["__float__"] if isinstance(limit, dict) else limit) for limit in limits)
    return low, high


def pattern(settings: Settings) -> str:
    """A letter for each layer. Unsupported types of layers are reported."""
    letters, kinds = settings.take("hybrid_override_pattern", "ME*-"), settings.take("layers_block_type", kind=list)
    if kinds is not None:
        letters = "".join(LETTERS.get(kind, "?") for kind in kinds)
    if unsupported := sorted(set(letters) - set("M*-")):
        names = ", ".join(KINDS.get(letter, letter) for letter in unsupported)
        settings.refuse("layers_block_type", names, "only linear_attention, full_attention, mlp are supported")
    return "".join(letter for letter in letters if letter in "M*-") or "M"


def letter(block: Any) -> str:
    """The letter of a block in the pattern."""
    if isinstance(block, FeedForwardBlockConfig):
        return "-"
    return "M" if isinstance(block.mixer, Mamba2Config) else "*"


def model_settings(cfg: Any) -> dict[str, Any]:
    """The settings of config.json that all these families share."""
    return {
        "hidden_size": cfg.hidden,
        "num_hidden_layers": cfg.stack.layers(),
        "vocab_size": cfg.vocabulary_size,
        "max_position_embeddings": cfg.sequence_length,
        "layer_norm_epsilon": cfg.norm.epsilon,
        "residual_in_fp32": cfg.residual == "float32",
    }


def outer_rows(cfg: DecoderConfig) -> list[Row]:
    """The embedding table, the head and all norms outside of mixers."""
    return [
        *tokens(cfg, "backbone.embeddings.weight", "lm_head.weight"),
        *norm("backbone.norm_f", "norm"),
        *norm(f"{LAYER}.norm", "stack.*.mixer_norm"),
    ]


def _mixer_paths(pattern: str, *names: str) -> tuple[str, ...]:
    return tuple(f"stack.*.mixer.{pattern.format(name)}" for name in names)


INPUTS = ("z", "x", "b", "c", "dt")
MAMBA2_ROWS = [
    Row(f"{LAYER}.mixer.in_proj.weight", _mixer_paths("in_{}", *INPUTS), (*["(n h) d -> d n h"] * 4, "n d -> d n")),
    Row(f"{LAYER}.mixer.in_proj.bias", _mixer_paths("in_{}_bias", *INPUTS), (*["(n h) -> n h"] * 4, "")),
    Row(f"{LAYER}.mixer.conv1d.weight", _mixer_paths("conv_{}.kernel", "x", "b", "c"), "(n h) 1 k -> k n h"),
    Row(f"{LAYER}.mixer.conv1d.bias", _mixer_paths("conv_{}.bias", "x", "b", "c"), "(n h) -> n h"),
    Row(f"{LAYER}.mixer.dt_bias", "stack.*.mixer.dt_bias"),
    Row(f"{LAYER}.mixer.A_log", "stack.*.mixer.a_log"),
    Row(f"{LAYER}.mixer.D", "stack.*.mixer.skip"),
    Row(f"{LAYER}.mixer.norm.weight", "stack.*.mixer.norm_gain", "(n h) -> n h"),
    Row(f"{LAYER}.mixer.out_proj.weight", "stack.*.mixer.output", "d (n h) -> n h d"),
    Row(f"{LAYER}.mixer.out_proj.bias", "stack.*.mixer.output_bias"),
]
"""The rows of a Mamba-2 mixer, also in hybrids."""
