"""Spellings of Megatron-LM's names, brought to those of the tables: a name for each layer and each expert."""

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np

from megajax.checkpoint.weights.foreign import Entry

FUSED_NORMS: Mapping[str, str] = {
    "self_attention.linear_qkv": "input_layernorm",
    "self_attention.linear_q_up_proj": "self_attention.q_layernorm",
    "self_attention.linear_kv_up_proj": "self_attention.kv_layernorm",
    "mlp.linear_fc1": "pre_mlp_layernorm",
    "mixer.in_proj": "norm",
}
"""Matrices of Transformer Engine's layers -> the norm before them, whose gain and bias they keep as layer_norm_*."""
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
"""Tensors with a row for each token, and rows of padding behind them."""
POSITIONS = re.compile(r"(^|\.)position_embeddings\.weight$")
WITHOUT_WEIGHTS = (
    "*_extra_state*", "*.rotary_pos_emb.inv_freq", "rotary_pos_emb.inv_freq", "*.local_tokens_per_expert",
    "*.rope.inv_freq", "*.global_tokens_per_expert", "*.ga_steps",
)  # fmt: skip
"""Names of tensors that are no weights."""


@dataclass(frozen=True, slots=True)
class LazyTensor:
    """A tensor, or part of one, that is read or made when it is needed."""

    shape: tuple[int, ...]
    dtype: np.dtype
    read: Callable[[], np.ndarray]


class NamedTensors:
    """`megajax.checkpoint.weights.foreign.Tensors` of parts by name."""

    def __init__(self, where: str, parts: Mapping[str, LazyTensor]):
        self.where, self._parts = where, parts

    def entries(self) -> Mapping[str, Entry]:
        return {name: Entry(part.shape, part.dtype) for name, part in self._parts.items()}

    def read(self, name: str) -> np.ndarray:
        return self._parts[name].read()


def without_padding(name: str, part: LazyTensor, shape: tuple[int, ...]) -> LazyTensor:
    """A tensor as the model has it: of tables by tokens or positions, the first rows, where theirs has more."""
    longer = len(part.shape) == len(shape) and part.shape[0] > shape[0] and part.shape[1:] == shape[1:]
    if longer and (TOKENS.search(name) or POSITIONS.search(name)):
        return LazyTensor(shape, part.dtype, lambda: part.read()[: shape[0]])
    return part


def plain(name: str) -> str:
    """A name of one layer, and if any of one expert, as the tables have it."""
    for pattern, replacement in SPELLINGS:
        name = pattern.sub(replacement, name)
    if match := EXPERTS.match(name):
        return f"{match[1]}.local_experts.{match[2]}.{match[3]}"
    return name


def unstacked(name: str, shape: tuple[int, ...]) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Names of the tensors along the leading dimensions of an array, each with its index: of layers and experts.

    A distributed checkpoint has the layers of a homogeneous model in one array, and the experts of a layer in one.
    """
    layer, expert = LAYERS.match(name), EXPERTS.match(name)
    stacked = [layer is not None and layer[2] is None, expert is not None and expert[2] is None]
    for index in np.ndindex(*shape[: sum(stacked)]):
        numbers, each = iter(index), name
        if stacked[0] and layer:
            each = f"{layer[1]}.{next(numbers)}.{layer[3]}"
        if stacked[1] and (match := EXPERTS.match(each)):
            each = f"{match[1]}.local_experts.{next(numbers)}.{match[3]}"
        yield plain(each), index


def flattened(content: Any, prefix: str = "", depth: int = 0) -> Iterator[tuple[str, Any]]:
    """Dotted names and values of nested mappings."""
    if depth > MOST_LEVELS or not isinstance(content, dict):
        return
    for key, value in content.items():
        if isinstance(value, dict):
            yield from flattened(value, f"{prefix}{key}.", depth + 1)
        else:
            yield f"{prefix}{key}", value


MOST_LEVELS = 12
"""Of nested mappings: a mapping may hold itself."""


def experts_of(name: str, part: LazyTensor, count: int) -> Iterator[tuple[str, LazyTensor]]:
    """The experts of a tensor of one rank, or the tensor itself, with its number among those of the rank.

    count: of the rank's experts.
    """
    if match := GROUPED.match(name):
        left, _, kind = match[1].rpartition(".linear_fc")
        yield f"{left}.local_experts.{match[2]}.linear_fc{kind}", part
    elif match := PACKED.match(name):
        rows, columns = part.shape
        # (in, experts * out) viewed as (experts, in, out) by megatron.core; of the second, (experts * in, out).
        inner = (rows, columns // count) if match[2] == "1" else (rows // count, columns)
        for number in range(count):
            read = _packed(part, (count, *inner), number)
            named = f"{match[1]}.local_experts.{number}.linear_fc{match[2]}.weight"
            yield named, LazyTensor(inner[::-1], part.dtype, read)
    else:
        yield name, part


def _packed(part: LazyTensor, shape: tuple[int, ...], number: int) -> Callable[[], np.ndarray]:
    if prod(shape) != prod(part.shape):
        raise ValueError(f"{part.shape} is not a packing of {shape[0]} experts")
    return lambda: part.read().reshape(shape)[number].T
