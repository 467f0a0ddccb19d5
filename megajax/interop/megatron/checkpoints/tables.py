"""Tables of Megatron-LM's tensor names for GPT and its relatives, BERT and T5.

The names are those of `named_parameters()` with layers of plain torch ("local" specifications), numbered over the
whole model; `names` in this folder converts other spellings. Linear weights are (out, in). For each key-value head,
`linear_qkv` has the rows of its query heads, then of the key, then of the value. A gated `linear_fc1` has the rows of
the gate, then those of the up projection.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from megajax.interop.weights.name_mapping import Row
from megajax.layers.attention.config import AttentionConfig
from megajax.layers.attention.latent_config import LatentAttentionConfig
from megajax.layers.mamba.config import Mamba2Config
from megajax.layers.mlp.config import GatedMLPConfig
from megajax.layers.moe.config import MoEConfig
from megajax.models.bert.config import BertConfig
from megajax.models.decoder.config import DecoderConfig
from megajax.models.t5.config import T5Config

DECODER, ENCODER = "decoder.layers.{layer}", "encoder.layers.{layer}"


def table(cfg: DecoderConfig) -> list[Row]:
    """The rows of a model."""
    if isinstance(cfg, T5Config):
        return _t5(cfg)
    return _bert(cfg) if isinstance(cfg, BertConfig) else _decoder(cfg)


def second_names(cfg: DecoderConfig) -> Mapping[str, str]:
    """Name in the table -> other name of the same tensor. Megatron-LM's T5 stores these tensors under both."""
    names = {"embedding": ("position_embeddings.weight",), "lm_head": ("output_layer.weight", "output_layer.bias")}
    pairs = {f"{owner}.{name}": name for owner, owned in names.items() for name in owned}
    return pairs if isinstance(cfg, T5Config) else {}


def _tokens(cfg: DecoderConfig, tensor: str, path: str) -> Row:
    """A table or a bias with a row for each token, without the padding rows of the weight."""
    return Row(tensor, path, index=(slice(0, cfg.vocabulary_size),))


def _norm(tensor: str, path: str) -> list[Row]:
    return [Row(f"{tensor}.weight", f"{path}.gain"), Row(f"{tensor}.bias", f"{path}.bias")]


def _dense(tensor: str, path: str) -> list[Row]:
    return [Row(f"{tensor}.weight", f"{path}.matrix", "o i -> i o"), Row(f"{tensor}.bias", f"{path}.bias")]


def _projection(tensor: str, path: str) -> list[Row]:
    """The output projection of attention."""
    return [Row(f"{tensor}.weight", f"{path}.output", "d (n h) -> n h d"), Row(f"{tensor}.bias", f"{path}.output_bias")]


def _queries(tensor: str, path: str) -> list[Row]:
    return [
        Row(f"{tensor}.weight", f"{path}.query", "(n h) d -> d n h"),
        Row(f"{tensor}.bias", f"{path}.query_bias", "(n h) -> n h"),
    ]


def _fused(tensor: str, path: str, parts: Sequence[str], groups: int, size: int) -> list[Row]:
    """A fused projection: for each group of heads, the rows of all parts."""
    sizes = {"g": groups, "h": size}
    matrices, biases = tuple(f"{path}.{part}" for part in parts), tuple(f"{path}.{part}_bias" for part in parts)
    return [
        Row(f"{tensor}.weight", matrices, "g n h d -> d (g n) h", split="(g n h) d -> g n h d", axis=1, sizes=sizes),
        Row(f"{tensor}.bias", biases, "g n h -> (g n) h", split="(g n h) -> g n h", axis=1, sizes=sizes),
    ]


def _attention(tensor: str, path: str, cfg: AttentionConfig, hidden: int) -> Iterator[Row]:
    yield Row(f"{tensor}.core_attention.softmax_offset", f"{path}.core.sink")
    yield from _projection(f"{tensor}.linear_proj", path)
    parts = ("query", *["gate"] * cfg.gate, "key", "value")
    yield from _fused(f"{tensor}.linear_qkv", path, parts, cfg.groups(), cfg.size(hidden))
    yield from _norm(f"{tensor}.q_layernorm", f"{path}.query_norm")
    yield from _norm(f"{tensor}.k_layernorm", f"{path}.key_norm")


def _latent(tensor: str, path: str, cfg: LatentAttentionConfig) -> Iterator[Row]:
    yield Row(f"{tensor}.core_attention.softmax_offset", f"{path}.core.sink")
    yield from _projection(f"{tensor}.linear_proj", path)
    yield from _queries(f"{tensor}.linear_q_proj" if cfg.query_rank is None else f"{tensor}.linear_q_up_proj", path)
    yield Row(f"{tensor}.linear_q_down_proj.weight", f"{path}.query_down", "o i -> i o")
    yield Row(f"{tensor}.linear_kv_down_proj.weight", (f"{path}.down", f"{path}.position_key"), "o i -> i o")
    yield Row(
        f"{tensor}.linear_kv_up_proj.weight",
        (f"{path}.key", f"{path}.value"),
        "n h r -> r n h",
        split="(n h) r -> n h r",
        axis=1,
        sizes={"n": cfg.heads},
    )
    yield from _norm(f"{tensor}.q_layernorm", f"{path}.query_norm")
    yield from _norm(f"{tensor}.kv_layernorm", f"{path}.norm")


def _feed_forward(tensor: str, path: str, cfg: Any) -> Iterator[Row]:
    gated = isinstance(cfg, GatedMLPConfig)
    matrices, biases = (f"{path}.gate", f"{path}.up"), (f"{path}.gate_bias", f"{path}.up_bias")
    yield Row(f"{tensor}.linear_fc1.weight", matrices if gated else matrices[1], "o i -> i o")
    yield Row(f"{tensor}.linear_fc1.bias", biases if gated else biases[1])
    yield Row(f"{tensor}.linear_fc2.weight", f"{path}.down", "o i -> i o")
    yield Row(f"{tensor}.linear_fc2.bias", f"{path}.down_bias")


def _mixture(tensor: str, path: str, cfg: MoEConfig) -> Iterator[Row]:
    yield Row(f"{tensor}.router.weight", f"{path}.router", "o i -> i o")
    yield Row(f"{tensor}.router.bias", f"{path}.router_bias")
    if cfg.router.balance_rate is not None:
        yield Row(f"{tensor}.router.expert_bias", f"{path}.load.sum", index=(0,))
    yield from _feed_forward(f"{tensor}.experts.local_experts.{{expert}}", f"{path}.experts", cfg.expert)
    yield Row(f"{tensor}.fc1_latent_proj.weight", f"{path}.latent_down", "o i -> i o")
    yield Row(f"{tensor}.fc2_latent_proj.weight", f"{path}.latent_up", "o i -> i o")
    if cfg.shared is not None:
        yield Row(f"{tensor}.shared_experts.gate_weight", f"{path}.shared_gate", "o i -> i o")
        yield from _feed_forward(f"{tensor}.shared_experts", f"{path}.shared", cfg.shared.mlp)


def _mamba(tensor: str, path: str) -> Iterator[Row]:
    """Mamba-2: in_proj has rows of z, x, b, c and dt, the convolution channels of x, b and c."""
    yield from _norm(f"{tensor}.norm", f"{path}.mixer_norm")
    inputs = tuple(f"{path}.mixer.in_{part}" for part in ("z", "x", "b", "c", "dt"))
    yield Row(f"{tensor}.mixer.in_proj.weight", inputs, (*["(n h) d -> d n h"] * 4, "n d -> d n"))
    for name, part, pattern in (("weight", "kernel", "(n h) 1 k -> k n h"), ("bias", "bias", "(n h) -> n h")):
        paths = tuple(f"{path}.mixer.conv_{letter}.{part}" for letter in "xbc")
        yield Row(f"{tensor}.mixer.conv1d_{name}", paths, pattern)
    for name, part in (("dt_bias", "dt_bias"), ("A_log", "a_log"), ("D", "skip")):
        yield Row(f"{tensor}.mixer.{name}", f"{path}.mixer.{part}")
    yield Row(f"{tensor}.mixer.norm.weight", f"{path}.mixer.norm_gain", "(n h) -> n h")
    yield Row(f"{tensor}.mixer.out_proj.weight", f"{path}.mixer.output", "d (n h) -> n h d")


def _of_blocks_with(weight: str, rows: Iterable[Row]) -> list[Row]:
    """Rows of the blocks of a hybrid that have this weight. Other blocks have weights of the same names."""
    return [replace(row, requires=weight) for row in rows]


def _mixers(tensor: str, path: str, mixers: Sequence[Any], hidden: int) -> list[Row]:
    """The mixers of blocks, with their norms."""
    rows = _norm(f"{tensor}.input_layernorm", f"{path}.mixer_norm")
    if latent := [mixer for mixer in mixers if isinstance(mixer, LatentAttentionConfig)]:
        rows += _latent(f"{tensor}.self_attention", f"{path}.mixer", latent[0])
    elif plain := [mixer for mixer in mixers if isinstance(mixer, AttentionConfig)]:
        rows += _attention(f"{tensor}.self_attention", f"{path}.mixer", plain[0], hidden)
    if not any(isinstance(mixer, Mamba2Config) for mixer in mixers):
        return rows
    rows = _of_blocks_with(f"{path}.mixer.query", rows)
    return rows + _of_blocks_with(f"{path}.mixer.a_log", _mamba(tensor, path))


def blocks(tensor: str, path: str, layers: Sequence[Any], hidden: int) -> list[Row]:
    """The rows of blocks. tensor, path: prefixes of a block's tensors and weights; layers: the configs of the blocks.

    All blocks of a table have the same kind of attention, and feed-forward layers with a gate or all without.
    """
    parts = [block.parts() for block in layers]
    mlps = [part["mlp"] for part in parts if "mlp" in part]
    rows = _mixers(tensor, path, [part["mixer"] for part in parts if "mixer" in part], hidden)
    rows += _norm(f"{tensor}.pre_mlp_layernorm", f"{path}.mlp_norm")
    if mixtures := [mlp for mlp in mlps if isinstance(mlp, MoEConfig)]:
        rows += _mixture(f"{tensor}.mlp", f"{path}.mlp", mixtures[0])
    if dense := [mlp for mlp in mlps if not isinstance(mlp, MoEConfig)]:
        rows += _feed_forward(f"{tensor}.mlp", f"{path}.mlp", dense[0])
    return rows


def _decoder(cfg: DecoderConfig) -> list[Row]:
    layers = [block for block, _ in cfg.stack.stored()]
    is_standard = all({"mixer", "mlp"} <= block.parts().keys() for block in layers)
    rows = [
        _tokens(cfg, "embedding.word_embeddings.weight", "tokens"),
        Row("embedding.position_embeddings.weight", "positions"),
        *blocks(DECODER, "stack.*", layers, cfg.hidden),
        *_norm("decoder.final_layernorm" if is_standard else "decoder.final_norm", "norm"),
        _tokens(cfg, "output_layer.weight", "head"),
    ]
    for number, block in enumerate(cfg.predicting_blocks()):
        rows += _prediction(f"mtp.layers.{number}", f"predictions.{number}", block, cfg.hidden)
    return rows


def _prediction(tensor: str, path: str, block: Any, hidden: int) -> list[Row]:
    """A multi-token prediction block."""
    halves = (f"{path}.from_embedding", f"{path}.from_state")
    return [
        *_norm(f"{tensor}.enorm", f"{path}.embedding_norm"),
        *_norm(f"{tensor}.hnorm", f"{path}.state_norm"),
        Row(f"{tensor}.eh_proj.weight", halves, "o i -> i o", axis=1),
        *blocks(f"{tensor}.mtp_model_layer", f"{path}.block", [block], hidden),
        *_norm(f"{tensor}.final_layernorm", f"{path}.norm"),
    ]


def _bert(cfg: BertConfig) -> list[Row]:
    return [
        _tokens(cfg, "embedding.word_embeddings.weight", "tokens"),
        Row("embedding.position_embeddings.weight", "positions"),
        Row("embedding.tokentype_embeddings.weight", "types"),
        *blocks(ENCODER, "stack.*", [block for block, _ in cfg.stack.stored()], cfg.hidden),
        *_norm("encoder.final_layernorm", "norm"),
        *_dense("lm_head.dense", "masked"),
        *_norm("lm_head.layer_norm", "masked_norm"),
        _tokens(cfg, "output_layer.bias", "masked_bias"),
        _tokens(cfg, "output_layer.weight", "head"),
        Row("binary_head.weight", "order", "o i -> i o"),
        Row("binary_head.bias", "order_bias"),
        *_dense("pooler.dense", "pooler"),
    ]


def _t5(cfg: T5Config) -> list[Row]:
    encoder, decoder = ([block for block, _ in stack.stored()] for stack in (cfg.encoder, cfg.stack))
    bias = "relative_pos_emb.relative_attention_bias.weight"
    cross = next(block.cross for block in decoder if block.cross is not None)
    tensor, path = f"{DECODER}.cross_attention", "stack.*.cross"
    return [
        _tokens(cfg, "embedding.word_embeddings.weight", "tokens"),
        Row("embedding.position_embeddings.weight", "positions"),
        Row(f"encoder_{bias}", "encoder.stack.relative.table"),
        Row(f"decoder_{bias}", "stack.relative.table"),
        *blocks(ENCODER, "encoder.stack.*", encoder, cfg.hidden),
        *_norm("encoder.final_layernorm", "encoder.norm"),
        *blocks(DECODER, "stack.*", decoder, cfg.hidden),
        *_norm(f"{DECODER}.pre_cross_attn_layernorm", "stack.*.cross_norm"),
        *_projection(f"{tensor}.linear_proj", path),
        *_queries(f"{tensor}.linear_q", path),
        *_fused(f"{tensor}.linear_kv", path, ("key", "value"), cross.groups(), cross.size(cfg.hidden)),
        *_norm("decoder.final_layernorm", "norm"),
        _tokens(cfg, "lm_head.output_layer.weight", "head"),
        _tokens(cfg, "lm_head.output_layer.bias", "head_bias"),
    ]
