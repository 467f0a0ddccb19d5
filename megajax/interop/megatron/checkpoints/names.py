"""Conversion of Megatron-LM's spellings of names to those of the tables: a name for each layer and each expert."""

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np

from megajax.checkpoint.weight_source import Entry

FUSED_NORMS: Mapping[str, str] = {
    "self_attention.linear_qkv": "input_layernorm",
    "self_attention.linear_q_up_proj": "self_attention.q_layernorm",
    "self_attention.linear_kv_up_proj": "self_attention.kv_layernorm",
    "mlp.linear_fc1": "pre_mlp_layernorm",
    "mixer.in_proj": "norm",
}
"""Matrix of a Transformer Engine layer -> the norm before it; the layer stores its gain and bias as layer_norm_*."""
SPELLINGS = tuple(
    (re.compile(pattern), name)
    for pattern, name in (
        *((rf"\.{re.escape(m)}\.layer_norm_(weight|bias)$", rf".{norm}.\1") for m, norm in FUSED_NORMS.items()),
        # Older names.
        (r"\.mixer\.conv1d\.(weight|bias)$", r".mixer.conv1d_\1"),
        (r"^(mtp\.layers\.\d+)\.transformer_layer\.", r"\1.mtp_model_layer."),
    )
)
LAYERS = re.compile(r"^(.*\blayers)\.(?:(\d+)\.)?(.*)$")
EXPERTS = re.compile(r"^(.*\bmlp\.experts)\.(?:experts|local_experts)\.(?:(\d+)\.)?(linear_fc[12]\..*)$")
GROUPED = re.compile(r"^(.*\bmlp\.experts\.linear_fc[12]\.(?:weight|bias))(\d+)$")
"""An expert of Transformer Engine's grouped layers."""
PACKED = re.compile(r"^(.*\bmlp\.experts)\.weight([12])$")
"""All experts of a file in one matrix (in, experts * out)."""
TOKENS = re.compile(r"(^|\.)(word_embeddings|output_layer)\.(weight|bias)$")
"""Tensors with a row for each token, followed by padding rows."""
POSITIONS = re.compile(r"(^|\.)position_embeddings\.weight$")
WITHOUT_WEIGHTS = (
    "*_extra_state*", "*.rotary_pos_emb.inv_freq", "rotary_pos_emb.inv_freq", "*.local_tokens_per_expert",
    "*.rope.inv_freq", "*.global_tokens_per_expert", "*.ga_steps",
)  # fmt: skip
"""Patterns of names of tensors that hold no weights."""


@dataclass(frozen=True, slots=True)
class LazyTensor:
    """A tensor, or a part of one, that `read` reads or computes on demand."""

    shape: tuple[int, ...]
    dtype: np.dtype
    read: Callable[[], np.ndarray]


class NamedTensors:
    """`megajax.interop.weights.foreign.Tensors` of parts by name."""

    def __init__(self, where: str, parts: Mapping[str, LazyTensor]):
        self.where, self._parts = where, parts
        self.entries = {name: Entry(part.shape, part.dtype) for name, part in parts.items()}

    def read(self, name: str) -> np.ndarray:
        return self._parts[name].read()


def without_padding(name: str, part: LazyTensor, shape: tuple[int, ...]) -> LazyTensor:
    """A tensor without padding: only the first rows of a larger table of tokens or positions."""
    longer = len(part.shape) == len(shape) and part.shape[0] > shape[0] and part.shape[1:] == shape[1:]
    if longer and (TOKENS.search(name) or POSITIONS.search(name)):
        return LazyTensor(shape, part.dtype, lambda: part.read()[: shape[0]])
    return part


def plain(name: str) -> str:
    """The name in the tables of a tensor of one layer, or of one expert in it."""
    for pattern, replacement in SPELLINGS:
        name = pattern.sub(replacement, name)
    if match := EXPERTS.match(name):
        return f"{match[1]}.local_experts.{match[2]}.{match[3]}"
    return name


def unstacked(name: str, shape: tuple[int, ...]) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Names and indices of the tensors along the leading dimensions of an array, those of layers and experts.

    A distributed checkpoint stacks the layers of a homogeneous model in one array, and the experts of a layer.
    """
    layer, expert = LAYERS.match(name), EXPERTS.match(name)
    stacked = [layer is not None and layer[2] is None, expert is not None and expert[2] is None]
    for index in np.ndindex(*shape[: sum(stacked)]):
        numbers, tensor_name = iter(index), name
        if stacked[0] and layer:
            tensor_name = f"{layer[1]}.{next(numbers)}.{layer[3]}"
        if stacked[1] and (match := EXPERTS.match(tensor_name)):
            tensor_name = f"{match[1]}.local_experts.{next(numbers)}.{match[3]}"
        yield plain(tensor_name), index


def flattened(content: object, prefix: str = "", depth: int = 0) -> Iterator[tuple[str, Any]]:
    """Dotted names and values of nested mappings."""
    if depth > MOST_LEVELS or not isinstance(content, dict):
        return
    for key, value in content.items():
        if isinstance(value, dict):
            yield from flattened(value, f"{prefix}{key}.", depth + 1)
        else:
            yield f"{prefix}{key}", value


MOST_LEVELS = 12
"""Largest depth of nested mappings, because a mapping may contain itself."""


def experts_of(name: str, part: LazyTensor, count: int) -> Iterator[tuple[str, LazyTensor]]:
    """The experts of a tensor of one rank, or the tensor itself. Experts are numbered within the rank.

    count: number of experts of the rank.
    """
    if match := GROUPED.match(name):
        prefix, _, kind = match[1].rpartition(".linear_fc")
        yield f"{prefix}.local_experts.{match[2]}.linear_fc{kind}", part
    elif match := PACKED.match(name):
        rows, columns = part.shape
        # (in, experts * out) viewed as (experts, in, out) by megatron.core; of the second, (experts * in, out).
        inner = (rows, columns // count) if match[2] == "1" else (rows // count, columns)
        for number in range(count):
            read = _packed(part, (count, *inner), number)
            expert_name = f"{match[1]}.local_experts.{number}.linear_fc{match[2]}.weight"
            yield expert_name, LazyTensor(inner[::-1], part.dtype, read)
    else:
        yield name, part


def _packed(part: LazyTensor, shape: tuple[int, ...], number: int) -> Callable[[], np.ndarray]:
    if prod(shape) != prod(part.shape):
        raise ValueError(f"{part.shape} is not a packing of {shape[0]} experts")
    return lambda: part.read().reshape(shape)[number].T
