"""Weights by Megatron-LM's names: the rule their values come from, and the way to MegaJAX's paths and back.

Linear weights are (out, in). `linear_qkv` has, for each key-value head, the rows of its query heads, then of the key,
then of the value. A gated `linear_fc1` has the gate's rows, then the other's.
"""

import zlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import numpy as np

from megajax.layers.config import AttentionConfig, GatedMLPConfig, LayerNormConfig, NormConfig
from megajax.models.config import DecoderConfig

type Arrays = Mapping[str, np.ndarray]


@dataclass(frozen=True)
class Piece:
    """One of their weights: which of ours it holds, and how."""

    paths: tuple[str, ...]
    layer: int | None
    """Place along the leading dimension of ours; None where ours has no such dimension."""
    split: Callable[[np.ndarray], tuple[np.ndarray, ...]]
    """Theirs -> ours, in the order of `paths`."""
    join: Callable[..., np.ndarray]
    """Ours, in the order of `paths` -> theirs."""


def _same(path: str, layer: int | None = None) -> Piece:
    return Piece((path,), layer, lambda w: (w,), lambda w: w)


def _transposed(path: str, layer: int) -> Piece:
    return Piece((path,), layer, lambda w: (w.T,), lambda w: w.T)


def _table(path: str, cfg: DecoderConfig) -> Piece:
    """Ours has padding rows at the end."""
    padding = cfg.padded_vocabulary() - cfg.vocabulary_size
    return Piece((path,), None, lambda w: (np.pad(w, ((0, padding), (0, 0))),), lambda w: w[: cfg.vocabulary_size])


def _qkv(mixer: AttentionConfig, size: int, paths: tuple[str, str, str], layer: int) -> Piece:
    """Rows of all groups; a matrix's second dimension comes first with us."""
    groups = mixer.groups()
    each = mixer.heads // groups

    def split(w: np.ndarray) -> tuple[np.ndarray, ...]:
        rows = w.reshape(groups, each + 2, size, *w.shape[1:])
        parts = (rows[:, :each].reshape(mixer.heads, size, *w.shape[1:]), rows[:, each], rows[:, each + 1])
        return tuple(np.moveaxis(part, -1, 0) if w.ndim == 2 else part for part in parts)

    def join(*parts: np.ndarray) -> np.ndarray:
        query, key, value = (np.moveaxis(part, 0, -1) if part.ndim == 3 else part for part in parts)
        rest = query.shape[2:]
        rows = [query.reshape(groups, each, size, *rest), key[:, None], value[:, None]]
        return np.concatenate(rows, axis=1).reshape(groups * (each + 2) * size, *rest)

    return Piece(paths, layer, split, join)


def _output(mixer: AttentionConfig, size: int, path: str, layer: int) -> Piece:
    return Piece(
        (path,), layer, lambda w: (w.T.reshape(mixer.heads, size, -1),), lambda w: w.reshape(-1, w.shape[-1]).T
    )


def _halves(paths: tuple[str, str], layer: int) -> Piece:
    """[gate; up], of a matrix or of a bias."""
    return Piece(
        paths,
        layer,
        lambda w: tuple(half.T for half in np.split(w, 2)),
        lambda gate, up: np.concatenate([gate.T, up.T]),
    )


def _norm(name: str, path: str, cfg: NormConfig, layer: int | None) -> dict[str, Piece]:
    found = {f"{name}.weight": _same(f"{path}.gain", layer)}
    if isinstance(cfg, LayerNormConfig):
        found[f"{name}.bias"] = _same(f"{path}.bias", layer)
    return found


def _layer(number: int, cfg: DecoderConfig) -> dict[str, Piece]:
    repeat, place = divmod(number, len(cfg.stack.pattern))
    block, name, path = cfg.stack.pattern[place], f"decoder.layers.{number}", f"stack.blocks.{place}"
    size, gated = block.mixer.size(cfg.hidden), isinstance(block.mlp, GatedMLPConfig)
    mixer, mlp = f"{path}.mixer", f"{path}.mlp"
    found = _norm(f"{name}.input_layernorm", f"{path}.mixer_norm", block.norm, repeat)
    found[f"{name}.self_attention.linear_proj.weight"] = _output(block.mixer, size, f"{mixer}.output", repeat)
    if block.mixer.bias:
        found[f"{name}.self_attention.linear_proj.bias"] = _same(f"{mixer}.output_bias", repeat)
    parts = tuple(f"{mixer}.{part}" for part in ("query", "key", "value"))
    found[f"{name}.self_attention.linear_qkv.weight"] = _qkv(block.mixer, size, parts, repeat)
    if block.mixer.bias:
        biases = tuple(f"{part}_bias" for part in parts)
        found[f"{name}.self_attention.linear_qkv.bias"] = _qkv(block.mixer, size, biases, repeat)
    found |= _norm(f"{name}.pre_mlp_layernorm", f"{path}.mlp_norm", block.norm, repeat)
    up, down = f"{name}.mlp.linear_fc1", f"{name}.mlp.linear_fc2"
    found[f"{up}.weight"] = _halves((f"{mlp}.gate", f"{mlp}.up"), repeat) if gated else _transposed(f"{mlp}.up", repeat)
    if block.mlp.bias:
        found[f"{up}.bias"] = (
            _halves((f"{mlp}.gate_bias", f"{mlp}.up_bias"), repeat) if gated else _same(f"{mlp}.up_bias", repeat)
        )
    found[f"{down}.weight"] = _transposed(f"{mlp}.down", repeat)
    if block.mlp.bias:
        found[f"{down}.bias"] = _same(f"{mlp}.down_bias", repeat)
    return found


def pieces(cfg: DecoderConfig) -> dict[str, Piece]:
    """Megatron-LM's name -> its place in ours, in the order of its named_parameters()."""
    found = {"embedding.word_embeddings.weight": _table("tokens", cfg)}
    if cfg.learned_positions:
        found["embedding.position_embeddings.weight"] = _same("positions")
    for number in range(cfg.stack.layers()):
        found |= _layer(number, cfg)
    found |= _norm("decoder.final_layernorm", "norm", cfg.norm, None)
    if not cfg.tied:
        found["output_layer.weight"] = _table("head", cfg)
    return found


def to_megatron(cfg: DecoderConfig, ours: Arrays) -> dict[str, np.ndarray]:
    """Our weights, or gradients, by path -> theirs by name."""

    def held(path: str, layer: int | None) -> np.ndarray:
        return np.asarray(ours[path] if layer is None else ours[path][layer])

    return {name: piece.join(*[held(path, piece.layer) for path in piece.paths]) for name, piece in pieces(cfg).items()}


def to_ours(cfg: DecoderConfig, theirs: Arrays) -> dict[str, np.ndarray]:
    """Their weights by name -> ours by path. Raises ValueError when the names are not those the config has."""
    table = pieces(cfg)
    if set(table) != set(theirs):
        raise ValueError(f"names differ: {sorted(set(table) ^ set(theirs))}")
    whole: dict[str, np.ndarray] = {}
    layers: dict[str, dict[int, np.ndarray]] = {}
    for name, piece in table.items():
        for path, part in zip(piece.paths, piece.split(theirs[name]), strict=True):
            if piece.layer is None:
                whole[path] = part
            else:
                layers.setdefault(path, {})[piece.layer] = part
    return whole | {path: np.stack([parts[i] for i in range(len(parts))]) for path, parts in layers.items()}


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
        found = flat[:: max(1, flat.size // 32)][:32]
        row[: found.size] = found
    return rows


def stats(arrays: Arrays) -> np.ndarray:
    """[P, 3] float64: L2 norm, sum and largest absolute value of each array."""
    wide = [array.astype(np.float64) for array in arrays.values()]
    return np.array([[np.sqrt(np.sum(w * w)), w.sum(), np.abs(w).max()] for w in wide])
