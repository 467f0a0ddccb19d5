"""Decoders without experts that differ from Llama in biases, norms, rotary positions or the feed-forward.

GLM-4 and its predecessor GLM, Seed-OSS, ERNIE 4.5, Arcee, Nemotron, StarCoder 2, StableLM, Helium and CWM.
"""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

from megajax.checkpoint.weights.name_mapping import Row
from megajax.interop.huggingface import decoders
from megajax.interop.huggingface.decoders import LAYER, MIXER, gated, outer_rows
from megajax.interop.huggingface.families.llama import COMMON
from megajax.interop.huggingface.family import Settings, layers_of, linear, norm
from megajax.layers.block.config import NormPlacement
from megajax.layers.mlp.config import DenseMLPConfig, GatedMLPConfig
from megajax.layers.norm.config import LayerNormConfig, RMSNormConfig
from megajax.models.decoder.config import DecoderConfig


class Kind(NamedTuple):
    """A class of transformers."""

    architecture: str
    defaults: Mapping[str, Any]
    """Values of settings that are missing from config.json."""
    bias: str = ""
    """Setting of the biases of all matrices of attention; "": it has none."""
    qkv_bias: str = ""
    """Setting of the biases of queries, keys and values; "": as `bias`."""
    mlp_bias: str = ""
    epsilon: str = "rms_norm_eps"
    """Setting of the norms' epsilon."""
    norm: RMSNormConfig | LayerNormConfig = RMSNormConfig()
    dense: tuple[str, ...] = ()
    """Names of the two matrices of a feed-forward without a gate."""
    fused: bool = False
    """Gate and up are one tensor."""
    base: float = 10000.0
    """Default of rope_theta."""
    interleaved: bool = False
    fraction: float | None = None
    """Default of partial_rotary_factor; None: whole heads are rotated."""
    placement: NormPlacement = "pre"
    full: int = 0
    """The first of so many layers has no window, if there is no layer_types; 0: the family has no windows."""
    unused: tuple[str, ...] = ()


LLAMA3: dict[str, Any] = {
    "rope_type": "llama3",
    "rope_theta": 1e6,
    "factor": 16.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
}
LLAMA3 |= {"original_max_position_embeddings": 8192}
GLM: dict[str, Any] = {"vocab_size": 151552, "hidden_size": 4096, "intermediate_size": 13696, "num_hidden_layers": 40}
GLM |= {"num_attention_heads": 32, "num_key_value_heads": 2, "head_dim": 128, "rms_norm_eps": 1.5625e-7}
GLM |= {"max_position_embeddings": 131072, "attention_bias": True}
SEED: dict[str, Any] = {
    "vocab_size": 155136,
    "intermediate_size": 27648,
    "num_hidden_layers": 64,
    "num_attention_heads": 80,
}
SEED |= {"num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 524288, "attention_bias": True}
ERNIE: dict[str, Any] = {"vocab_size": 103424, "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 18}
ERNIE |= {"num_attention_heads": 16, "num_key_value_heads": 2, "head_dim": 128, "rms_norm_eps": 1e-5}
ERNIE |= {"max_position_embeddings": 131072, "tie_word_embeddings": True}
ARCEE: dict[str, Any] = {
    "hidden_size": 2560,
    "intermediate_size": 18432,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
}
ARCEE |= {"hidden_act": "relu2"}
NEMOTRON: dict[str, Any] = {
    "vocab_size": 256000,
    "hidden_size": 6144,
    "intermediate_size": 24576,
    "num_attention_heads": 48,
}
NEMOTRON |= {"max_position_embeddings": 4096, "norm_eps": 1e-5, "hidden_act": "relu2"}
CODER: dict[str, Any] = {"vocab_size": 49152, "hidden_size": 3072, "intermediate_size": 12288, "num_hidden_layers": 30}
CODER |= {"num_attention_heads": 24, "num_key_value_heads": 2, "max_position_embeddings": 4096, "use_bias": True}
CODER |= {"norm_epsilon": 1e-5, "hidden_act": "gelu_pytorch_tanh", "tie_word_embeddings": True}
STABLE: dict[str, Any] = {
    "vocab_size": 50304,
    "hidden_size": 2560,
    "intermediate_size": 6912,
    "num_key_value_heads": 32,
}
STABLE |= {"max_position_embeddings": 4096, "layer_norm_eps": 1e-5}
HELIUM: dict[str, Any] = {"vocab_size": 48000, "hidden_size": 2560, "intermediate_size": 7040, "num_hidden_layers": 24}
HELIUM |= {"num_attention_heads": 20, "num_key_value_heads": 20, "head_dim": 128, "rms_norm_eps": 1e-8}
HELIUM |= {"max_position_embeddings": 4096}
CWM: dict[str, Any] = {"vocab_size": 128256, "hidden_size": 6144, "intermediate_size": 21504, "num_hidden_layers": 64}
CWM |= {"num_attention_heads": 48, "num_key_value_heads": 8, "head_dim": 128, "rms_norm_eps": 1e-5}
CWM |= {"max_position_embeddings": 131072, "sliding_window": 8192}
DENSE = ("up_proj", "down_proj")

KINDS = {
    "glm": Kind("GlmForCausalLM", GLM, qkv_bias="attention_bias", fused=True, interleaved=True, fraction=0.5),
    "glm4": Kind(
        "Glm4ForCausalLM", GLM, qkv_bias="attention_bias", fused=True, interleaved=True, fraction=0.5,
        placement="sandwich",
    ),
    "seed_oss": Kind(
        "SeedOssForCausalLM", SEED, bias="attention_out_bias", qkv_bias="attention_bias", mlp_bias="mlp_bias",
        unused=("residual_dropout",),
    ),
    "ernie4_5": Kind(
        "Ernie4_5ForCausalLM", ERNIE, bias="use_bias", mlp_bias="use_bias", base=500000.0, interleaved=True
    ),
    "arcee": Kind("ArceeForCausalLM", ARCEE, "attention_bias", "", "mlp_bias", dense=DENSE),
    "nemotron": Kind(
        "NemotronForCausalLM", NEMOTRON, "attention_bias", "", "mlp_bias", "norm_eps",
        LayerNormConfig(zero_centred=True), DENSE, fraction=0.5,
    ),
    "starcoder2": Kind(
        "Starcoder2ForCausalLM", CODER, "use_bias", "", "use_bias", "norm_epsilon", LayerNormConfig(),
        ("c_fc", "c_proj"), full=1, unused=("residual_dropout", "embedding_dropout", "use_sliding_window"),
    ),
    "stablelm": Kind(
        "StableLmForCausalLM", STABLE, qkv_bias="use_qkv_bias", epsilon="layer_norm_eps", norm=LayerNormConfig(),
        fraction=0.25,
    ),
    "helium": Kind(
        "HeliumForCausalLM", HELIUM, qkv_bias="attention_bias", mlp_bias="mlp_bias", base=100000.0, interleaved=True
    ),
    "cwm": Kind("CwmForCausalLM", CWM, base=1e6, full=4),
}  # fmt: skip


def _read(name: str, settings: Settings) -> DecoderConfig:
    kind = KINDS[name]
    common = {name: value for name, value in COMMON.items() if name != "rms_norm_eps" or name == kind.epsilon}
    settings.assume({**common, "partial_rotary_factor": kind.fraction or 1.0, **kind.defaults})
    if name == "cwm" and not settings.remaining.get("rope_parameters") and not settings.remaining.get("rope_scaling"):
        settings.remaining["rope_parameters"] = LLAMA3
    placement: NormPlacement = kind.placement
    if name == "stablelm":
        settings.only("qk_layernorm", False)
        placement = "parallel" if settings.take("use_parallel_residual", False) else placement
    biases = {setting: settings.take(setting, False) for setting in {kind.bias, kind.qkv_bias, kind.mlp_bias} - {""}}
    bias = biases.get(kind.bias, False)
    qkv_bias = biases.get(kind.qkv_bias, bias)
    mixer = decoders.attention(
        settings,
        base=kind.base,
        partial=kind.fraction is not None,
        bias=bias,
        qkv_bias=None if qkv_bias == bias else qkv_bias,
    )
    if mixer.rope is not None:
        mixer = replace(mixer, rope=replace(mixer.rope, interleaved=kind.interleaved))
    mlp_kind: Any = DenseMLPConfig if kind.dense else GatedMLPConfig
    mlp = mlp_kind(
        ffn=settings.count("intermediate_size"),
        activation=settings.activation("hidden_act", "silu"),
        bias=biases.get(kind.mlp_bias, False),
    )
    return decoders.decoder(
        settings,
        mixer,
        lambda _: mlp,
        slides=(lambda layer: kind.full == 1 or layer % kind.full > 0) if kind.full else None,
        norm=replace(kind.norm, epsilon=settings.need(kind.epsilon)),
        norm_placement=placement,
    )


def _write(name: str, cfg: Any) -> dict[str, Any]:
    kind, block = KINDS[name], layers_of(cfg)[0]
    settings = decoders.write(cfg, *(("sliding_window", "layer_types") if kind.full else ()))
    values = {kind.epsilon: settings.pop("rms_norm_eps"), kind.mlp_bias: block.mlp.bias}
    values |= {kind.bias: settings.pop("attention_bias"), kind.qkv_bias: block.mixer.has_qkv_bias()}
    if name == "stablelm":
        values["use_parallel_residual"] = block.norm_placement == "parallel"
    if kind.fraction is not None:
        values["partial_rotary_factor"] = block.mixer.rope.fraction
    return settings | {setting: value for setting, value in values.items() if setting}


NORMS: Mapping[NormPlacement, Mapping[str, str]] = {
    "pre": {"input_layernorm": "mixer_norm", "post_attention_layernorm": "mlp_norm"},
    "parallel": {"input_layernorm": "norm"},
    "sandwich": {
        "input_layernorm": "mixer_norm",
        "post_self_attn_layernorm": "mixer_output_norm",
        "post_attention_layernorm": "mlp_norm",
        "post_mlp_layernorm": "mlp_output_norm",
    },
}
"""Placement of norms -> name in transformers -> name of the module."""


def _rows(name: str, cfg: DecoderConfig) -> list[Row]:
    kind, tensor, path = KINDS[name], f"{LAYER}.mlp", "stack.*.mlp"
    mlp = gated(tensor, path)
    if kind.fused:
        mlp = [Row(f"{tensor}.gate_up_proj.weight", (f"{path}.gate", f"{path}.up"), "o i -> i o"), *mlp[-2:]]
    if kind.dense:
        pairs = zip(kind.dense, ("up", "down"), strict=True)
        mlp = [row for theirs, matrix in pairs for row in linear(f"{tensor}.{theirs}", f"{path}.{matrix}")]
    norms = NORMS[layers_of(cfg)[0].norm_placement].items()
    return [
        *outer_rows(cfg),
        *MIXER,
        *(row for theirs, module in norms for row in norm(f"{LAYER}.{theirs}", f"stack.*.{module}")),
        *mlp,
    ]


FAMILIES = [
    decoders.family(
        name,
        kind.architecture,
        read=partial(_read, name),
        write=partial(_write, name),
        rows=partial(_rows, name),
        unused=frozenset(kind.unused),
    )
    for name, kind in KINDS.items()
]
