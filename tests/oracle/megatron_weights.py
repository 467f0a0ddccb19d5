"""Weights by Megatron-LM's names: the rule their values come from, and the way to MegaJAX's paths and back.

Linear weights are (out, in). `linear_qkv` has, for each key-value head, the rows of its query heads, then of the key,
then of the value. A gated `linear_fc1` has the gate's rows, then the other's.
"""

import zlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import numpy as np

from megajax.layers.config import (
    AttentionConfig,
    BlockConfig,
    DenseMLPConfig,
    FeedForwardBlockConfig,
    GatedMLPConfig,
    IdentityNormConfig,
    L2NormConfig,
    LatentAttentionConfig,
    LayerNormConfig,
    Mamba2Config,
    MixerBlockConfig,
    MLPConfig,
    MoEConfig,
    NormConfig,
    SelfAttentionConfig,
)
from megajax.layers.config.cross import CrossBlockConfig
from megajax.models.config import BertConfig, DecoderConfig, T5Config, VisionTowerConfig

type Arrays = Mapping[str, np.ndarray]


@dataclass(frozen=True)
class Piece:
    """One of their weights: which of ours it holds, and how."""

    paths: tuple[str, ...]
    layer: int | tuple[int, ...] | None
    """Place along the leading dimension of ours, or along several; None where ours has no such dimension."""
    split: Callable[[np.ndarray], tuple[np.ndarray, ...]]
    """Theirs -> ours, in the order of `paths`."""
    join: Callable[..., np.ndarray]
    """Ours, in the order of `paths` -> theirs."""


def _same(path: str, layer: int | tuple[int, ...] | None = None) -> Piece:
    return Piece((path,), layer, lambda w: (w,), lambda w: w)


def _transposed(path: str, layer: int | tuple[int, ...] | None) -> Piece:
    return Piece((path,), layer, lambda w: (w.T,), lambda w: w.T)


def _table(path: str, cfg: DecoderConfig) -> Piece:
    """Ours has padding rows at the end."""
    padding = cfg.padded_vocabulary() - cfg.vocabulary_size
    return Piece((path,), None, lambda w: (np.pad(w, ((0, padding), (0, 0))),), lambda w: w[: cfg.vocabulary_size])


def _qkv(mixer: AttentionConfig, size: int, paths: tuple[str, ...], layer: int | None) -> Piece:
    """Rows of all groups; a matrix's second dimension comes first with us. paths: of query, gate if any, key, value."""
    groups = mixer.groups()
    each, wide = mixer.heads // groups, len(paths) - 2

    def split(w: np.ndarray) -> tuple[np.ndarray, ...]:
        rows = w.reshape(groups, wide * each + 2, size, *w.shape[1:])
        per_head = np.split(rows[:, :-2], wide, axis=1)
        parts = (*[part.reshape(mixer.heads, size, *w.shape[1:]) for part in per_head], rows[:, -2], rows[:, -1])
        return tuple(np.moveaxis(part, -1, 0) if w.ndim == 2 else part for part in parts)

    def join(*parts: np.ndarray) -> np.ndarray:
        parts = [np.moveaxis(part, 0, -1) if part.ndim == 3 else part for part in parts]
        rest = parts[0].shape[2:]
        rows = [part.reshape(groups, each, size, *rest) for part in parts[:-2]] + [part[:, None] for part in parts[-2:]]
        return np.concatenate(rows, axis=1).reshape(groups * (wide * each + 2) * size, *rest)

    return Piece(paths, layer, split, join)


def _per_head(heads: int, path: str, layer: int | None) -> Piece:
    """(heads * size, in) -> [in, heads, size]."""
    return Piece(
        (path,),
        layer,
        lambda w: (w.T.reshape(w.shape[1], heads, -1),),
        lambda w: w.reshape(w.shape[0], -1).T,
    )


def _output(heads: int, path: str, layer: int | None) -> Piece:
    return Piece(
        (path,), layer, lambda w: (w.T.reshape(heads, -1, w.shape[0]),), lambda w: w.reshape(-1, w.shape[-1]).T
    )


def _stacked_rows(paths: tuple[str, str], first: int, layer: int | None) -> Piece:
    """Rows of two matrices (out, in), the first `first` of them of the one."""
    return Piece(
        paths, layer, lambda w: (w[:first].T, w[first:].T), lambda one, other: np.concatenate([one.T, other.T])
    )


def _keys_and_values(cfg: LatentAttentionConfig, paths: tuple[str, str], layer: int | None) -> Piece:
    """For each head the rows of its key's content part, then of its value."""

    def split(w: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        rows = w.T.reshape(w.shape[1], cfg.heads, cfg.content_dim + cfg.value_dim)
        return rows[..., : cfg.content_dim], rows[..., cfg.content_dim :]

    def join(key: np.ndarray, value: np.ndarray) -> np.ndarray:
        return np.concatenate([key, value], axis=-1).reshape(key.shape[0], -1).T

    return Piece(paths, layer, split, join)


def _halves(paths: tuple[str, str], layer: int | tuple[int, ...] | None) -> Piece:
    """[gate; up], of a matrix or of a bias."""
    return Piece(
        paths,
        layer,
        lambda w: tuple(half.T for half in np.split(w, 2)),
        lambda gate, up: np.concatenate([gate.T, up.T]),
    )


def _norm(name: str, path: str, cfg: NormConfig | None, layer: int | None) -> dict[str, Piece]:
    if cfg is None or isinstance(cfg, IdentityNormConfig | L2NormConfig):
        return {}
    actual = {f"{name}.weight": _same(f"{path}.gain", layer)}
    if isinstance(cfg, LayerNormConfig):
        actual[f"{name}.bias"] = _same(f"{path}.bias", layer)
    return actual


def _core(name: str, path: str, cfg: SelfAttentionConfig, layer: int | None) -> dict[str, Piece]:
    learned = cfg.sink == "learned"
    return {f"{name}.core_attention.softmax_offset": _same(f"{path}.core.sink", layer)} if learned else {}


def _attention(name: str, path: str, cfg: AttentionConfig, hidden: int, layer: int | None) -> dict[str, Piece]:
    size = cfg.size(hidden)
    actual = _core(name, path, cfg, layer)
    actual[f"{name}.linear_proj.weight"] = _output(cfg.heads, f"{path}.output", layer)
    if cfg.bias:
        actual[f"{name}.linear_proj.bias"] = _same(f"{path}.output_bias", layer)
    parts = tuple(f"{path}.{part}" for part in ("query", *["gate"] * cfg.gate, "key", "value"))
    actual[f"{name}.linear_qkv.weight"] = _qkv(cfg, size, parts, layer)
    if cfg.has_qkv_bias():
        actual[f"{name}.linear_qkv.bias"] = _qkv(cfg, size, tuple(f"{part}_bias" for part in parts), layer)
    actual |= _norm(f"{name}.q_layernorm", f"{path}.query_norm", cfg.qk_norm, layer)
    return actual | _norm(f"{name}.k_layernorm", f"{path}.key_norm", cfg.qk_norm, layer)


def _latent(name: str, path: str, cfg: LatentAttentionConfig, layer: int | None) -> dict[str, Piece]:
    actual = _core(name, path, cfg, layer)
    actual[f"{name}.linear_proj.weight"] = _output(cfg.heads, f"{path}.output", layer)
    if cfg.bias:
        actual[f"{name}.linear_proj.bias"] = _same(f"{path}.output_bias", layer)
    query = _per_head(cfg.heads, f"{path}.query", layer)
    if cfg.query_rank is None:
        actual[f"{name}.linear_q_proj.weight"] = query
    else:
        actual[f"{name}.linear_q_down_proj.weight"] = _transposed(f"{path}.query_down", layer)
        actual[f"{name}.linear_q_up_proj.weight"] = query
    down, up = (f"{path}.down", f"{path}.position_key"), (f"{path}.key", f"{path}.value")
    actual[f"{name}.linear_kv_down_proj.weight"] = _stacked_rows(down, cfg.key_value_rank, layer)
    actual[f"{name}.linear_kv_up_proj.weight"] = _keys_and_values(cfg, up, layer)
    if cfg.query_rank is not None:
        actual |= _norm(f"{name}.q_layernorm", f"{path}.query_norm", cfg.norm, layer)
    return actual | _norm(f"{name}.kv_layernorm", f"{path}.norm", cfg.norm, layer)


def _block(name: str, path: str, block: BlockConfig, hidden: int, layer: int | None) -> dict[str, Piece]:
    mixer, mlp = block.mixer, block.mlp
    actual = _norm(f"{name}.input_layernorm", f"{path}.mixer_norm", block.norm, layer)
    if isinstance(mixer, LatentAttentionConfig):
        actual |= _latent(f"{name}.self_attention", f"{path}.mixer", mixer, layer)
    else:
        actual |= _attention(f"{name}.self_attention", f"{path}.mixer", mixer, hidden, layer)
    actual |= _norm(f"{name}.pre_mlp_layernorm", f"{path}.mlp_norm", block.norm, layer)
    one = _mixture if isinstance(mlp, MoEConfig) else _feed_forward
    return actual | one(f"{name}.mlp", f"{path}.mlp", mlp, layer)


def _feed_forward(name: str, path: str, mlp: MLPConfig, layer: int | tuple[int, ...] | None) -> dict[str, Piece]:
    gated, up, down = isinstance(mlp, GatedMLPConfig), f"{name}.linear_fc1", f"{name}.linear_fc2"
    actual = {}
    matrices, biases = (f"{path}.gate", f"{path}.up"), (f"{path}.gate_bias", f"{path}.up_bias")
    actual[f"{up}.weight"] = _halves(matrices, layer) if gated else _transposed(f"{path}.up", layer)
    if mlp.bias:
        actual[f"{up}.bias"] = _halves(biases, layer) if gated else _same(f"{path}.up_bias", layer)
    actual[f"{down}.weight"] = _transposed(f"{path}.down", layer)
    if mlp.bias:
        actual[f"{down}.bias"] = _same(f"{path}.down_bias", layer)
    return actual


def _mixture(name: str, path: str, moe: MoEConfig, layer: int | None) -> dict[str, Piece]:
    """Experts are apart with them, along a dimension of their own with us."""
    actual = {f"{name}.router.weight": _transposed(f"{path}.router", layer)}
    if moe.router.bias:
        actual[f"{name}.router.bias"] = _same(f"{path}.router_bias", layer)
    for expert in range(moe.experts):
        place = (expert,) if layer is None else (layer, expert)
        actual |= _feed_forward(f"{name}.experts.local_experts.{expert}", f"{path}.experts", moe.expert, place)
    if moe.shared is not None:
        if moe.shared.gate:
            actual[f"{name}.shared_experts.gate_weight"] = _transposed(f"{path}.shared_gate", layer)
        actual |= _feed_forward(f"{name}.shared_experts", f"{path}.shared", moe.shared.mlp, layer)
    return actual


def _projections(mixer: Mamba2Config, paths: tuple[str, ...], layer: int | None) -> Piece:
    """in_proj: rows of z, x, b, c and dt, one after another."""
    head, group = (mixer.heads, mixer.head_dim), (mixer.groups, mixer.state)
    shapes = (head, head, group, group, (mixer.heads,))
    ends = np.cumsum([np.prod(shape) for shape in shapes])

    def split(w: np.ndarray) -> tuple[np.ndarray, ...]:
        rows = np.split(w, ends[:-1])
        return tuple(part.T.reshape(-1, *shape) for part, shape in zip(rows, shapes, strict=True))

    return Piece(paths, layer, split, lambda *parts: np.concatenate([w.reshape(w.shape[0], -1).T for w in parts]))


def _convolution(mixer: Mamba2Config, name: str, path: str, layer: int | None) -> Piece:
    """Channels of x, b and c, one after another: (channels, 1, positions), or the bias (channels)."""
    shapes = ((mixer.heads, mixer.head_dim), *[(mixer.groups, mixer.state)] * 2)
    ends = np.cumsum([np.prod(shape) for shape in shapes])
    paths = tuple(f"{path}.conv_{part}.{name}" for part in "xbc")
    rest = (mixer.conv_kernel,) if name == "kernel" else ()

    def split(w: np.ndarray) -> tuple[np.ndarray, ...]:
        rows = np.split(w.reshape(-1, *rest).T, ends[:-1], axis=-1)
        return tuple(part.reshape(*rest, *shape) for part, shape in zip(rows, shapes, strict=True))

    def join(*parts: np.ndarray) -> np.ndarray:
        whole = np.concatenate([w.reshape(*rest, -1) for w in parts], axis=-1)
        return whole.T[:, None] if rest else whole

    return Piece(paths, layer, split, join)


def _mamba(name: str, path: str, mixer: Mamba2Config, layer: int | None) -> dict[str, Piece]:
    actual = {f"{name}.conv1d_weight": _convolution(mixer, "kernel", path, layer)}
    if mixer.conv_bias:
        actual[f"{name}.conv1d_bias"] = _convolution(mixer, "bias", path, layer)
    actual |= {
        f"{name}.{theirs}": _same(f"{path}.{ours}", layer)
        for theirs, ours in (("dt_bias", "dt_bias"), ("A_log", "a_log"), ("D", "skip"))
    }
    inputs = tuple(f"{path}.in_{part}" for part in ("z", "x", "b", "c", "dt"))
    head = mixer.heads, mixer.head_dim
    return {
        **actual,
        f"{name}.in_proj.weight": _projections(mixer, inputs, layer),
        f"{name}.norm.weight": Piece(
            (f"{path}.norm_gain",), layer, lambda w: (w.reshape(head),), lambda w: w.reshape(-1)
        ),
        f"{name}.out_proj.weight": _output(mixer.heads, f"{path}.output", layer),
    }


def _single(
    name: str, path: str, block: MixerBlockConfig | FeedForwardBlockConfig, hidden: int, layer: int | None
) -> dict[str, Piece]:
    """A layer of a hybrid: the one half of a transformer's, or Mamba-2."""
    if isinstance(block, MixerBlockConfig) and isinstance(block.mixer, Mamba2Config):
        norm = _norm(f"{name}.norm", f"{path}.mixer_norm", block.norm, layer)
        return _mamba(f"{name}.mixer", f"{path}.mixer", block.mixer, layer) | norm
    mixes = isinstance(block, MixerBlockConfig)
    mixer, mlp = (block.mixer, DenseMLPConfig(ffn=1)) if mixes else (AttentionConfig(heads=1), block.mlp)
    whole = _block(name, path, BlockConfig(mixer=mixer, mlp=mlp, norm=block.norm), hidden, layer)
    return {theirs: piece for theirs, piece in whole.items() if ("mlp" not in theirs) == mixes}


def _prediction(number: int, cfg: DecoderConfig) -> dict[str, Piece]:
    name, path, block = f"mtp.layers.{number}", f"predictions.{number}", cfg.predicting_blocks()[number]
    actual = _norm(f"{name}.enorm", f"{path}.embedding_norm", cfg.norm, None)
    actual |= _norm(f"{name}.hnorm", f"{path}.state_norm", cfg.norm, None)
    actual[f"{name}.eh_proj.weight"] = Piece(
        (f"{path}.from_embedding", f"{path}.from_state"),
        None,
        lambda w: tuple(half.T for half in np.split(w, 2, axis=1)),
        lambda embedding, state: np.concatenate([embedding.T, state.T], axis=1),
    )
    actual |= _block(f"{name}.mtp_model_layer", f"{path}.block", block, cfg.hidden, None)
    return actual | _norm(f"{name}.final_layernorm", f"{path}.norm", cfg.norm, None)


def pieces(cfg: DecoderConfig) -> dict[str, Piece]:
    """Megatron-LM's name -> its place in ours, in the order of its named_parameters()."""
    if isinstance(cfg, T5Config):
        return _t5(cfg)
    return _bert(cfg) if isinstance(cfg, BertConfig) else _decoder(cfg)


def _vocabulary_bias(path: str, cfg: DecoderConfig) -> Piece:
    padding = cfg.padded_vocabulary() - cfg.vocabulary_size
    return Piece((path,), None, lambda w: (np.pad(w, (0, padding)),), lambda w: w[: cfg.vocabulary_size])


def _cross(name: str, path: str, block: CrossBlockConfig, hidden: int, layer: int) -> dict[str, Piece]:
    """The third part of a block of T5's decoder; `linear_kv` has for each head the rows of the key, then the value."""
    cross, where = block.cross, f"{path}.cross"
    groups, size = cross.groups(), cross.size(hidden)

    def split(w: np.ndarray) -> tuple[np.ndarray, ...]:
        rows = w.reshape(groups, 2, size, *w.shape[1:])
        return tuple(np.moveaxis(part, -1, 0) if w.ndim == 2 else part for part in (rows[:, 0], rows[:, 1]))

    def join(key: np.ndarray, value: np.ndarray) -> np.ndarray:
        parts = [np.moveaxis(part, 0, -1) if part.ndim == 3 else part for part in (key, value)]
        return np.stack(parts, axis=1).reshape(2 * groups * size, *parts[0].shape[2:])

    actual = _norm(f"{name}.pre_cross_attn_layernorm", f"{path}.cross_norm", block.norm, layer)
    name = f"{name}.cross_attention"
    actual[f"{name}.linear_proj.weight"] = _output(cross.heads, f"{where}.output", layer)
    if cross.bias:
        actual[f"{name}.linear_proj.bias"] = _same(f"{where}.output_bias", layer)
    actual[f"{name}.linear_q.weight"] = _per_head(cross.heads, f"{where}.query", layer)
    if cross.has_qkv_bias():
        actual[f"{name}.linear_q.bias"] = Piece(
            (f"{where}.query_bias",), layer, lambda w: (w.reshape(cross.heads, size),), lambda w: w.reshape(-1)
        )
    actual[f"{name}.linear_kv.weight"] = Piece((f"{where}.key", f"{where}.value"), layer, split, join)
    if cross.has_qkv_bias():
        actual[f"{name}.linear_kv.bias"] = Piece((f"{where}.key_bias", f"{where}.value_bias"), layer, split, join)
    return actual


def _t5(cfg: T5Config) -> dict[str, Piece]:
    actual = {"embedding.word_embeddings.weight": _table("tokens", cfg)}
    if cfg.learned_positions:
        actual["embedding.position_embeddings.weight"] = _same("positions")
    for name, stack in (("encoder", cfg.encoder), ("decoder", cfg.stack)):
        if stack.shared_weights():
            path = f"{'encoder.' if name == 'encoder' else ''}stack.relative.table"
            actual[f"{name}_relative_pos_emb.relative_attention_bias.weight"] = _same(path)
    for number in range(cfg.encoder.layers()):
        block = cfg.encoder.pattern[0]
        actual |= _block(f"encoder.layers.{number}", "encoder.stack.blocks.0", block, cfg.hidden, number)
    actual |= _norm("encoder.final_layernorm", "encoder.norm", cfg.norm, None)
    for number in range(cfg.stack.layers()):
        name, path, block = f"decoder.layers.{number}", "stack.blocks.0", cfg.stack.pattern[0]
        own = _block(name, path, block, cfg.hidden, number)
        crossing = _cross(name, path, block, cfg.hidden, number)
        actual |= {key: piece for key, piece in own.items() if "mlp" not in key} | crossing
        actual |= {key: piece for key, piece in own.items() if "mlp" in key}
    actual |= _norm("decoder.final_layernorm", "norm", cfg.norm, None)
    if not cfg.tied:
        return actual | {"lm_head.output_layer.weight": _table("head", cfg)}
    return actual | {"lm_head.output_layer.bias": _vocabulary_bias("head_bias", cfg)}


def _dense(name: str, path: str) -> dict[str, Piece]:
    return {f"{name}.weight": _transposed(f"{path}.matrix", None), f"{name}.bias": _same(f"{path}.bias")}


def _bert(cfg: BertConfig) -> dict[str, Piece]:
    actual = {"embedding.word_embeddings.weight": _table("tokens", cfg)}
    actual["embedding.position_embeddings.weight"] = _same("positions")
    if cfg.token_types:
        actual["embedding.tokentype_embeddings.weight"] = _same("types")
    for number in range(cfg.stack.layers()):
        actual |= _block(f"encoder.layers.{number}", "stack.blocks.0", cfg.stack.pattern[0], cfg.hidden, number)
    actual |= _norm("encoder.final_layernorm", "norm", cfg.norm, None)
    actual |= _dense("lm_head.dense", "masked") | _norm("lm_head.layer_norm", "masked_norm", cfg.norm, None)
    actual["output_layer.bias"] = _vocabulary_bias("masked_bias", cfg)
    if cfg.next_sentence:
        actual |= {"binary_head.weight": _transposed("order", None), "binary_head.bias": _same("order_bias")}
        actual |= _dense("pooler.dense", "pooler")
    return actual


def layer_places(cfg: DecoderConfig) -> list[tuple[str, int, BlockConfig]]:
    """(path, row of its stacked weights, config) of each layer."""
    places = {
        layer: (f"stack.blocks.{number}", row, block)
        for number, (block, layers) in enumerate(cfg.stack.stored())
        for row, layer in enumerate(layers)
    }
    return [places[layer] for layer in sorted(places)]


def _decoder(cfg: DecoderConfig) -> dict[str, Piece]:
    actual = {"embedding.word_embeddings.weight": _table("tokens", cfg)}
    if cfg.learned_positions:
        actual["embedding.position_embeddings.weight"] = _same("positions")
    for number, (path, row, block) in enumerate(layer_places(cfg)):
        of = _block if isinstance(block, BlockConfig) else _single
        actual |= of(f"decoder.layers.{number}", path, block, cfg.hidden, row)
    hybrid = not isinstance(cfg.stack.pattern[0], BlockConfig)
    actual |= _norm("decoder.final_norm" if hybrid else "decoder.final_layernorm", "norm", cfg.norm, None)
    for number in range(len(cfg.predicting_blocks())):
        actual |= _prediction(number, cfg)
    if not cfg.tied:
        actual["output_layer.weight"] = _table("head", cfg)
    return actual


def from_pieces(table: Mapping[str, Piece], ours: Arrays) -> dict[str, np.ndarray]:
    """Our weights, or gradients, by path -> theirs by name."""

    def held(path: str, layer: int | None) -> np.ndarray:
        return np.asarray(ours[path] if layer is None else ours[path][layer])

    return {name: piece.join(*[held(path, piece.layer) for path in piece.paths]) for name, piece in table.items()}


def into_pieces(table: Mapping[str, Piece], theirs: Arrays) -> dict[str, np.ndarray]:
    """Their weights by name -> ours by path. Raises ValueError when the names are not those of the table."""
    if set(table) != set(theirs):
        raise ValueError(f"names differ: {sorted(set(table) ^ set(theirs))}")
    actual: dict[str, dict[tuple[int, ...], np.ndarray]] = {}
    for name, piece in table.items():
        layer = piece.layer
        place = layer if isinstance(layer, tuple) else () if layer is None else (layer,)
        for path, part in zip(piece.paths, piece.split(theirs[name]), strict=True):
            actual.setdefault(path, {})[place] = part
    return {path: _stacked(parts) for path, parts in actual.items()}


def _stacked(parts: Mapping[tuple[int, ...], np.ndarray]) -> np.ndarray:
    """Arrays by their places along leading dimensions, as one; every place has one."""
    sizes = tuple(max(along) + 1 for along in zip(*parts, strict=True))
    assert len(parts) == np.prod(sizes)
    first = next(iter(parts.values()))
    whole = np.empty((*sizes, *first.shape), first.dtype)
    for place, part in parts.items():
        whole[place] = part
    return whole


def to_megatron(cfg: DecoderConfig, ours: Arrays) -> dict[str, np.ndarray]:
    """Our weights, or gradients, by path -> theirs by name."""
    return from_pieces(pieces(cfg), ours)


def to_ours(cfg: DecoderConfig, theirs: Arrays) -> dict[str, np.ndarray]:
    """Their weights by name -> ours by path. Raises ValueError when the names are not those the config has."""
    return into_pieces(pieces(cfg), theirs)


def images_pieces(cfg: VisionTowerConfig) -> dict[str, Piece]:
    """Those of a CLIPViTModel, in the order of its named_parameters()."""
    actual = {}
    if cfg.class_tokens:
        actual["class_token"] = Piece(("class_tokens",), None, lambda w: (w[0],), lambda w: w[None])
    actual |= _norm("ln_pre", "entry_norm", cfg.entry_norm, None) | _norm("ln_post", "norm", cfg.norm, None)

    def convolution(w: np.ndarray) -> np.ndarray:
        return w.reshape(cfg.patch, cfg.patch, 3, -1).transpose(3, 2, 0, 1)

    actual["conv1.weight"] = Piece(
        ("patches",), None, lambda w: (w.transpose(2, 3, 1, 0).reshape(-1, w.shape[0]),), convolution
    )
    if cfg.patch_bias:
        actual["conv1.bias"] = _same("patch_bias")
    actual["position_embeddings.weight"] = _same("positions")
    for number in range(cfg.stack.layers()):
        actual |= _block(f"decoder.layers.{number}", "stack.blocks.0", cfg.stack.pattern[0], cfg.hidden, number)
    return actual


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
