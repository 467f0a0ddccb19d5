"""What tables of Mamba and of its hybrids share.

in_proj makes the gate, x, b, c and the steps, one after another; the convolution is over x, b and c.
"""

from math import inf
from typing import Any

from megajax.checkpoint.huggingface.family import Settings
from megajax.checkpoint.weights.tensor_table import Row
from megajax.layers.config import FeedForwardBlockConfig, Mamba2Config
from megajax.models.config import DecoderConfig

LAYER = "backbone.layers.{layer}"
RENAMED = ((r"^(embeddings?|layers|norm_f)\.", r"backbone.\1."), (r"\.embedding\.", ".embeddings."))
"""Names without the prefix, and those of the first checkpoints."""
LENGTH = 2048
"""Tokens of a row where config.json does not say: it has no setting for them, and ours is max_position_embeddings."""
UNUSED = frozenset({
    "d_inner", "d_model", "fused_add_norm", "intermediate_size", "n_layer", "norm_before_gate",
    "pad_vocab_size_multiple", "rescale_prenorm_residual", "rms_norm", "ssm_cfg", "time_step_init_scheme",
    "time_step_rank", "time_step_scale", "use_associative_scan", "use_mambapy",
})  # fmt: skip
"""About initial values, other names of the same sizes, and what transformers does not read."""

KINDS = {"M": "linear_attention", "*": "full_attention", "-": "mlp", "E": "moe"}
"""Letter of hybrid_override_pattern -> type of a layer."""
LETTERS = {**{kind: letter for letter, kind in KINDS.items()}, "mamba": "M", "attention": "*"}
"""The reverse, with older words."""


def step_limit(given: Settings) -> tuple[float, float]:
    """time_step_limit, in which infinity may be written as {"__float__": "Infinity"}."""
    limits = given.take("time_step_limit", (0.0, inf))
    low, high = (float(each["__float__"] if isinstance(each, dict) else each) for each in limits)
    return low, high


def exact(number: float) -> float | int:
    """An int where it is one."""
    return int(number) if number == int(number) else number


def pattern(given: Settings) -> str:
    """A letter for each layer; those that we lack are refused."""
    written, kinds = given.take("hybrid_override_pattern", "ME*-"), given.take("layers_block_type", kind=list)
    letters = written if kinds is None else "".join(LETTERS.get(kind, "?") for kind in kinds)
    if lacking := sorted(set(letters) - set("M*-")):
        kinds = [KINDS.get(each, each) for each in lacking]
        given.refuse("layers_block_type", ", ".join(kinds), "only linear_attention, full_attention, mlp are supported")
    return "".join(letter for letter in letters if letter in "M*-") or "M"


def letter(block: Any) -> str:
    """Of the pattern."""
    if isinstance(block, FeedForwardBlockConfig):
        return "-"
    return "M" if isinstance(block.mixer, Mamba2Config) else "*"


def ends(cfg: DecoderConfig) -> list[Row]:
    """Tables of tokens and the last norm."""
    tokens = (slice(0, cfg.vocabulary_size),)
    return [
        Row("backbone.embeddings.weight", "tokens", inside=tokens),
        Row("backbone.norm_f.weight", "norm.gain"),
        Row("lm_head.weight", "head", inside=tokens),
    ]


def _each(pattern: str, *names: str) -> tuple[str, ...]:
    return tuple(f"stack.*.mixer.{pattern.format(name)}" for name in names)


INPUTS = ("z", "x", "b", "c", "dt")
MIXER = [
    Row(f"{LAYER}.mixer.in_proj.weight", _each("in_{}", *INPUTS), (*["(n h) d -> d n h"] * 4, "n d -> d n")),
    Row(f"{LAYER}.mixer.in_proj.bias", _each("in_{}_bias", *INPUTS), (*["(n h) -> n h"] * 4, "")),
    Row(f"{LAYER}.mixer.conv1d.weight", _each("conv_{}.kernel", "x", "b", "c"), "(n h) 1 k -> k n h"),
    Row(f"{LAYER}.mixer.conv1d.bias", _each("conv_{}.bias", "x", "b", "c"), "(n h) -> n h"),
    Row(f"{LAYER}.mixer.dt_bias", "stack.*.mixer.dt_bias"),
    Row(f"{LAYER}.mixer.A_log", "stack.*.mixer.a_log"),
    Row(f"{LAYER}.mixer.D", "stack.*.mixer.skip"),
    Row(f"{LAYER}.mixer.norm.weight", "stack.*.mixer.norm_gain", "(n h) -> n h"),
    Row(f"{LAYER}.mixer.out_proj.weight", "stack.*.mixer.output", "d (n h) -> n h d"),
    Row(f"{LAYER}.mixer.out_proj.bias", "stack.*.mixer.output_bias"),
]
"""A layer, which hybrids have too."""
