"""Mamba and Mamba-2, and the settings and tensor names that their hybrids share.

In Mamba, in_proj computes x and the gate, x_proj the low-rank input of dt, b and c. In Mamba-2, in_proj computes the
gate, x, b, c and dt, in this order; the convolution is over x, b and c.
"""

from collections.abc import Sequence
from dataclasses import replace
from math import ceil, inf
from typing import Any

from megajax.interop.huggingface.family import Family, Names, Settings, final_norm, layers_of, norm, to_settings, tokens
from megajax.interop.weights.name_mapping import Row
from megajax.layers.block.config import BlockConfig, MixerConfig
from megajax.layers.mamba.config import Mamba1Config, Mamba2Config
from megajax.layers.moe.config import MoEConfig
from megajax.layers.norm.config import L2NormConfig, RMSNormConfig
from megajax.layers.stack.config import StackConfig
from megajax.models.decoder.config import DecoderConfig

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
NO_LIMIT = (0.0, inf)
"""Default of time_step_limit."""


def step_limit(settings: Settings) -> tuple[float, float]:
    """time_step_limit."""
    low, high = map(float, settings.take("time_step_limit", NO_LIMIT))
    return low, high


def write_step_limit(mixer: Mamba2Config) -> dict[str, Any]:
    """The reverse: nothing if steps have no limit, as JSON has no infinity."""
    return {} if mixer.dt_limit == NO_LIMIT else {"time_step_limit": list(mixer.dt_limit)}


def pattern(settings: Settings) -> str:
    """A letter for each layer. Unsupported types of layers are reported."""
    letters, kinds = settings.take("hybrid_override_pattern", "ME*-"), settings.take("layers_block_type", kind=list)
    if kinds is not None:
        letters = "".join(LETTERS.get(kind, "?") for kind in kinds)
    if unsupported := sorted(set(letters) - KINDS.keys()):
        settings.refuse("layers_block_type", ", ".join(unsupported), f"only {', '.join(KINDS.values())} are supported")
    return "".join(letter for letter in letters if letter in KINDS) or "M"


def letter(block: Any) -> str:
    """The letter of a block in the pattern."""
    if block.mixer is None:
        return "E" if isinstance(block.mlp, MoEConfig) else "-"
    return "M" if isinstance(block.mixer, Mamba2Config) else "*"


def model_settings(cfg: DecoderConfig) -> dict[str, Any]:
    """The settings of config.json that all these families share."""
    return {
        "hidden_size": cfg.hidden,
        "num_hidden_layers": cfg.stack.layers(),
        "vocab_size": cfg.vocabulary_size,
        "max_position_embeddings": cfg.sequence_length,
        "layer_norm_epsilon": final_norm(cfg).epsilon,
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


def of_hybrids(rows: Sequence[Row], tensor: str, part: str = "mixer") -> list[Row]:
    """Rows of a Mamba mixer that other layers lack. tensor: name of the mixer; part: its place in the block."""

    def moved(path: str) -> str:
        return path.replace(".mixer.", f".{part}.")

    return [
        replace(
            row,
            tensor=row.tensor.replace(f"{LAYER}.mixer", tensor),
            paths=moved(row.paths) if isinstance(row.paths, str) else tuple(map(moved, row.paths)),
            requires=f"stack.*.{part}.a_log",
        )
        for row in rows
    ]


MAMBA: Names = {
    "state": ("state_size", 16),
    **{name: MAMBA2[name] for name in ("conv_kernel", "conv_bias", "bias", "dt_min", "dt_max", "dt_floor")},
}
LENGTH = 2048
"""Default sequence length: transformers has no setting for it; MegaJAX writes max_position_embeddings."""


def _read_falcon(settings: Settings) -> DecoderConfig:
    """Falcon Mamba: norms without weights inside."""
    settings.assume({"hidden_size": 4096, "num_hidden_layers": 64, "vocab_size": 65024, "tie_word_embeddings": True})
    norm = L2NormConfig(epsilon=settings.take("mixer_rms_eps", 1e-6))
    return _read_mamba(settings, norm)


def _write_falcon(cfg: DecoderConfig) -> dict[str, Any]:
    return {**_write_mamba(cfg), "mixer_rms_eps": layers_of(cfg)[0].mixer.inner_norm.epsilon}


def _read_mamba(settings: Settings, norm: L2NormConfig | None = None) -> DecoderConfig:
    settings.assume({"hidden_size": 768, "num_hidden_layers": 32, "vocab_size": 50280, "tie_word_embeddings": True})
    hidden, rank = settings.peek("hidden_size"), settings.take("time_step_rank", "auto", object)
    mixer = Mamba1Config(
        inner=int(settings.take("expand", 2, float) * hidden),
        rank=ceil(hidden / 16) if rank == "auto" else rank,
        inner_norm=norm,
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
        stack=StackConfig(pattern=(BlockConfig(mixer=mixer, norm=norm),), repeats=settings.layers()),
        norm=norm,
        tied=settings.need("tie_word_embeddings"),
        residual="float32" if settings.take("residual_in_fp32", True) else "compute",
    )


def _write(cfg: DecoderConfig) -> dict[str, Any]:
    expand = layers_of(cfg)[0].mixer.inner / cfg.hidden
    return {
        **model_settings(cfg),
        "hidden_act": "silu",
        "expand": int(expand) if expand == int(expand) else expand,
        "tie_word_embeddings": cfg.tied,
    }


def _write_mamba(cfg: DecoderConfig) -> dict[str, Any]:
    mixer = layers_of(cfg)[0].mixer
    sizes = {"intermediate_size": mixer.inner, "time_step_rank": mixer.rank}
    return {**_write(cfg), **sizes, **to_settings(mixer, MAMBA)}


def _write_mamba2(cfg: DecoderConfig) -> dict[str, Any]:
    mixer = layers_of(cfg)[0].mixer
    return {**_write(cfg), **to_settings(mixer, MAMBA2), **write_step_limit(mixer)}


MIXER, PATH = f"{LAYER}.mixer", "stack.*.mixer"
MAMBA1_ROWS = [
    Row(f"{MIXER}.in_proj.weight", (f"{PATH}.in_x", f"{PATH}.in_z"), "o i -> i o"),
    Row(f"{MIXER}.in_proj.bias", (f"{PATH}.in_x_bias", f"{PATH}.in_z_bias")),
    Row(f"{MIXER}.conv1d.weight", f"{PATH}.conv_x.kernel", "i 1 k -> k i"),
    Row(f"{MIXER}.conv1d.bias", f"{PATH}.conv_x.bias"),
    Row(f"{MIXER}.x_proj.weight", (f"{PATH}.down_dt", f"{PATH}.down_b", f"{PATH}.down_c"), "o i -> i o"),
    Row(f"{MIXER}.dt_proj.weight", f"{PATH}.up_dt", "o i -> i o"),
    Row(f"{MIXER}.dt_proj.bias", f"{PATH}.dt_bias"),
    Row(f"{MIXER}.A_log", f"{PATH}.a_log"),
    Row(f"{MIXER}.D", f"{PATH}.skip"),
    Row(f"{MIXER}.out_proj.weight", f"{PATH}.output", "o i -> i o"),
    Row(f"{MIXER}.out_proj.bias", f"{PATH}.output_bias"),
]
"""The rows of a Mamba mixer, also in hybrids."""


def _rows_mamba(cfg: DecoderConfig) -> list[Row]:
    return [*outer_rows(cfg), *MAMBA1_ROWS]


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
        ("falcon_mamba", "FalconMambaForCausalLM", _read_falcon, _write_falcon, _rows_mamba),
        ("mamba2", "Mamba2ForCausalLM", _read_mamba2, _write_mamba2, _rows_mamba2),
    )
]
