"""Weights by Megatron-LM's names: the rule of their values, and the mapping to MegaJAX's paths and back."""

import zlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from megajax.interop.megatron.checkpoints.tables import blocks, table
from megajax.interop.weights.foreign import declared_by
from megajax.interop.weights.name_mapping import MappedTensor, Row, resolved
from megajax.models.vision.config import VisionTowerConfig

type Arrays = Mapping[str, np.ndarray]

ORDER = (
    "class_token", "ln_pre", "ln_post", "conv1", "embedding", "word_embeddings", "position_embeddings",
    "tokentype_embeddings", "encoder_relative_pos_emb", "decoder_relative_pos_emb", "encoder", "decoder", "mtp",
    "enorm", "hnorm", "eh_proj", "mtp_model_layer", "layers", "input_layernorm", "self_attention", "core_attention",
    "linear_proj", "linear_qkv", "linear_q", "linear_kv", "linear_q_proj", "linear_q_down_proj", "linear_q_up_proj",
    "linear_kv_down_proj", "linear_kv_up_proj", "q_layernorm", "k_layernorm", "kv_layernorm",
    "pre_cross_attn_layernorm", "cross_attention", "pre_mlp_layernorm", "mlp", "router", "experts", "local_experts",
    "shared_experts", "gate_weight", "linear_fc1", "linear_fc2", "mixer", "conv1d_weight", "conv1d_bias", "dt_bias",
    "A_log", "D", "in_proj", "norm", "out_proj", "final_layernorm", "final_norm", "lm_head", "dense", "layer_norm",
    "output_layer", "binary_head", "pooler", "weight", "bias",
)  # fmt: skip
"""Parts of names in the order in which Megatron-LM's modules are created, which is that of its named_parameters()."""


def tensors(cfg: Any) -> dict[str, MappedTensor]:
    """Megatron-LM's name -> its place in ours, in the order of its named_parameters()."""
    rows = images_table(cfg) if isinstance(cfg, VisionTowerConfig) else table(cfg)
    declared = declared_by(cfg)
    weights = [
        one for one in resolved(rows, declared) if all(declared[piece.path].updater is None for piece in one.pieces)
    ]
    return {one.name: one for one in sorted(weights, key=lambda one: _place(one.name))}


def _place(name: str) -> list[int]:
    return [int(part) if part.isdigit() else ORDER.index(part) if part in ORDER else -1 for part in name.split(".")]


def images_table(cfg: VisionTowerConfig) -> Sequence[Row]:
    """The names of a CLIPViTModel's weights."""
    patch = {"a": cfg.patch, "b": cfg.patch}
    return [
        Row("class_token", "class_tokens", "1 n d -> n d"),
        *[
            Row(f"{theirs}.{a}", f"{ours}.{b}")
            for theirs, ours in (("ln_pre", "entry_norm"), ("ln_post", "norm"))
            for a, b in (("weight", "gain"), ("bias", "bias"))
        ],
        Row("conv1.weight", "patches", "d c a b -> (a b c) d", sizes=patch),
        Row("conv1.bias", "patch_bias"),
        Row("position_embeddings.weight", "positions"),
        *blocks("decoder.layers.{layer}", "stack.*", [block for block, _ in cfg.stack.stored()], cfg.hidden),
    ]


def to_megatron(cfg: Any, ours: Arrays) -> dict[str, np.ndarray]:
    """Our weights, or gradients, by path -> theirs by name, without our padding."""
    return {
        name: one.from_weights([np.asarray(ours[piece.path])[piece.index] for piece in one.pieces])
        for name, one in tensors(cfg).items()
    }


def to_ours(cfg: Any, theirs: Arrays) -> dict[str, np.ndarray]:
    """Their weights by name -> ours by path. Raises ValueError when the names are not those the config has."""
    places, declared = tensors(cfg), declared_by(cfg)
    if set(places) != set(theirs):
        raise ValueError(f"names differ: {sorted(set(places) ^ set(theirs))}")
    made: dict[str, np.ndarray] = {}
    for name, one in places.items():
        for piece, part in zip(one.pieces, one.to_weights(theirs[name]), strict=True):
            made.setdefault(piece.path, np.zeros(declared[piece.path].shape, part.dtype))[piece.index] = part
    return made


def weight_by_rule(name: str, shape: Iterable[int]) -> np.ndarray:
    """Values that follow from the name: 0.08 * N(0, 1), around 1 for gains; exact in float16, float32 here."""
    values = np.random.RandomState(zlib.crc32(name.encode())).standard_normal(tuple(shape)) * 0.08
    if values.ndim == 1 and "norm" in name and name.endswith("weight"):
        values = values + 1.0
    return values.astype(np.float16).astype(np.float32)


def strided(arrays: Arrays) -> np.ndarray:
    """[P, 32]: 32 values of each array at equal distances of its flat form, zeros after them."""
    rows = np.zeros((len(arrays), 32), np.float32)
    for row, array in zip(rows, arrays.values(), strict=True):
        flat = array.reshape(-1)
        actual = flat[:: max(1, flat.size // 32)][:32]
        row[: actual.size] = actual
    return rows


def stats(arrays: Arrays) -> np.ndarray:
    """[P, 3] float64: L2 norm, sum and largest absolute value of each array."""
    wide = [array.astype(np.float64) for array in arrays.values()]
    return np.array([[np.sqrt(np.sum(w * w)), w.sum(), np.abs(w).max()] for w in wide])
