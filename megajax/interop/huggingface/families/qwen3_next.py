"""Qwen3-Next and Qwen3.5: gated delta nets and, in every fourth layer, attention with a gate on its output.

Qwen3-Next has one matrix of queries, keys, values and gates, and one of corrections and steps, whose rows are sorted by
key head. Qwen3.5 has separate ones.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from megajax.checkpoint.weights.name_mapping import Row
from megajax.interop.huggingface import decoders
from megajax.interop.huggingface.decoders import LAYER, outer_rows
from megajax.interop.huggingface.families import qwen_moe
from megajax.interop.huggingface.family import Names, Settings, layers_of, to_settings
from megajax.interop.huggingface.rotary import FULL
from megajax.layers.attention.config import AttentionConfig
from megajax.layers.delta.config import GatedDeltaNetConfig
from megajax.layers.norm.config import RMSNormConfig
from megajax.models.decoder.config import DecoderConfig

LINEAR = "linear_attention"
DELTA: Names = {
    "heads": ("linear_num_value_heads", 32),
    "key_heads": ("linear_num_key_heads", 16),
    "head_dim": ("linear_value_head_dim", 128),
    "key_dim": ("linear_key_head_dim", 128),
    "conv_kernel": ("linear_conv_kernel_dim", 4),
}
DEFAULTS = {
    "num_attention_heads": 16,
    "head_dim": 256,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 32768,
    "partial_rotary_factor": 0.25,
    "full_attention_interval": 4,
}
EXPERTS = {"hidden_size": 2048, "num_key_value_heads": 2, "moe_intermediate_size": 512}
EXPERTS |= {"shared_expert_intermediate_size": 512, "intermediate_size": 5632, "decoder_sparse_step": 1}
SIZES = {
    "qwen3_next": EXPERTS
    | {"num_hidden_layers": 48, "vocab_size": 151936, "num_experts": 512, "num_experts_per_tok": 10},
    "qwen3_5_moe_text": EXPERTS
    | {"num_hidden_layers": 40, "vocab_size": 248320, "num_experts": 256, "num_experts_per_tok": 8},
    "qwen3_5_text": {"hidden_size": 4096, "num_hidden_layers": 32, "vocab_size": 248320}
    | {"num_key_value_heads": 4, "intermediate_size": 12288},
}
IMAGE_POSITIONS = ("mrope_section", "mrope_interleaved")
"""Settings of rotary positions of images: those of text are the same in all three dimensions."""


def _read(name: str, settings: Settings) -> DecoderConfig:
    settings.assume({**DEFAULTS, **SIZES[name]})
    settings.only("attn_output_gate", True)
    for name_of_rope in ("rope_parameters", "rope_scaling"):
        values = settings.take(name_of_rope, {})
        settings.remaining[name_of_rope] = {k: v for k, v in values.items() if k not in IMAGE_POSITIONS}
    epsilon, bias = settings.peek("rms_norm_eps"), settings.take("attention_bias", False)
    centred = RMSNormConfig(epsilon=epsilon, zero_centred=True)
    attention = decoders.attention(settings, partial=True, bias=bias, qk_norm=centred, gate=True)
    delta = GatedDeltaNetConfig(**settings.fields(DELTA), norm_epsilon=epsilon)
    mlp, every, layers = decoders.gated_mlp(settings), settings.count("full_attention_interval"), settings.layers()
    settings.remaining["num_hidden_layers"] = layers
    if mlp.activation != "silu":
        settings.refuse("hidden_act", mlp.activation, "only silu is supported, which convolutions have too")
    kinds = decoders.layer_types(settings, layers, LINEAR, lambda layer: (layer + 1) % every > 0)
    has_experts = "num_experts" in SIZES[name]
    return decoders.decoder(
        settings,
        [delta if kind == LINEAR else attention for kind in kinds],
        qwen_moe.feed_forward(settings, mlp, shared=True, normalised=True) if has_experts else lambda _: mlp,
        zero_centred=True,
    )


def _write(name: str, cfg: Any) -> dict[str, Any]:
    mixers = [block.mixer for block in layers_of(cfg)]
    delta = next((mixer for mixer in mixers if isinstance(mixer, GatedDeltaNetConfig)), None)
    if delta is None:
        raise ValueError("no layer is a gated delta net")
    experts: dict[str, Any] = {}
    if "num_experts" in SIZES[name]:
        moe = decoders.feed_forwards(cfg).moe
        experts = {**decoders.write(cfg, moe=moe), **qwen_moe.write_experts(cfg)}
        experts["shared_expert_intermediate_size"] = moe.shared.mlp.ffn
    return {
        **(experts or decoders.write(cfg)),
        **to_settings(replace(delta, key_heads=delta.groups), DELTA),
        "layer_types": [LINEAR if isinstance(mixer, GatedDeltaNetConfig) else FULL for mixer in mixers],
    }


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
    return [replace(row, requires=f"{path}.query") for row in rows]


def _rows(name: str, cfg: DecoderConfig) -> list[Row]:
    mixers = [block.mixer for block in layers_of(cfg)]
    groups = [mixer.groups for mixer in mixers if isinstance(mixer, GatedDeltaNetConfig)]
    heads = [mixer.heads for mixer in mixers if isinstance(mixer, AttentionConfig)]
    by_key_head = name == "qwen3_next"
    return [
        *outer_rows(cfg),
        *decoders.NORMS,
        *(row for count in heads[:1] for row in _attention_rows(count)),
        *(row for count in groups[:1] for row in (_inputs_by_key_head(count) if by_key_head else SEPARATE_INPUTS)),
        *DELTA_ROWS,
        *qwen_moe.FEED_FORWARD,
    ]


FAMILIES = [
    decoders.family(
        name,
        architecture,
        read=partial(_read, name),
        write=partial(_write, name),
        rows=partial(_rows, name),
        unused=frozenset({"mamba_ssm_dtype", "mtp_*"}),
        # The multi-token prediction block, which transformers does not read either.
        ignored=("mtp.*",),
        extra=("mtp.*",),
    )
    for name, architecture in (
        ("qwen3_next", "Qwen3NextForCausalLM"),
        ("qwen3_5_text", "Qwen3_5ForCausalLM"),
        ("qwen3_5_moe_text", "Qwen3_5MoeForCausalLM"),
    )
]
