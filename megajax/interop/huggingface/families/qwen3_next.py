"""Qwen3-Next and Qwen3.5: gated delta nets and, in every fourth layer, attention with a gate on its output.

Qwen3-Next has one matrix of queries, keys, values and gates, and one of corrections and steps, whose rows are sorted by
key head. Qwen3.5 has separate ones.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from megajax.interop.huggingface import decoders
from megajax.interop.huggingface.decoders import LAYER
from megajax.interop.huggingface.families import qwen_moe
from megajax.interop.huggingface.family import Names, Settings, layers_of, to_settings
from megajax.interop.huggingface.rotary import FULL, LINEAR
from megajax.interop.huggingface.tables import Decoder, Positions, sizes
from megajax.interop.weights.name_mapping import Row
from megajax.layers.attention.config import AttentionConfig
from megajax.layers.delta.config import GatedDeltaNetConfig
from megajax.layers.norm.config import RMSNormConfig
from megajax.models.decoder.config import DecoderConfig

DELTA: Names = {
    "heads": ("linear_num_value_heads", 32),
    "key_heads": ("linear_num_key_heads", 16),
    "head_dim": ("linear_value_head_dim", 128),
    "key_dim": ("linear_key_head_dim", 128),
    "conv_kernel": ("linear_conv_kernel_dim", 4),
}
EXPERTS = {"moe_intermediate_size": 512, "shared_expert_intermediate_size": 512, "decoder_sparse_step": 1}
IMAGE_POSITIONS = ("mrope_section", "mrope_interleaved")
"""Settings of rotary positions of images: those of text are the same in all three dimensions."""


def _prepare(settings: Settings) -> None:
    settings.assume({"full_attention_interval": 4})
    settings.only("attn_output_gate", True)
    settings.only("hidden_act", "silu", "swish")  # which convolutions have too
    for name in ("rope_parameters", "rope_scaling"):
        values = settings.take(name, {})
        settings.remaining[name] = {k: v for k, v in values.items() if k not in IMAGE_POSITIONS}


def _mixers(settings: Settings, attention: Sequence[AttentionConfig]) -> list[Any]:
    delta = GatedDeltaNetConfig(**settings.fields(DELTA), norm_epsilon=settings.peek("rms_norm_eps"))
    every = settings.count("full_attention_interval")
    kinds = decoders.layer_types(settings, len(attention), LINEAR, lambda layer: (layer + 1) % every > 0)
    return [delta if kind == LINEAR else mixer for kind, mixer in zip(kinds, attention, strict=True)]


def _written(cfg: DecoderConfig) -> dict[str, Any]:
    mixers = [block.mixer for block in layers_of(cfg)]
    delta = next((mixer for mixer in mixers if isinstance(mixer, GatedDeltaNetConfig)), None)
    if delta is None:
        raise ValueError("no layer is a gated delta net")
    kinds = [LINEAR if isinstance(mixer, GatedDeltaNetConfig) else FULL for mixer in mixers]
    return {**to_settings(replace(delta, key_heads=delta.groups), DELTA), "layer_types": kinds}


def _of_delta(tensor: str, names: Sequence[str], *patterns: str, **more: Any) -> Row:
    """A tensor of a gated delta net; one pattern, or one for each weight."""
    paths = tuple(f"stack.*.mixer.{name}" for name in names)
    tensor, pattern = f"{LAYER}.linear_attn.{tensor}", patterns[0] if len(patterns) == 1 else patterns
    return Row(tensor, paths if len(paths) > 1 else paths[0], pattern, requires="stack.*.mixer.a_log", **more)


def _inputs_by_key_head(groups: int) -> list[Row]:
    """The matrices of inputs of Qwen3-Next."""
    key, value = "g k d -> d g k", "g (r v) d -> d (g r) v"
    sorted_rows: dict[str, Any] = {"split": "(g x) d -> g x d", "axis": 1, "sizes": {"g": groups}}
    return [
        _of_delta("in_proj_qkvz.weight", ("in_q", "in_k", "in_v", "in_z"), key, key, value, value, **sorted_rows),
        _of_delta("in_proj_ba.weight", ("in_b", "in_a"), "g r d -> d (g r)", **sorted_rows),
    ]


SEPARATE_INPUTS = [
    _of_delta("in_proj_qkv.weight", ("in_q", "in_k", "in_v"), "(n h) d -> d n h"),
    _of_delta("in_proj_z.weight", ("in_z",), "(n h) d -> d n h"),
    *[_of_delta(f"in_proj_{name}.weight", (f"in_{name}",), "n d -> d n") for name in "ab"],
]
"""The matrices of inputs of Qwen3.5."""
DELTA_ROWS = [
    _of_delta("conv1d.weight", ("conv_q.kernel", "conv_k.kernel", "conv_v.kernel"), "(n h) 1 k -> k n h"),
    _of_delta("dt_bias", ("dt_bias",), ""),
    _of_delta("A_log", ("a_log",), ""),
    _of_delta("norm.weight", ("norm_gain",), ""),
    _of_delta("out_proj.weight", ("output",), "d (n h) -> n h d"),
]


def _attention_rows(heads: int) -> list[Row]:
    """Attention whose q_proj has the query and the gate of each head."""
    path, rows = "stack.*.mixer", [row for row in decoders.MIXER if ".q_proj." not in row.tensor]
    parts: dict[str, Any] = {"axis": 1, "sizes": {"n": heads}}
    query, biases = (f"{path}.query", f"{path}.gate"), (f"{path}.query_bias", f"{path}.gate_bias")
    rows.append(Row(f"{LAYER}.self_attn.q_proj.weight", query, "n h d -> d n h", split="(n x) d -> n x d", **parts))
    rows.append(Row(f"{LAYER}.self_attn.q_proj.bias", biases, split="(n x) -> n x", **parts))
    return rows


def _with_mixers(by_key_head: bool, rows: list[Row], cfg: DecoderConfig) -> list[Row]:
    """by_key_head: whether the matrices of inputs are sorted by key head."""
    mixers = [block.mixer for block in layers_of(cfg)]
    groups = [mixer.groups for mixer in mixers if isinstance(mixer, GatedDeltaNetConfig)]
    heads = [mixer.heads for mixer in mixers if isinstance(mixer, AttentionConfig)]
    return [
        *rows,
        *(row for count in heads[:1] for row in _attention_rows(count)),
        *(row for count in groups[:1] for row in (_inputs_by_key_head(count) if by_key_head else SEPARATE_INPUTS)),
        *DELTA_ROWS,
    ]


COMMON: dict[str, Any] = {
    **{"norm": RMSNormConfig(zero_centred=True), "bias": "attention_bias", "qk_norm": "head", "mixer_rows": ()},
    **{"positions": Positions(fraction=0.25), "mixer": lambda _: {"gate": True}, "prepare": _prepare},
    **{"mixers": _mixers, "written": _written, "unused": ("mamba_ssm_dtype", "mtp_*")},
    # The multi-token prediction block, which transformers does not read either.
    "parts": {"ignored": ("mtp.*",), "extra": ("mtp.*",)},
}
WITH_EXPERTS: dict[str, Any] = {"tensors": qwen_moe.TENSORS, "experts": qwen_moe.shared_experts(normalised=True)}
NEXT, LATER = partial(_with_mixers, True), partial(_with_mixers, False)
TABLES = [
    Decoder(
        "qwen3_next", "Qwen3NextForCausalLM", EXPERTS | sizes(151936, 2048, 5632, 48, 16, 2, 256, 32768)
        | {"num_experts": 512, "num_experts_per_tok": 10},
        **COMMON, **WITH_EXPERTS, finish=NEXT,
    ),
    Decoder(
        "qwen3_5_text", "Qwen3_5ForCausalLM", sizes(248320, 4096, 12288, 32, 16, 4, 256, 32768), **COMMON, finish=LATER
    ),
    Decoder(
        "qwen3_5_moe_text", "Qwen3_5MoeForCausalLM", EXPERTS | sizes(248320, 2048, 5632, 40, 16, 2, 256, 32768)
        | {"num_experts": 256, "num_experts_per_tok": 8},
        **COMMON, **WITH_EXPERTS, finish=LATER,
    ),
]  # fmt: skip
FAMILIES = [table.family() for table in TABLES]
